"""Watch which keystream words a private step really uses, at the ops that make them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ...base import dispatch
from ...base.rng import Purpose, Stream
from ...ops import update
from ...ops._noise_cost import noise_words, rounding_words
from ...ops._pair_map import sizes_noised
from ...step.step import DPStep
from ..bits import LAYER
from ..findings import Check

Released = Callable[[DPStep], object]
"""A function that adds the samples of one step, if any, and calls ``finish``."""


def _empty(step: DPStep) -> None:
    """Take a step of an empty batch: its noise is drawn all the same."""
    step.finish()


@dataclass(frozen=True)
class KeystreamRange:
    """Coordinates of one stream that a call made words for.

    Attributes:
        stream: digest of the key, both nonce words, rounds.
        first, end: positions ``first .. end - 1``.
        words: keystream words that these coordinates consume.
    """

    stream: tuple[bytes, int, int, int]
    first: int
    end: int
    words: int


class KeystreamMonitor:
    """A record of every use of a keystream in a block: ``with watch.on(): step.finish()``.

    Attributes:
        uses: uses by the ops that draw noise, in order.
        produced: words that these ops made, in whole tiles.
        others: ops that made words for something else, each with the digest of the key.
    """

    def __init__(self) -> None:
        self.uses: list[KeystreamRange] = []
        self.produced = 0
        self.others: list[tuple[str, bytes | None]] = []

    def on(self) -> Any:
        """Return the context manager of the watched block."""
        return dispatch.intercepted(self._seen)

    def _seen(self, op: dispatch.Op[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        arguments = {name: value for name, value in given.items() if name != "backend"}
        words = op.cost(*args, **arguments).random_words
        found = list(_uses(op.name, args, given))
        self.uses += found
        if found:
            self.produced += words
        elif words:
            stream = next((x for x in (*args, *given.values()) if isinstance(x, Stream)), None)
            self.others.append((op.name, None if stream is None else _digest(stream)))
        with dispatch.intercepted(None):
            return op(*args, **given)

    @property
    def consumed(self) -> int:
        """The number of words of the coordinates that were used."""
        return sum(use.words for use in self.uses)

    def overlaps(self) -> list[tuple[KeystreamRange, KeystreamRange]]:
        """Return uses of the same coordinates of the same stream."""
        ordered = sorted(
            (use for use in self.uses if use.end > use.first), key=lambda u: (u.stream, u.first)
        )
        # Sorted by start: two neighbours overlap if any two do.
        return [(a, b) for a, b in pairwise(ordered) if a.stream == b.stream and b.first < a.end]


def _uses(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> Iterator[KeystreamRange]:
    if name == "update.step":
        drawn: update.Noise | None = given.get("noise")
        if drawn is None or drawn.draws is not None:
            return
        sizes = sizes_noised(args[0], given.get("maps"))
        for size, first in zip(sizes, drawn.positions, strict=True):
            yield from _of_sum(drawn.stream, drawn.rounding, first, size, drawn.step_counter)
    elif name == "noise.add_noise" and given.get("draws") is None:
        count = args[0].numel()
        yield from _of_sum(given["stream"], given.get("rounding"), given.get("position", 0), count)
    elif name in ("noise.lattice_draws", "noise.rounding_bits"):
        stream = args[0] if args else given["stream"]
        each = noise_words if name == "noise.lattice_draws" else rounding_words
        yield _use(stream, given["position"], given["count"], each(given["count"]))


def _of_sum(
    stream: Stream,
    rounding: Stream | None,
    first: int,
    count: int,
    step_counter: torch.Tensor | None = None,
) -> Iterator[KeystreamRange]:
    steps = 0 if step_counter is None else int(step_counter[0])
    yield _use(stream, first, count, noise_words(count), steps)
    if rounding is not None:
        yield _use(rounding, first, count, rounding_words(count), steps)


def _use(stream: Stream, first: int, count: int, words: int, steps: int = 0) -> KeystreamRange:
    _, n0, n1, rounds = stream.packed()
    return KeystreamRange((_digest(stream), n0, n1 + steps, rounds), first, first + count, words)


def _digest(stream: Stream) -> bytes:
    return hashlib.sha256(stream.key).digest()


def words(step: DPStep, *, steps: int = 3, release: Released = _empty) -> tuple[Check, ...]:
    """Check words produced and consumed against plan and report, and that no word is used twice.

    Args:
        step: step with noise that it draws itself; it is run ``steps`` times.
        steps: number of steps.
        release: makes one step; by default one without samples.

    Returns:
        Two checks. The first is skipped for prefetched draws, which the noise source counts, and
        where the step's key made words for something else; words of a public key are no noise.
    """
    watch, before, expected = KeystreamMonitor(), dict(step.words), {"produced": 0, "consumed": 0}
    for _ in range(steps):
        plan = step.plan
        with watch.on():
            release(step)
        for name in expected:
            expected[name] += plan.words[name]
    reported = {name: step.words[name] - before[name] for name in before}
    seen = {"produced": watch.produced, "consumed": watch.consumed}
    mine = _digest(step.key.stream(Purpose.NOISE, 0))
    unknown = sorted({op for op, key in watch.others if key in (None, mine)})
    return _balance(step, seen, expected, reported, unknown), _single_use(watch, steps)


def _balance(
    step: DPStep,
    seen: dict[str, int],
    planned: dict[str, int],
    reported: dict[str, int],
    unknown: list[str],
) -> Check:
    name = "words"
    provenance = step.provenance()
    if unknown or provenance["source"] != "inline":
        why = f"words made by {', '.join(unknown)}" if unknown else "draws are made ahead"
        return Check(layer=LAYER, name=name, passed=None, text=f"{why}: not counted here")
    equal = seen == planned == reported and provenance["words"]["reused"] == 0
    text = ", ".join(
        f"{kind} {seen[kind]} (plan {planned[kind]}, report {reported[kind]})" for kind in seen
    )
    numbers = {f"{kind}": seen[kind] for kind in seen}
    return Check(layer=LAYER, name=name, passed=equal, text=f"words {text}", numbers=numbers)


def _single_use(watch: KeystreamMonitor, steps: int) -> Check:
    twice, streams = watch.overlaps(), len({use.stream for use in watch.uses})
    text = f"{len(watch.uses)} ranges of {streams} streams in {steps} steps do not overlap"
    if twice:
        first = twice[0][0]
        text = (
            f"{len(twice)} of {len(watch.uses)} ranges are drawn again, the first at position "
            f"{first.first} of stream 0x{first.stream[1]:08x}, step {first.stream[2]}"
        )
    return Check(
        layer=LAYER,
        name="single use",
        passed=not twice,
        text=text,
        numbers={"ranges": len(watch.uses), "streams": streams, "twice": len(twice)},
    )


def resume(make: Callable[[], DPStep], *, release: Released = _empty) -> Check:
    """Check that a run that is resumed without a seed goes on with a key of its own.

    Args:
        make: a new step, always the same but for its key.
        release: makes one step; by default one without samples.
    """
    first, second = make(), make()
    release(first)
    state = first.state_dict()
    second.load_state_dict(state)
    secret = first.key.stream(Purpose.NOISE, 0).key
    # Protocol 4 writes bytes as they are.
    shown = secret in pickle.dumps(state, protocol=4) or secret.hex() in repr(state)
    other = secret != second.key.stream(Purpose.NOISE, 0).key
    watches = KeystreamMonitor(), KeystreamMonitor()
    for step, watch in zip((first, second), watches, strict=True):
        with watch.on():
            release(step)
    streams = [{use.stream for use in watch.uses} for watch in watches]
    if not streams[0]:
        return Check(layer=LAYER, name="resume", passed=None, text="the step draws no noise")
    apart = not streams[0] & streams[1]
    faults = [
        text
        for wrong, text in (
            (shown, "the saved state holds the key"),
            (not other, "the resumed run has the same key"),
            (not apart, "the step after has the same noise"),
        )
        if wrong
    ]
    return Check(
        layer=LAYER,
        name="resume",
        passed=not faults,
        text="; ".join(faults) or "a resumed run draws from another key, which no state holds",
    )


__all__ = ["KeystreamMonitor", "KeystreamRange", "resume", "words"]
