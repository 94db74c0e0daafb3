"""SPOF: the stabilised perturbed loss of an autoencoder."""
