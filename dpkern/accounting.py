"""The public name of ``dpkern.privacy.accounting``: what a mechanism certifies."""

from .privacy.accounting import *  # noqa: F403
from .privacy.accounting import __all__ as __all__
from .privacy.accounting import accountants as accountants
from .privacy.accounting import events as events
