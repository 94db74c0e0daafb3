"""Count the autoencoder's private steps as SPOF's Appendix G does, and with corrections.

Per user, that is per training sample, of a single or distributed autoencoder with ``n`` features
and a code of ``l``: Steps 3 and 5 of SPOF's Algorithm 1, Steps 4 and 6 of its Algorithm 2 (DP-SGD),
and the functional mechanism (FM), which is SPOF without the stabilisation constant. Printed:
(19 + l) n and 80 n + 283 on the AMD K7. ``CountOptions`` switches on what the paper counts wrongly
or leaves out. The printed noise is a read of a table of ready-made samples; ``source`` names
another one (``drawing``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from ..base import validate as check
from ..base.counts import Counts, Item, Itemised
from ..step.noise_tables.named import SOURCES
from . import drawing
from .drawing import PRINTED_SOURCE


@dataclass(frozen=True, kw_only=True)
class CountOptions:
    """The way of counting; the defaults count as printed.

    Attributes:
        squarings: multiplications per squared component: 2 as printed, 1 suffices.
        a_zero_shortcut: whether A_i = 1/2 - x_i takes one SUB at the expansion point a = 0.
        shared_exp: e^a/(1 + e^a), common to all features, is computed once.
        omitted_terms: whether to count what the paper leaves out: SPOF's c_j = c sum h, its
            sensitivity n(3/2 + c_j(c_j/2 + 2)), which depends on the record and so scales every
            sample of the unit table; DP-SGD's scaling, its maximum with 1 and its choice between
            two sensitivities.
        alpha3_by_shift: alpha_3 = -alpha_2/2 by a shift and a negation, not by MUL and SUB.
        gate_weight: word additions that a gate across a word is worth: 1 as printed; the word's
            bits where a gate is one bit wide.
    """

    squarings: int = 2
    a_zero_shortcut: bool = False
    shared_exp: bool = False
    omitted_terms: bool = False
    alpha3_by_shift: bool = False
    gate_weight: int = 1

    def __post_init__(self) -> None:
        check.choice((1, 2), squarings=self.squarings)
        check.integer(1, gate_weight=self.gate_weight)
        for option in fields(self):
            if option.type == "bool":
                check.choice((False, True), **{option.name: getattr(self, option.name)})


PRINTED = CountOptions()

CORRECTED = CountOptions(
    squarings=1,
    a_zero_shortcut=True,
    shared_exp=True,
    omitted_terms=True,
    alpha3_by_shift=True,
)

VARIANTS: Mapping[str, CountOptions] = MappingProxyType(
    {
        "as printed": PRINTED,
        "n squarings are n multiplications": replace(PRINTED, squarings=1),
        "and a = 0: A = 1/2 - x": replace(PRINTED, squarings=1, a_zero_shortcut=True),
        "printed, but the sigmoid once": replace(PRINTED, shared_exp=True),
        "printed, with what was left out": replace(PRINTED, omitted_terms=True),
        "printed, alpha 3 by a shift": replace(PRINTED, alpha3_by_shift=True),
        "printed, gates of 32 bits": replace(PRINTED, gate_weight=32),
        "everything corrected": CORRECTED,
    }
)
"""The corrections of the count, one by one and together, for tables of what each one changes."""


def noise_sample(options: CountOptions = PRINTED) -> Counts:
    """Count one read of the noise table: two additions and a 2:1 multiplexer, 6 in all."""
    gates = Counts(NOT=1, AND=2, OR=1) * options.gate_weight
    return Counts(ADD=2) + gates


def draws_of(system: str, n: int) -> int:
    """Return the noisy numbers of one record: 2 n coefficients, or n output gradients."""
    return n if check.choice(tuple(FORMS), system=system) == "dpsgd-da" else 2 * n


def spof(
    n: int, code: int, options: CountOptions = PRINTED, source: str = PRINTED_SOURCE
) -> Itemised:
    """Count SPOF's Steps 3 and 5 for one user; printed total (19 + l) n with l = ``code``.

    Raises:
        InvalidInput: unless 1 <= code <= n.
    """
    _shape(n, code)
    stabilised = Item(
        name="stabilisation", counts=Counts(ADD=n * code), kind="printed", note="c_j on n l weights"
    )
    omitted = _omitted_of_spof(n, code, options, source)
    return _functional(n, options, source) + Itemised((stabilised, *omitted))


def fm(
    n: int, code: int, options: CountOptions = PRINTED, source: str = PRINTED_SOURCE
) -> Itemised:
    """Count the functional mechanism for one sample: SPOF without the constant, 19 n.

    Its scale is a public constant, with which the table is made: nothing is left out.

    Raises:
        InvalidInput: unless 1 <= code <= n.
    """
    _shape(n, code)
    return _functional(n, options, source)


def dpsgd(
    n: int, code: int, options: CountOptions = PRINTED, source: str = PRINTED_SOURCE
) -> Itemised:
    """Count DP-SGD of the autoencoder, Steps 4 and 6, for one user; printed total 80 n + 283.

    ``code`` does not enter: the n output gradients are clipped and perturbed.

    Raises:
        InvalidInput: unless 1 <= code <= n.
    """
    _shape(n, code)
    items = [
        *_noise(n, options, source, "one addition and one table read per feature"),
        Item(
            name="clipping divisions",
            counts=Counts(DIV=n + 1),
            kind="printed",
            note="every component, and ||g||/C",
        ),
        Item(name="sum of squares", counts=Counts(ADD=n - 1), kind="printed"),
        Item(
            name="squares",
            counts=Counts(MUL=options.squarings * n),
            kind="printed" if options.squarings == 2 else "exact",
            note="printed as 2 n multiplications; n suffice",
        ),
        Item(name="square root", counts=Counts(SQRT=1), kind="printed"),
        _gradient(n, options),
    ]
    if options.omitted_terms:
        # A lattice has one scale: the gradient is divided by the record's, and multiplied again.
        around = Counts(MUL=n) if source == PRINTED_SOURCE else Counts(DIV=n, MUL=n)
        items += [
            Item(name="scaling of the noise", counts=around, note="left out by the source"),
            Item(
                name="branches",
                counts=Counts(CMP=1, MUX=2),
                note="max(1, ||g||/C) and the sensitivity n or 2 n C; left out by the source",
            ),
        ]
    return Itemised(tuple(items))


FORMS: Mapping[str, Callable[[int, int, CountOptions, str], Itemised]] = MappingProxyType(
    {"spof": spof, "dpsgd-da": dpsgd, "fm": fm}
)


def op_count(
    system: str,
    n: int,
    code: int,
    options: CountOptions = PRINTED,
    source: str = PRINTED_SOURCE,
) -> Itemised:
    """Count ``spof``, ``dpsgd-da`` or ``fm``, itemised, for n features and a code of length l.

    Args:
        system: one of these names.
        n: features.
        code: length of the code.
        options: way of counting.
        source: source of the noise, a name in ``step.noise_tables.named.SOURCES``.

    Raises:
        InvalidInput: another name; sizes other than 1 <= code <= n.
    """
    check.choice(SOURCES, source=source)
    return FORMS[check.choice(tuple(FORMS), system=system)](n, code, options, source)


def executed(options: CountOptions) -> CountOptions:
    """Return the options under which the closed form equals an execution.

    Nothing is left out and a square takes one multiplication; the switches of the algorithm stay.
    """
    return replace(options, squarings=1, omitted_terms=True)


def _noise(draws: int, options: CountOptions, source: str, note: str) -> tuple[Item, ...]:
    """Count so many noisy numbers: printed by table reads, or as kernels draw and release them."""
    if source != PRINTED_SOURCE:
        return drawing.coordinates(source, draws).items
    counts = Counts(ADD=draws) + draws * noise_sample(options)
    return (Item(name="noise", counts=counts, kind="printed", note=note),)


def _functional(n: int, options: CountOptions, source: str) -> Itemised:
    """Count the noisy coefficients alpha_2 = 1/2 - x, alpha_3 = x/2 - 1/4 of every feature."""
    alpha3 = Counts(SHIFT=1, SUB=1) if options.alpha3_by_shift else Counts(MUL=1, SUB=1)
    return Itemised(
        (
            *_noise(2 * n, options, source, "two additions and two table reads per feature"),
            Item(
                name="coefficients",
                counts=Counts(SUB=n) + n * alpha3,
                kind="exact" if options.alpha3_by_shift else "printed",
            ),
        )
    )


def _omitted_of_spof(n: int, code: int, options: CountOptions, source: str) -> tuple[Item, ...]:
    if not options.omitted_terms:
        return ()
    note = "left out by the source"
    return (
        Item(name="constant c_j", counts=Counts(ADD=code - 1, MUL=1), note=f"c sum h; {note}"),
        Item(
            name="sensitivity",
            counts=Counts(MUL=3, ADD=2),
            note=f"3n/2 + n c_j(c_j/2 + 2) over sqrt(2) epsilon; {note}",
        ),
        Item(name="scaling of the noise", counts=Counts(MUL=2 * n), note=note)
        if source == PRINTED_SOURCE
        else drawing.record_scale(),
    )


def _gradient(n: int, options: CountOptions) -> Item:
    """Count A_i = e^a/(1 + e^a) - x_i."""
    sigmoid = Counts(EXP=1, ADD=1, DIV=1)
    note = "e^a/(1 + e^a) - x"
    if options.a_zero_shortcut:
        counts, note = Counts(SUB=n), "1/2 - x"
    elif options.shared_exp:
        counts = sigmoid + Counts(SUB=n)
    else:
        counts = n * (sigmoid + Counts(SUB=1))
    printed = not (options.a_zero_shortcut or options.shared_exp)
    return Item(name="gradient", counts=counts, kind="printed" if printed else "exact", note=note)


def _shape(n: int, code: int) -> None:
    check.integer(1, n=n)
    check.integer(1, n, code=code)


__all__ = [
    "CORRECTED",
    "FORMS",
    "PRINTED",
    "VARIANTS",
    "CountOptions",
    "dpsgd",
    "draws_of",
    "executed",
    "fm",
    "noise_sample",
    "op_count",
    "spof",
]
