"""The model constructs that users of private training trip over, in one table.

Every entry is a ``Construct`` (see ``construct_kit``): a model of small sizes, inputs of B samples,
a loss per sample, and what must happen: ``correct``, or one typed error.
"""

from __future__ import annotations

from tests.construct_custom import CUSTOM
from tests.construct_kit import Construct, Refused
from tests.construct_layers import LAYERS
from tests.construct_refused import REFUSED

CONSTRUCTS: list[Construct] = [*LAYERS, *CUSTOM, *REFUSED]

__all__ = ["CONSTRUCTS", "Construct", "Refused"]
