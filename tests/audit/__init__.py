"""Tests of ``dpkern.audit``."""
