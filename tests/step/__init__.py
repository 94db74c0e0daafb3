"""Tests of ``dpkern.step``."""
