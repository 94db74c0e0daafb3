"""Tests of ``dpkern.ops.backends``."""
