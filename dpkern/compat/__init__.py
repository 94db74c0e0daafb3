"""Interfaces of other packages over dpkern's, for programs that change an import."""
