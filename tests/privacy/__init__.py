"""Tests of ``dpkern.privacy``."""
