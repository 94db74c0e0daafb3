"""Exit codes of the command line."""

CHECK_FAILED = 1
"""A checked model cannot be trained privately, or an audit contradicts what it tested."""

REFUSED = 2
"""Nothing was done; one message says what to do."""

INTERRUPTED = 130
"""Stopped by the user, as shells number it."""
