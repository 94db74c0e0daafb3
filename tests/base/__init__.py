"""Tests of ``dpkern.base``."""
