"""GReDP: noise on gradients in the frequency domain."""
