"""The lowest package: declarations, checks and numbers that every other package uses."""
