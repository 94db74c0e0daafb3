"""The proofs of the noise distributions."""
