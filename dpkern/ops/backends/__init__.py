"""The backends of ops. Nothing above this package knows which backend ran a call."""
