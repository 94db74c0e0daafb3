"""Items of GReDP without training: the variance of its noise, and what its theorems certify.

Source: GReDP, algorithm 1, theorems 1 to 3, corollary 2.
"""

from __future__ import annotations

import math

import torch

from ...privacy.accounting import events
from ...privacy.theory import gaussian, rdp
from ..claims import certified
from ..result import ComparisonRow, Line, Panel, Paper, Result
from ..runner import ItemRequest
from . import corollary, formula_verdicts

DELTA = 1e-5
PAPER = Paper("gredp", settings={"delta": DELTA})


def variance(request: ItemRequest) -> Result:
    """Compute the output noise's variance by index, mirrored correlation, N = 16, sigma c = 1."""
    del request
    draws, size = (200_000, 16)
    generator = torch.Generator().manual_seed(0)
    kinds = {"real": (1.0, 0.0), "circular": (0.5**0.5, 0.5**0.5), "ab .9": (0.9, 0.19**0.5)}
    kinds["circular_full"] = (1.0, 1.0)
    rows, lines = [], []
    for kind, (a, b) in kinds.items():
        noise = torch.complex(
            a * torch.randn(draws, size, generator=generator, dtype=torch.float64),
            b * torch.randn(draws, size, generator=generator, dtype=torch.float64),
        )
        released = torch.fft.ifft(noise, norm="ortho").real
        found = released.var(0).tolist()
        mirrored = torch.corrcoef(released[:, [3, 13]].T)[0, 1].item()
        claim = 0.5 if kind != "circular_full" else None
        for index in (0, 3, 8):
            rows.append(
                ComparisonRow(
                    item="variance",
                    setting=f"{kind} (a {a:.3g}, b {b:.3g}), index {index}",
                    quantity="variance / (c sigma)^2",
                    published=claim,
                    ours=found[index],
                    spread=1.96 * found[index] * math.sqrt(2 / draws),
                    data=f"{draws} draws",
                    seeds=1,
                )
            )
        rows.append(
            ComparisonRow(
                item="variance",
                setting=f"{kind}, correlation of entries 3 and 13",
                quantity="correlation",
                published=0.0 if claim else None,
                ours=mirrored,
                spread=1.96 * (1 - mirrored**2) / math.sqrt(draws),
                data=f"{draws} draws",
                seeds=1,
            )
        )
        lines.append(Line(label=kind, x=range(size), y=found))
    lines.append(Line(label="printed", x=(0, size - 1), y=(0.5, 0.5), level=True))
    unit = "variance / (c sigma)^2"
    panel = Panel(title="variance of the real part", x_label="index", y_label=unit, lines=lines)
    notes = (
        "G5: the printed variance 1/2 holds at generic indices only",
        "+- is half a 95 % interval of the simulated number",
    )
    result = PAPER.result("variance", "noise of the real part", rows, [panel], notes)
    return result.judged(formula_verdicts.of_variance(rows))


def checks(request: ItemRequest) -> Result:
    """Compare the claims of theorem 3 and corollary 2 with what is certified (5 layers, MNIST)."""
    del request
    rate, steps, layers = 500 / 60_000, 3600, 5
    rows = []
    for epsilon in (0.365, 0.5, 1.0):
        sigma = gaussian.classic_sigma(epsilon, DELTA)
        exact = gaussian.exact_epsilon(sigma / math.sqrt(2), DELTA)
        rows.append(
            ComparisonRow(
                item="checks",
                setting=f"theorem 3, one release, sigma {sigma:.5g}",
                quantity="exact epsilon",
                published=epsilon,
                ours=exact,
                epsilon_claimed=epsilon,
                epsilon_certified=exact,
                relation="add_remove",
            )
        )
    for sigma in (2.586, 1.461):
        for what, factor in (
            ("plain DP-SGD", 1.0),
            ("circular noise", 2.0),
            (f"{layers} layers clipped to c each", float(layers)),
            ("both", 2.0 * layers),
        ):
            multiplier = sigma / math.sqrt(factor)
            claim, _ = certified(events.gaussian(sigma), sample_rate=rate, steps=steps)
            proved, relation = certified(events.gaussian(multiplier), sample_rate=rate, steps=steps)
            rows.append(
                ComparisonRow(
                    item="checks",
                    setting=f"{what}, sigma {sigma}: multiplier {multiplier:.4g}",
                    quantity="Renyi epsilon, integer orders",
                    ours=rdp.rdp_epsilon(rate, multiplier, steps, DELTA).epsilon,
                    epsilon_claimed=claim,
                    epsilon_certified=proved,
                    relation=relation,
                )
            )
    for placement in corollary.PLACEMENTS:
        rows.append(
            ComparisonRow(
                item="checks",
                setting=f"corollary 2, alpha 20, e 0.5, {placement}",
                quantity="sigma",
                ours=corollary.corollary2_sigma(0.5, 20, DELTA, placement=placement),
                note="G7: reads proposition 1 backwards; 1.24 where the theorem has 1.25",
            )
        )
    result = PAPER.result("checks", "theorems 1 to 3 and corollary 2", rows)
    return result.judged(formula_verdicts.of_checks(rows))
