"""Releases whose claims are true."""
