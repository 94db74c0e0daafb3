"""Tests of ``dpkern.reports``."""
