"""Releases whose claims are false."""
