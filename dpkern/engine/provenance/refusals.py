"""Write the errors for inputs and losses that are refused."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...base.errors import InvalidInput, PrivacyError, UnsupportedModule
from .states import Mixed, OneRecord, RecordSum, State
from .wrappers import remedy_of_wrapper

HOW_TO_ADOPT = (
    "Iterate over the loader of make_private and pass its tensors on. For tensors made otherwise, "
    "engine.adopt(tensor) vouches that row i depends on record i of the current batch alone."
)


def mixed_input(name: str, state: Mixed) -> UnsupportedModule:
    """Return the error for an input whose rows mix records."""
    return UnsupportedModule(
        name,
        expected="rows that come from one record each",
        got=f"{state.operation}, which {state.how} ({state.where})",
        remedy="Change each sample by itself, with constants or its own random numbers. If the "
        "operation does so, pass engine.adopt(tensor).",
    )


def wrong_rows(name: str, tensor: Tensor, state: State) -> UnsupportedModule:
    """Return the error for a tensor whose first dimension does not hold the samples."""
    what = {
        OneRecord: "a single sample without a dimension for the batch",
        RecordSum: "a sum over samples",
    }.get(type(state), "the samples in another dimension")
    if "num_items_in_batch" in name:
        remedy = (
            "Set trainer.model_accepts_loss_kwargs = False: a number of targets in the batch "
            "scales each sample by the others."
        )
    elif isinstance(state, RecordSum):
        remedy = "Leave it out: what is taken over the batch scales each sample by the others."
    else:
        remedy = "Keep the batch first, for example x[i : i + 1] instead of x[i]."
    return UnsupportedModule(
        name,
        expected="the samples in the first dimension",
        got=f"{what}, shape {list(tensor.shape)}",
        remedy=remedy,
    )


def number_in_parameter(operation: str, state: Mixed) -> PrivacyError:
    """Return the error for a number computed over samples that an operation takes to parameters."""
    return PrivacyError(
        f"a parameter in {operation}",
        expected="numbers that do not depend on the samples",
        got=f"one from {state.operation}, which {state.how} ({state.where})",
        remedy="Keep statistics of private data outside the model, where nothing releases them "
        "without noise.",
    )


def size_as_input(name: str, value: float) -> UnsupportedModule:
    """Return the error for an argument of the module that follows the sizes of batches."""
    return UnsupportedModule(
        name,
        expected="numbers that do not depend on how many samples there are",
        got=f"{value:.4g}, which has followed the number of samples in every batch",
        remedy="Pass a constant, such as the expected batch size: one more sample would change "
        "what the module makes of all others.",
    )


def no_gradient() -> UnsupportedModule:
    """Return the error for a loss that no parameter reaches."""
    return UnsupportedModule(
        "loss",
        expected="a loss with a gradient",
        got="one that leads back to no parameter",
        remedy="Leave out detach() and torch.no_grad() between the module and the loss; "
        "torch.utils.checkpoint wants use_reentrant=False where no input needs a gradient.",
    )


def samples_loaded(name: str) -> PrivacyError:
    """Return the error for a state dict in which there are samples."""
    return PrivacyError(
        f"load_state_dict, {name}",
        expected="tensors of released weights or public data",
        got="one that was computed from samples",
        remedy="Keep statistics of private data outside the model, where nothing releases them "
        "without noise.",
    )


def two_batches(name: str) -> PrivacyError:
    """Return the error for samples of different batches in one pass."""
    return PrivacyError(
        name,
        expected="samples of one batch",
        got="samples of two batches together",
        remedy="Do not keep samples for later batches: a record would be in two steps.",
    )


def unequal_rows(what: str) -> PrivacyError:
    """Return the error for inputs that differ in records, in rows of each or in their order."""
    return PrivacyError(
        "inputs of the module",
        expected="equally many rows of each record of one batch, in one order",
        got=what,
        remedy="Pass rows that the loader yielded, cut or repeated for all records alike; made-up "
        "rows belong in a pass of their own under engine.public().",
    )


def not_yielded(count: int) -> PrivacyError:
    """Return the error for inputs of which none comes from the private loader."""
    return PrivacyError(
        "inputs of the module",
        expected="samples that the private loader yielded",
        got="other tensors" if count else "no tensors",
        remedy="Validation belongs under torch.no_grad(). "
        f"{HOW_TO_ADOPT}{remedy_of_wrapper()} Passes that use no private data, such as "
        "those over fakes of a GAN, belong in engine.public(); engine.new_samples() takes samples "
        "from elsewhere, accounted as if every record were in every step.",
    )


def unmarked(name: str, tensor: Tensor) -> PrivacyError:
    """Return the error for a tensor of unknown origin beside samples."""
    return PrivacyError(
        name,
        expected="rows that the private loader yielded",
        got=f"a tensor of shape {list(tensor.shape)} made otherwise, beside samples",
        remedy="If it is random or constant, or if row i depends on record i alone, pass "
        f"engine.adopt(tensor). {HOW_TO_ADOPT}",
    )


def private_in_public() -> PrivacyError:
    """Return the error for samples in a pass that was declared to have none."""
    return PrivacyError(
        "engine.public()",
        expected="inputs without private data",
        got="samples of the private loader",
        remedy="Run passes over the loader's samples outside engine.public().",
    )


def overlapping_pieces() -> PrivacyError:
    """Return the error for a record in two pieces of a batch."""
    return PrivacyError(
        "inputs of the module",
        expected="pieces of a batch without common records, or the same records again",
        got="some records of an earlier pass together with others",
        remedy="Cut the batch into disjoint pieces (x.split(n)), or pass the same rows each time. "
        "optimizer.zero_grad() forgets the last pass, which may be made again in smaller pieces; "
        "engine.drop() forgets all passes over the batch.",
    )


def earlier_piece(where: str) -> PrivacyError:
    """Return the error for a backward pass of samples that are not the current ones."""
    return PrivacyError(
        f"backward through {where}",
        expected="one backward pass for each piece of the batch, before the next one",
        got="a backward pass of an earlier piece",
        remedy="Call backward() on each piece's loss before the next piece enters the module, or "
        "pass max_physical_batch_size to make_private.",
    )


def partly_entered(entered: int, size: int) -> PrivacyError:
    """Return the error for records that the loop left out by their place in the batch."""
    return PrivacyError(
        "optimizer.step",
        expected="all records of the batch in the module, and gradients of each piece",
        got=f"those of {entered} of {size}",
        remedy="Pass all rows, or select them by a mask of their own values, x[mask]: which record "
        "stands at a place depends on the others.",
    )


def left_out() -> PrivacyError:
    """Return the error for a batch without a step."""
    return PrivacyError(
        "data_loader",
        expected="optimizer.step() for every batch whose samples entered the module",
        got="a batch left out after its forward pass",
        remedy="Call optimizer.step() for every batch, and run passes that train nothing under "
        "torch.no_grad(): whether a step is taken must not depend on the samples. The clipping "
        "drops samples that are not finite.",
    )


def mixed_loss(state: Mixed) -> UnsupportedModule:
    """Return the error for a loss that mixes records."""
    return UnsupportedModule(
        "loss",
        expected="a sum or a mean over samples, each with a term of its own",
        got=f"{state.operation}, which {state.how} ({state.where})",
        remedy="Compute one number for each sample and take its mean. dpkern.losses has masked "
        "means; engine.adopt(terms) vouches for one number for each sample that was computed "
        "otherwise.",
    )


def other_reduction(declared: str, found: str) -> InvalidInput:
    """Return the error for a sum where a mean was declared, or the reverse."""
    return InvalidInput(
        "loss_reduction",
        expected=f"a {declared} over the samples of a batch, as make_private was told",
        got=f"a loss that is a {found} over them",
        remedy=f"Pass loss_reduction={found!r} to make_private, or let the loss be a {declared}.",
    )


def varying_share(share: int, before: int) -> UnsupportedModule:
    """Return the error for a mean whose divisor depends on the batch."""
    return UnsupportedModule(
        "loss",
        expected="a mean that divides each sample's terms by the same number in every batch",
        got=f"one over {share} entries of each sample, after {before} in an earlier batch",
        remedy="Pad all batches to one length, or divide each sample by its own number of entries: "
        "dpkern.losses.per_sample_mean(terms, mask).mean().",
    )


def varying_scale(
    declared: str, before: float, records: Sequence[int], scale: float, counts: Sequence[int]
) -> UnsupportedModule:
    """Return the error for a loss times a number that depends on the number of records."""
    other = "sum" if declared == "mean" else "mean"
    place = 0 if counts[0] != records[0] else 1
    return UnsupportedModule(
        "loss",
        expected=f"a {declared} over the samples times a constant",
        got=f"a factor of {scale:.4g} in a batch of {counts[place]}, after {before:.4g} in one of "
        f"{records[place]}",
        remedy=f"Let the loss be a {declared} over the samples of each batch, or pass "
        f"loss_reduction={other!r} to make_private. In a batch cut into smaller ones, call "
        f"backward() on the {declared} over each of them, without weights.",
    )


def backward_inside_backward() -> UnsupportedModule:
    """Return the error for a loss that goes backward while another one does."""
    return UnsupportedModule(
        "loss",
        expected="one backward pass at a time",
        got="one that another one starts, as a checkpoint with use_reentrant=True does",
        remedy="Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or leave the loss "
        "out of the checkpointed function.",
    )


def parameter_term(operation: str) -> UnsupportedModule:
    """Return the error for a penalty on the parameters inside a loss of samples."""
    return UnsupportedModule(
        "loss",
        expected="a loss of the module's outputs alone",
        got=f"{operation} with a term of the parameters",
        remedy="Move terms that belong to no sample to weight_decay, or call backward() on them "
        "under engine.public().",
    )
