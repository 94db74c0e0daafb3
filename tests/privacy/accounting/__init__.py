"""Tests of ``dpkern.privacy.accounting``."""
