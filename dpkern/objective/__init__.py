"""Trainers that perturb a loss: no engine, no files but the user's table, no command line."""
