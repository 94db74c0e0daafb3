"""Tests of ``dpkern.papers``."""
