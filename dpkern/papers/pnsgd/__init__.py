"""Lecture notes on private projected SGD, subsampling and local privacy."""
