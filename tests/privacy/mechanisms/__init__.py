"""Tests of ``dpkern.privacy.mechanisms``."""
