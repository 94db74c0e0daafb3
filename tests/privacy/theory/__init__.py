"""Tests of ``dpkern.privacy.theory``."""
