"""Training with the private step: how batches are drawn and how PyTorch is joined."""
