"""Build the networks of the experiments by name."""
