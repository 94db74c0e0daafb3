"""Tests of ``dpkern.nn``."""
