"""Tests of ``dpkern.engine``."""
