"""The options of ``make_private``; options of Opacus that dpkern cannot honour are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from torch.utils.data import DataLoader

from ..base.errors import InvalidInput
from ..base.rng import Key
from ..base.validate import choice, integer, that
from ..privacy.mechanisms import DPSGD
from ..privacy.mechanisms.base import Mechanism
from ..step.noise_tables.source import NoiseSource
from .distributed import Processes, check_shards
from .loader import PrivateLoader

MODES = (None, "hooks", "functorch", "ew", "ghost")
"""Opacus' names for ways to compute per-sample gradients; dpkern has one way for all of them."""

Groups = Sequence[int] | Callable[[str], int] | None


@dataclass(frozen=True, kw_only=True)
class MakePrivateOptions:
    """The options of ``make_private`` besides its objects, noise multiplier and clipping bound.

    Attributes:
        clipping: ``flat``, ``per_layer``, ``group`` or ``automatic``.
        clip_groups: for ``group``: the group number of each trainable parameter in the module's
            order, or a function from its name to the number.
        arithmetic: ``exact`` (integer sums; certified for the released bits, if a record's
            gradient depends on it alone; ``engine.validate`` can test that) or ``float`` (matrix
            products; certified for real-number sums). None takes ``exact`` where it
            costs nothing more, on a CPU, else ``float``; the certificate then says why.
        loss_reduction: ``mean`` or ``sum``, as the loss treats the samples of a batch; the
            optimizer sees a mean over the expected batch size, or a sum.
        poisson_sampling: False draws ``shuffled`` batches, which are not amplified.
        sampling: ``poisson``, ``fixed`` or ``shuffled``; None follows ``poisson_sampling``.
        max_physical_batch_size: larger batches reach the loop as physical batches of at most this
            many samples. None splits none.
        views: rows of each record in a batch that holds several views of every record, one set of
            views after the other, as ``torch.cat([first, second])`` or a ``collate_fn`` joins them.
            Rows that are joined in the loop are followed without it.
        masked_padding: ``collate_fn`` pads to the longest record of a batch, and model and loss
            ignore padding; the certificate names it as its condition.
        keep_budget: memory for per-sample gradients that are materialized instead of computed
            twice: a fraction of the captured layer inputs (float) or bytes (int). None is a quarter
            of these inputs, and on a device at least a quarter of its memory.
        unsafe_seed: seed of reproducible noise and batches; nothing is certified with one. None
            takes a fresh secret key.
        rounds: ChaCha rounds, 20, 12 or 8.
        backend: name of the backend. None selects the first one that supports the call; see
            ``dpkern info``.
        noise_source: object that draws the noise, such as ``noise_tables.RingPrefetch()``. None
            draws it in the update itself. Every process passes its own; all draw the same noise.
        sample_rate, expected_batch_size, dataset_size: for ``data_loader=None`` only: how the
            caller draws its batches.
        criterion: returned unchanged with ``grad_sample_mode="ghost"``; one backward pass is
            enough.
        grad_sample_mode: accepted for compatibility; all modes give the same gradients.
        batch_first, noise_generator, wrap_model, rand_on_empty: accepted with their default only.

    Raises:
        InvalidInput: an option that cannot be honoured.
    """

    clipping: str = "flat"
    clip_groups: Groups = None
    arithmetic: str | None = None
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    sampling: str | None = None
    max_physical_batch_size: int | None = None
    views: int = 1
    masked_padding: bool = False
    keep_budget: float | int | None = None
    unsafe_seed: int | None = None
    rounds: int = 20
    backend: str | None = None
    noise_source: NoiseSource | None = None
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    dataset_size: int | None = None
    criterion: Any = None
    grad_sample_mode: str | None = "hooks"
    batch_first: bool = True
    noise_generator: object = None
    wrap_model: bool = True
    rand_on_empty: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the options with these names and values.

        Raises:
            InvalidInput: an unknown name, or an option that cannot be honoured.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise InvalidInput(
                    name,
                    expected=f"one of the options {', '.join(known)}",
                    got="an unknown one",
                    remedy="Check its spelling.",
                )
        return cls(**given)

    def __post_init__(self) -> None:
        choice(MODES, grad_sample_mode=self.grad_sample_mode)
        integer(1, views=self.views)
        _sampling(self.sampling, self.poisson_sampling)
        for name, default, expected, remedy in _FIXED:
            if getattr(self, name) is not default:
                got = getattr(self, name)
                raise InvalidInput(name, expected=expected, got=repr(got), remedy=remedy)


_FIXED = (
    (
        "batch_first",
        True,
        "True: the first dimension of every input is the batch",
        "Transpose inside the module, or set batch_first=True on recurrent layers.",
    ),
    (
        "noise_generator",
        None,
        "None: noise comes from a secure generator",
        "For reproducible noise pass unsafe_seed=; such a run certifies nothing.",
    ),
    (
        "wrap_model",
        True,
        "True: the module comes back itself and is never wrapped",
        "Leave it out; engine.detach() does what the hooks' cleanup() did.",
    ),
    (
        "rand_on_empty",
        False,
        "False: an empty draw is one row that counts for nothing",
        "Leave it out: the step adds its noise and nothing else.",
    ),
)


