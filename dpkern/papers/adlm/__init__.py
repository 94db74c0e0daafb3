"""AdLM: adaptive Laplace noise on relevances, inputs and the loss."""
