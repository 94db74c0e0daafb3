"""Options of the spectral mechanisms: kinds of noise, transform sizes, and their checks."""

from __future__ import annotations

import math
from typing import Any

from ...base.errors import InvalidInput
from ...base.validate import choice, integer
from ...ops.spectral._sizes import axes
from .site import Site

CLIPPING = ("flat", "per_layer", "group")
ARITHMETIC = ("exact", "float")
MODES = ("corrected", "published")
NOISE_POINTS = ("per_batch", "per_sample")
SIZES = ("padded", "fast", "linear")

NoiseKind = str | tuple[str, float, float]
FFTSize = str | tuple[tuple[int, ...] | None, ...]
Sites = tuple[Site, ...]


def taps(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return kernel and dilation on the site's grid."""
    if site.kind == "circulant":
        return (site.block,), (1,)
    return axes(site.kernel), axes(site.dilation)


def checked_groups(given: Any, clipping: str | None) -> tuple[int, ...] | None:
    """Check group numbers with ``clipping='group'``, None without, and return them."""
    if given is None and clipping != "group":
        return None
    right = (
        clipping == "group"
        and isinstance(given, (tuple, list))
        and len(given) > 0
        and all(type(number) is int for number in given)
        and set(given) == set(range(len(set(given))))
    )
    if not right:
        raise InvalidInput(
            "groups",
            expected="the clip group of each parameter, numbered from 0 without gaps, with "
            "clipping='group' only",
            got=given,
            remedy="Pass clipping='group', groups=dpkern.engine.groups.by_owner(model).",
        )
    return tuple(given)


def checked_batch_size(given: Any, noise_point: str) -> int | None:
    """Return the number of samples of every step, with ``noise_point='per_sample'`` only."""
    if given is not None and noise_point != "per_sample":
        raise InvalidInput(
            "batch_size",
            expected="None with noise_point='per_batch'",
            got=given,
            remedy="Remove batch_size=, or pass noise_point='per_sample' with mode='published'.",
        )
    return None if given is None else integer(minimum=1, batch_size=given)


def checked_size(given: Any, sites: Sites | None) -> FFTSize:
    """Check a rule for transform sizes, or one size per site, each large enough."""
    if isinstance(given, str):
        return str(choice(SIZES, fft_size=given))
    if not isinstance(given, (tuple, list)) or sites is None or len(given) != len(sites):
        raise InvalidInput(
            "fft_size",
            expected=f"one of {', '.join(SIZES)}, or one size per site, together with sites",
            got=given,
            remedy="Pass ((P, Q), None, ...) in the order of the sites, one size for each axis.",
        )
    return tuple(
        None if size is None or site.kind != "conv" else checked_grid(size, site)
        for size, site in zip(given, sites, strict=True)
    )


def noise_parts(kind: NoiseKind | None) -> tuple[float, float]:
    """Return ``(a, b)``, the sd of noise on real and imaginary parts."""
    if kind == "circular":
        return math.sqrt(0.5), math.sqrt(0.5)
    if kind == "circular_full":
        return 1.0, 1.0
    return (kind[1], kind[2]) if isinstance(kind, tuple) else (1.0, 0.0)


def checked_kind(given: Any) -> NoiseKind:
    """Check a kind of complex noise, and return it."""
    if given in ("circular", "circular_full", "real"):
        return str(given)
    right = (
        isinstance(given, (tuple, list))
        and len(given) == 3
        and given[0] == "ab"
        and all(type(part) in (int, float) and 0 <= part <= 1 for part in given[1:])
        and abs(given[1] ** 2 + given[2] ** 2 - 1) < 1e-9
    )
    if not right:
        raise InvalidInput(
            "noise_kind",
            expected="'circular', 'circular_full', 'real' or ('ab', a, b) with a^2 + b^2 = 1",
            got=given,
            remedy="Choose the law of the complex noise.",
        )
    return ("ab", float(given[1]), float(given[2]))


def checked_sites(given: Any) -> Sites | None:
    """Check sites, and return them as a tuple, or None."""
    if given is None:
        return None
    right = isinstance(given, (tuple, list)) and all(isinstance(site, Site) for site in given)
    if not right or not given:
        raise InvalidInput(
            "sites",
            expected="one Site per parameter",
            got=given,
            remedy="Pass sites=dpkern.survey(model, example).",
        )
    return tuple(given)


def checked_grid(given: Any, site: Site) -> tuple[int, ...]:
    """Check that a grid keeps the lags of the site's kernel apart, and return it."""
    spatial = len(site.kernel)
    right = isinstance(given, (tuple, list)) and len(given) in (spatial, max(spatial, 2))
    sizes = axes(tuple(integer(fft_size=n) for n in given)) if right else ()
    if not right or any(n < m for n, m in zip(sizes, axes(site.least), strict=True)):
        raise InvalidInput(
            "fft_size",
            expected=f"{spatial} sizes of at least {site.least}, where the lags of a kernel of "
            f"{site.kernel} do not wrap around",
            got=given,
            remedy="Choose larger sizes, or 'padded'.",
        )
    return sizes


def no_sites(why: str) -> InvalidInput:
    return InvalidInput(
        "sites",
        expected=f"the geometry of every parameter: {why}",
        got=None,
        remedy="Set them: m = dataclasses.replace(m, sites=dpkern.survey(model, example)).",
    )
