"""Tests of ``dpkern.cost``."""
