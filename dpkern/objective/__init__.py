"""Training that perturbs a loss instead of gradients, many runs in one computation."""
