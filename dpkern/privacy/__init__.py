"""The trusted base: what a reviewer reads to believe an epsilon."""
