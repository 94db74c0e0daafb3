"""Directional noise for DP-SGD."""
