"""What every other package stands on: declarations, checks, numbers."""
