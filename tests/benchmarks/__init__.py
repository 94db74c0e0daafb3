"""Tests of the benchmarks and their scripts."""
