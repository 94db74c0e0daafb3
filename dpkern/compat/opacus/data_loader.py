"""The private loader by the name that Opacus' scripts import; ``make_private`` makes it."""

from ...engine.loader import PrivateLoader

DPDataLoader = PrivateLoader

__all__ = ["DPDataLoader"]
