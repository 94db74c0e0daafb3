"""What can be audited: the public name of ``dpkern.audit.subjects``."""

from .audit.subjects import catalogue

__all__ = ["catalogue"]
