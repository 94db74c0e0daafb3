"""Tests of ``dpkern.train``."""