def _sampling(sampling: str | None, poisson_sampling: bool) -> str:
    if sampling is None:
        return "poisson" if poisson_sampling else "shuffled"
    choice(("poisson", "fixed", "shuffled"), sampling=sampling)
    if sampling == "poisson" and not poisson_sampling:
        raise InvalidInput(
            "sampling",
            expected="'fixed' or 'shuffled' with poisson_sampling=False",
            got=sampling,
            remedy="Leave poisson_sampling out: sampling= says it all.",
        )
    return sampling


def loader_of(
    data_loader: DataLoader[Any] | None,
    options: MakePrivateOptions,
    processes: Processes | None = None,
) -> PrivateLoader | None:
    """Return the private loader over the data set or this process's shard; None without a loader.

    Raises:
        InvalidInput: a loader that cannot be private.
    """
    if data_loader is None:
        return None
    seed, rounds = options.unsafe_seed, options.rounds
    sampling = _sampling(options.sampling, options.poisson_sampling)
    if isinstance(data_loader, PrivateLoader):
        return _made_before(data_loader, options, sampling, alone=processes is None)
    shard = (0, 1)
    if processes is not None:
        check_shards(data_loader, sampling, processes)
        key, shard = processes.sampling_key(seed, rounds), (processes.rank, processes.size)
    else:
        key = Key.fresh(rounds) if seed is None else Key.from_unsafe_seed(seed, rounds)
    return PrivateLoader(
        data_loader,
        sampling=sampling,
        key=key,
        max_physical_batch_size=options.max_physical_batch_size,
        shard=shard,
    )


def _made_before(
    loader: PrivateLoader, options: MakePrivateOptions, sampling: str, *, alone: bool
) -> PrivateLoader:
    """Return a private loader that is ready, which draws as it was made to.

    Raises:
        InvalidInput: an option that it would have had to know.
    """
    for name, fits, got in (
        ("sampling", sampling == loader.sampling, sampling),
        ("unsafe_seed", options.unsafe_seed is None, options.unsafe_seed),
        ("module", alone, "several processes"),
    ):
        that(
            fits,
            name,
            f"what fits a loader that draws {loader.sampling} batches already, by a key of its own",
            got,
            "Pass the ordinary loader to make_private.",
        )
    if options.max_physical_batch_size is not None:
        loader.max_physical_batch_size = options.max_physical_batch_size
    return loader


def sampling_of(loader: PrivateLoader | None, options: MakePrivateOptions) -> dict[str, Any]:
    """Return how batches are drawn, for the ledger: by the loader, or as the caller states.

    Raises:
        InvalidInput: the caller states it although there is a loader.
    """
    if loader is None:
        return {
            "sampling": _sampling(options.sampling, options.poisson_sampling),
            "sample_rate": options.sample_rate,
            "dataset_size": options.dataset_size,
        }
    for name in ("sample_rate", "dataset_size", "expected_batch_size"):
        if getattr(options, name) is not None:
            raise InvalidInput(
                name,
                expected="None: the loader says how batches are drawn",
                got=getattr(options, name),
                remedy="Choose the loader's batch_size, or pass data_loader=None.",
            )
    return {
        "sampling": loader.sampling,
        "sample_rate": loader.sample_rate,
        "dataset_size": loader.dataset_size,
    }


def mechanism_of(
    options: MakePrivateOptions,
    names: Sequence[str],
    *,
    noise_multiplier: float | None,
    max_grad_norm: Any,
    mechanism: Mechanism | None,
) -> Mechanism:
    """Return the mechanism that was given, or DP-SGD with these numbers.

    Raises:
        InvalidInput: both or neither, or numbers out of range.
    """
    numbers = {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
    if mechanism is not None:
        given = [name for name, value in numbers.items() if value is not None]
        if not isinstance(mechanism, Mechanism) or given or options.clip_groups is not None:
            raise InvalidInput(
                "mechanism",
                expected="a dpkern mechanism, which has its own noise, bounds and groups",
                got=f"one together with {', '.join(given) or 'clip_groups'}"
                if isinstance(mechanism, Mechanism)
                else type(mechanism).__name__,
                remedy="Pass either mechanism= or noise_multiplier= and max_grad_norm=.",
            )
        return mechanism
    for name, value in numbers.items():
        if value is None:
            raise InvalidInput(
                name,
                expected="a number",
                got=value,
                remedy=f"Pass {name}=, or a mechanism=.",
            )
    if options.clipping == "adaptive":
        raise InvalidInput(
            "clipping",
            expected="'flat', 'per_layer', 'group' or 'automatic'",
            got=options.clipping,
            remedy="Pass clipping='automatic', which needs no tuned bound, or change the bound "
            "over time with a schedule of engine.schedulers.",
        )
    groups = options.clip_groups
    if callable(groups):
        groups = [groups(name) for name in names]
    return DPSGD(
        noise_multiplier=noise_multiplier,  # type: ignore[arg-type]
        max_grad_norm=max_grad_norm,
        clipping=options.clipping,
        groups=groups,  # type: ignore[arg-type]
        arithmetic=options.arithmetic or "float",
    )
