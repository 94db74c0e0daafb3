"""Word the refusals of inputs and losses."""

from __future__ import annotations

from torch import Tensor

from ...errors import PrivacyError, UnsupportedModule
from .states import Mixed, OneRecord, RecordSum, State

HOW_TO_ADOPT = (
    "Iterate over the loader of make_private and pass its tensors on. For tensors made otherwise, "
    "engine.adopt(tensor) vouches that row i depends on record i of the current batch alone."
)


def mixed_input(name: str, state: Mixed) -> UnsupportedModule:
    return UnsupportedModule(
        name,
        expected="rows that come from one record each",
        got=f"{state.operation}, which {state.how} ({state.where})",
        remedy="Change each sample by itself, with constants or its own random numbers. If "
        "the operation "
        "does so, pass engine.adopt(tensor).",
    )


def wrong_rows(name: str, tensor: Tensor, state: State) -> UnsupportedModule:
    what = {
        OneRecord: "a single sample without a dimension for the batch",
        RecordSum: "a sum over samples",
    }.get(type(state), "the samples in another dimension")
    return UnsupportedModule(
        name,
        expected="the samples in the first dimension",
        got=f"{what}, shape {list(tensor.shape)}",
        remedy="Keep the batch first, for example x[i : i + 1] instead of x[i].",
    )


def two_batches(name: str) -> PrivacyError:
    return PrivacyError(
        name,
        expected="samples of one batch",
        got="samples of two batches together",
        remedy="Do not keep samples for later batches: a record would be in two steps.",
    )


def mixed_loss(state: Mixed) -> UnsupportedModule:
    return UnsupportedModule(
        "loss",
        expected="a sum or a mean over samples, each with a term of its own",
        got=f"{state.operation}, which {state.how} ({state.where})",
        remedy="Compute one number for each sample and take its mean. dpkern.losses has "
        "masked and weighted "
        "means; engine.adopt(terms) vouches for one number for each sample that was "
        "computed otherwise.",
    )
