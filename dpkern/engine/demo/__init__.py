"""Networks of the experiments, by name."""
