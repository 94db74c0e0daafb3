"""Tests that take minutes: examples, reproductions, wheels."""
