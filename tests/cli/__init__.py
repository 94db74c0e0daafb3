"""Tests of ``dpkern.cli``."""
