"""Train privately inside Hugging Face Trainer, Accelerate and Lightning.

Each framework has a module here, which imports it: ``integrations.transformers``,
``integrations.accelerate``, ``integrations.lightning``. What they share: a step of the framework is
a whole logical batch, in as many physical batches as memory asks for, so that schedules and step
counts see releases and nothing else.
"""

from .arguments import PrivacyArguments
from .shards import IndexedShards

__all__ = ["IndexedShards", "PrivacyArguments"]
