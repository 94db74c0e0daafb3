"""Noise: certified integer samples on the lattice, added to integers or floats.

Laws and layout: ``docs/noise.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import validate as check
from ..base.dispatch import op
from ..base.errors import InvalidInput, PrivacyError
from ..base.laws import SCALE_CELLS, Distribution
from ..base.place import check_recording
from ..base.rng import Stream
from ..base.signature import Count, Device, Int16, Int32, Noised, Position, Scale, written
from . import _lattice
from ._draws import CdtDraws, Draws, check_draws
from ._noise_cost import TILE, noise_words, rounding_words, tiles
from ._scale import check_scale, check_scales

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)


def check_rounding(name: str, rounding: object, stream: Stream, draws: Draws | None = None) -> None:
    """Check that a stream for stochastic rounding is not the noise's, nor that of its draws.

    Raises:
        InvalidInput: no stream.
        PrivacyError: the same key and nonce as the noise.
    """
    check_stream(**{name: rounding})
    assert isinstance(rounding, Stream)
    others = [stream]
    if isinstance(draws, CdtDraws) and draws.stream is not None:
        others.append(draws.stream)
    if any(rounding.packed()[:3] == other.packed()[:3] for other in others):
        raise PrivacyError(
            name,
            expected="a stream of its own",
            got="the noise stream",
            remedy="Use key.stream(Purpose.ROUNDING, step): no word may be used twice.",
        )


def check_stream(**value: object) -> None:
    """Check a keystream.

    Raises:
        InvalidInput: anything else.
    """
    ((name, got),) = value.items()
    if not isinstance(got, Stream):
        raise InvalidInput(
            name,
            expected="a dpkern.rng.Stream",
            got=type(got).__name__,
            remedy="Make one with Key.fresh().stream(Purpose.NOISE, step).",
        )


def _check_keystream(stream: Stream, first_block: int, blocks: int, device: Device) -> None:
    check_stream(stream=stream)


@op(check=_check_keystream)
def keystream(
    stream: Stream,
    *,
    first_block: Position,
    blocks: Count,
    device: Device = "cpu",
) -> Int32[Tensor, "words: 16*blocks"]:
    """Return ChaCha keystream words ``[16 blocks]``, int32, in the order of RFC 8439, section 2.3.

    Args:
        stream: key, nonce and rounds.
        first_block: 64-bit block counter of the first block.
        blocks: how many blocks; 0 gives an empty tensor.
        device: where the result goes. A backend asked for by name computes where it runs.

    Raises:
        InvalidInput: a negative count, something that is no stream, or no device.
        PrivacyError: a CUDA graph is recorded, whose every replay would give the same words.
    """
    return _lattice.keystream(stream, first_block, blocks).to(device)


def _check_draws(
    stream: Stream,
    position: int,
    count: int,
    distribution: str,
    device: Device,
    out: Tensor | None,
) -> None:
    check_stream(stream=stream)


@op(check=_check_draws)
def lattice_draws(
    stream: Stream,
    *,
    position: Position,
    count: Count,
    distribution: Distribution = "gaussian",
    device: Device = "cpu",
    out: Int32[Tensor, "count", written] | None = None,
) -> Int32[Tensor, "draws: count"]:
    """Return the raw integer draws ``X`` of a noise law, int32 ``[count]``, in units of ``u``.

    For tests and audits. ``X`` is private only inside ``floor((v + X) / 2^14)``: never release it
    by itself; ``add_noise`` does the whole.

    Args:
        stream: key, nonce and rounds.
        position: index of the first coordinate in the stream.
        count: how many; 0 gives an empty tensor.
        distribution: ``gaussian`` (K48, sd 2^20 u) or ``laplace`` (L40, scale 2^20 u).
        device: where the result goes. A backend asked for by name computes where it runs.
        out: written and returned instead of a new tensor: int32 ``[count]`` on ``device``.

    Raises:
        InvalidInput: an unknown law, a negative number, no device, or an ``out`` that does not fit.
        PrivacyError: a CUDA graph is recorded, whose every replay would give the same draws.
    """
    made = _lattice.draws(stream, distribution, position, count)
    return made.to(device) if out is None else out.copy_(made)


def _check_rounding_bits(
    stream: Stream, position: int, count: int, device: Device, out: Tensor | None
) -> None:
    check_stream(stream=stream)


@op(check=_check_rounding_bits)
def rounding_bits(
    stream: Stream,
    *,
    position: Position,
    count: Count,
    device: Device = "cpu",
    out: Int16[Tensor, "count", written] | None = None,
) -> Int16[Tensor, "bits: count"]:
    """Return the 16 bits of each coordinate's stochastic rounding, int16 ``[count]``.

    They serve prefetched draws (``update.Draws``), tests and audits.

    Args:
        stream: key, nonce and rounds; never the noise's.
        position: index of the first coordinate in the stream.
        count: how many; 0 gives an empty tensor.
        device: where the result goes. A backend asked for by name computes where it runs.
        out: written and returned instead of a new tensor: int16 ``[count]`` on ``device``.

    Raises:
        InvalidInput: something that is no stream, a negative number, no device, or an ``out`` that
            does not fit.
        PrivacyError: a CUDA graph is recorded, whose every replay would give the same bits.
    """
    made = _lattice.rounding_bits(stream, position, count).to(torch.int16)
    return made.to(device) if out is None else out.copy_(made)


def _check_source(
    draws: Draws, position: int, count: int, device: Device, out: Tensor | None
) -> None:
    place = torch.device("cpu")
    if isinstance(draws, Draws) and draws.values.device.type != "cpu":
        place = torch.empty(0, device=device).device  # "cuda" with its number
    check_draws("draws", draws, position, position + count, place)


@op(check=_check_source)
def source_draws(
    draws: Draws,
    *,
    position: Position,
    count: Count,
    device: Device = "cpu",
    out: Int32[Tensor, "count", written] | None = None,
) -> Int32[Tensor, "values: count"]:
    """Return the raw integer draws ``X`` of a noise source, int32 ``[count]``, in units of ``u``.

    Args:
        draws: what the source handed out for one step: prefetched draws, or a table and what it is
            read by, in the CPU's memory or where the result goes.
        position: index of the first coordinate.
        count: how many; 0 gives an empty tensor.
        device: where the result goes.
        out: written and returned instead of a new tensor: int32 ``[count]`` on ``device``.

    Raises:
        InvalidInput: draws of other positions, draws that were taken back, a negative number, no
            device, or an ``out`` that does not fit.
        PrivacyError: a CUDA graph is recorded, whose every replay would give the same draws.
    """
    made = draws.at(position, count)
    return made.to(device) if out is None else out.copy_(made)


def _check_add_noise(
    x: Tensor,
    stream: Stream,
    position: int,
    distribution: str,
    scale: float | Tensor | None,
    rounding: Stream | None,
    draws: Draws | None,
) -> None:
    check_recording(x.device)
    # The common case is decided here: this op is called once per tensor and step.
    if type(stream) is not Stream:
        check_stream(stream=stream)
    if draws is not None:
        check_draws("draws", draws, position, position + x.numel(), x.device, distribution)
    if x.dtype in INTEGERS:
        if scale is not None:
            raise InvalidInput(
                "scale",
                expected="None for integers, which already count units of scale / 2^20",
                got=scale,
                remedy="Leave scale away, or pass a float tensor.",
            )
        return
    if isinstance(scale, Tensor):
        check.tensor(shape=x.shape, dtypes=FLOATS, device=x.device, scale=scale)
        check_scales("scale", scale)
    else:
        check_scale("scale", scale)
    if draws is not None and draws.rounding is not None:
        return
    if type(rounding) is not Stream or rounding.n0 == stream.n0 or draws is not None:
        check_rounding("rounding", rounding, stream, draws)


@op(check=_check_add_noise)
def add_noise(
    x: Noised[Tensor, "*S", written],
    *,
    stream: Stream,
    position: Position = 0,
    distribution: Distribution = "gaussian",
    scale: Scale | None = None,
    rounding: Stream | None = None,
    draws: Draws | None = None,
) -> Tensor:
    """Add certified lattice noise to ``x`` in place and return it.

    With ``u = scale / 2^20`` and ``g = scale / 64``: ``y = floor((v + X) / 2^14)``.

    * Integer ``x`` holds ``v``, exact counts of ``u``; it becomes ``y``, counts of ``g``.
    * Float ``x`` is rounded stochastically to ``v`` with 16 bits a coordinate and becomes ``y g``.

    Guarantee: for integer neighbours at L2 distance M the pair of outputs is dominated by the
    Gaussian mechanism with multiplier 2^20 / M (L1 and Laplace likewise), up to the tail's delta.
    For floats it holds for the real numbers in the scaled floats ``fl(x / u)``: what rounding did
    before, in the sum and in that product, is outside the proof (``docs/noise.md``).

    Args:
        x: contiguous int32, int64, float32 or float64 tensor of any shape.
        stream: keystream of the noise, used for nothing else.
        position: where element 0 stands in the stream.
        distribution: ``gaussian`` or ``laplace``.
        scale: certified standard deviation (or Laplace scale), one number or one per coordinate,
            from 2^-104 to 2^116. Integers take None.
        rounding: keystream of the rounding, float ``x`` only.
        draws: prefetched output of the streams at these positions. None draws inside the call.

    Raises:
        InvalidInput: wrong dtype, strides, scale, or an unknown law.
        PrivacyError: rounding and noise share a stream.

    ============ ==========================================
    edge case    result
    ============ ==========================================
    empty        unchanged
    NaN, inf     counts as zero (the output stays on the lattice)
    any integer  exact, no overflow inside the release
    ============ ==========================================
    """
    v, n = x.detach(), x.numel()
    if draws is None:
        drawn = _lattice.draws(stream, distribution, position, n)
    else:
        drawn = draws.at(position, n)
    if v.dtype in INTEGERS:
        return add_drawn(x, (drawn, None), scale)
    if draws is None or draws.rounding is None:
        assert rounding is not None
        bits = _lattice.rounding_bits(rounding, position, n)
    else:
        bits = draws.bits_at(position, n)
    return add_drawn(x, (drawn, bits), scale)


@torch.no_grad()
def add_drawn(
    x: Tensor, noise: tuple[Tensor, Tensor | None], scale: float | Tensor | None
) -> Tensor:
    """Release ``x`` in place as ``add_noise`` does, with these draws and rounding bits."""
    v = x.detach()
    drawn, bits = (part if part is None else part.view(v.shape).to(v.device) for part in noise)
    assert drawn is not None
    if bits is None:
        v.copy_(_lattice.release_integers(v, drawn))
        return x
    assert scale is not None
    y, _ = _lattice.release_floats(v, scale, bits, drawn)
    v.copy_(y * _lattice.cell(scale, v.dtype))
    return x


__all__ = [
    "SCALE_CELLS",
    "TILE",
    "add_noise",
    "keystream",
    "lattice_draws",
    "noise_words",
    "rounding_bits",
    "rounding_words",
    "source_draws",
    "tiles",
]
