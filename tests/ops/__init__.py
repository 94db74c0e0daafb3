"""Tests of ``dpkern.ops``."""
