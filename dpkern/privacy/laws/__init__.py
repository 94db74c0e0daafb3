"""The proofs of the noise laws."""
