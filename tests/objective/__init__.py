"""Tests of ``dpkern.objective``."""
