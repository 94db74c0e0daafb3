"""Who runs an op. Nothing above this package knows which backend it was."""
