"""The model constructs that users of private training trip over, in one table.

Every entry is a ``Construct`` (see ``construct_kit``): a model of small sizes, inputs of B samples,
a loss per sample, and what must happen: ``correct``, or one typed error.
"""

from __future__ import annotations

from tests.engine.construct_architectures import ARCHITECTURES, ARCHITECTURES_REFUSED
from tests.engine.construct_custom import CUSTOM
from tests.engine.construct_kit import Construct, Refused
from tests.engine.construct_layers import LAYERS
from tests.engine.construct_refused import REFUSED

CONSTRUCTS: list[Construct] = [
    *LAYERS,
    *CUSTOM,
    *ARCHITECTURES,
    *REFUSED,
    *ARCHITECTURES_REFUSED,
]

__all__ = ["CONSTRUCTS", "Construct", "Refused"]
