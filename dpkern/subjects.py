"""The public name of ``dpkern.audit.subjects``: what can be audited."""

from .audit.subjects import catalogue

__all__ = ["catalogue"]
