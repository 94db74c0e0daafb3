"""Items of SPOF without training: network, losses, sensitivities, and what its noise costs.

Source: SPOF, figures 1 and 6, equations (6)-(12), (22)-(33), (57), (58), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from ...base.rng import Key, Purpose
from ...ops import coef
from ...privacy.theory import spof_loss, spof_sensitivity
from ..result import ComparisonRow, DiagramBox, Line, Panel, Paper, Result
from ..runner import ItemRequest
from . import expansion, formula_verdicts, remainder

USERS, FEATURES, CODE = 2, 14, 7
PAPER = Paper("spof", settings={"users": USERS, "features": FEATURES, "code": CODE})
CLIP, CONSTANT = 4.0, 2.5
SAMPLES = 36_480
SOURCE_ROWS = SAMPLES // USERS
SOURCE_EPOCHS = 20
"""The number of epochs is ours; the paper gives none."""
REAL = torch.float64
TARGET_ONLY = "replace_one, local, as target only"


def fig1(request: ItemRequest) -> Result:
    """Draw the architecture: one encoder for each user, one decoder that serves them in turn."""
    del request
    boxes = []
    for user in range(1, USERS + 1):
        y = 1.5 * (USERS - user)
        chain = (
            f"record x_{user}\n{FEATURES} features",
            f"encoder W_{user}\n{FEATURES} x {CODE}",
            f"code h_{user}\nsigmoid, {CODE}",
            f"decoder, block {user}\n{CODE} x {FEATURES}",
            f"reconstruction {user}\nsigmoid, {FEATURES}",
        )
        boxes += [
            DiagramBox(text=text, x=2.7 * i, y=y, arrow=i > 0) for i, text in enumerate(chain)
        ]
    panel = Panel(title=f"{USERS} users; the blocks are one shared decoder", boxes=boxes)
    rows = [
        ComparisonRow(item="fig1", setting=what, quantity="parameters", ours=float(count))
        for what, count in (
            ("encoders W_j", USERS * FEATURES * CODE),
            ("shared decoder", USERS * CODE * FEATURES),
        )
    ]
    notes = ("each user's code meets its own block of the decoder only; no bias terms",)
    result = PAPER.result("fig1", "architecture", rows, [panel], notes)
    return result.judged(formula_verdicts.of_diagram())


def losses(request: ItemRequest) -> Result:
    """Compare the printed polynomial with the cross-entropy and Taylor's: S1, S2, S3, S5."""
    del request
    rows = []
    x = torch.tensor([0.0, 0.25, 0.75, 1.0], dtype=REAL)
    z = torch.linspace(-4, 4, 81, dtype=REAL)
    panels = []
    for target in (0.0, 1.0):
        at = torch.full_like(z, target)
        curves = {"cross-entropy": spof_loss.cross_entropy(z, at)}
        for form in spof_loss.FORMS:
            alpha = spof_loss.coefficients(at, form=form)
            curves[f"{form} polynomial"] = spof_loss.polynomial(alpha, z)
        panels.append(
            Panel(
                title=f"loss of one feature, x = {target:g}",
                x_label="z",
                y_label="loss",
                lines=[Line(label=k, x=z.tolist(), y=v.tolist()) for k, v in curves.items()],
            )
        )
    row = partial(ComparisonRow, item="losses")
    for form in spof_loss.FORMS:
        alpha = spof_loss.coefficients(x, form=form)
        points = remainder.stationary_point(alpha).tolist()
        below = remainder.unbounded_below(alpha).tolist()
        for target, point, unbounded in zip(x.tolist(), points, below, strict=True):
            rows.append(
                row(
                    setting=f"{form} polynomial, x {target:g}: stationary point",
                    quantity="z",
                    ours=point,
                    note="S2: at z = 1 for every x, no minimum for x < 1/2" if unbounded else "",
                )
            )
        far = spof_loss.polynomial(
            spof_loss.coefficients(x[:1], form=form), torch.tensor([10.0], dtype=REAL)
        )
        true = spof_loss.cross_entropy(torch.tensor([10.0], dtype=REAL), x[:1])
        rows.append(
            row(
                setting=f"{form} polynomial at x 0, z 10; cross-entropy {true.item():.4g}",
                quantity="loss",
                ours=far.item(),
                note="S1: sign of f2'' and Taylor's 1/2" if form == "printed" else "",
            )
        )
    for delta in (0.1, 0.5, 1.0):
        rows.append(
            row(
                setting=f"Taylor's polynomial, |z| <= {delta:g}: largest error",
                quantity="error / corrected bound",
                ours=remainder.taylor_error(delta) / remainder.taylor_error_bound_corrected(delta),
                note="S3: proposition 1 asks for a bound on all derivatives; there is none",
            )
        )
    for order in (4, 10, 18):
        rows.append(
            row(
                setting=f"derivative of order {order} of log(1 + e^z) at 0",
                quantity="value",
                ours=float(remainder.softplus_derivative(order)),
            )
        )
    rows.append(_rewriting())
    notes = (
        "S1: the printed coefficients are not Taylor's; corrected training uses 1/8",
        "S2: the printed loss has no lower bound for x < 1/2, so its training may diverge",
        "S3: corrected bound min(d^3 / (36 sqrt 3), d^4 / 192)",
        "S5: the printed rewriting (31) of the stabilised loss is not that loss",
    )
    title = "polynomials instead of the cross-entropy"
    result = PAPER.result("losses", title, rows, panels, notes)
    return result.judged(formula_verdicts.of_losses(rows))


def _rewriting() -> ComparisonRow:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, FEATURES, generator=generator, dtype=REAL)
    z = torch.randn(1, FEATURES, generator=generator, dtype=REAL)
    alpha = spof_loss.coefficients(x)
    found = {
        name: spof_loss.stabilised(alpha, z, 1.7, rewriting=name).item()
        for name in spof_loss.REWRITINGS
    }
    return ComparisonRow(
        item="losses",
        setting="stabilised loss, c 1.7, random x and z: (31) minus the loss itself",
        quantity="difference",
        published=0.0,
        ours=found["printed"] - found["direct"],
        data="random record",
        seeds=1,
        note=f"S5: with the right factor {abs(found['correct'] - found['direct']):.1e}",
    )


def fig6(request: ItemRequest) -> Result:
    """Compute sensitivities over the expansion point a, as printed and from their definition."""
    del request
    grid = [-1 + 5 * i / 200 for i in range(201)]
    spof, sgd = expansion.spof_curve, expansion.sgd_curve
    panels = [
        Panel(
            title=title,
            x_label="a",
            y_label="sensitivity of a feature",
            lines=[
                Line(label="SPOF", x=grid, y=[spof(a, form=form) for a in grid]),
                Line(label="DP-SGD, below C", x=grid, y=[sgd(a, form=form) for a in grid]),
                Line(label="DP-SGD, 2 C", x=grid, y=[2 * CLIP] * len(grid), level=True),
            ],
        )
        for title, form in (("as printed (58)", "printed"), ("from (57)", "correct"))
    ]
    printed = expansion.minimum(spof, -1, 4)
    exact = expansion.minimum(partial(spof, form="correct"), -1, 4)
    at_zero, exact_at_zero = spof(0.0), spof(0.0, form="correct")
    row = partial(ComparisonRow, item="fig6")
    wrong = "S11: (58) makes a ratio of a sum and loses a factor"
    rows = [
        row(setting="(58), minimum", quantity="a", published=0.9057, ours=printed.at, note=wrong),
        row(setting="(58), minimum", quantity="value", published=4.0348, ours=printed.value),
        row(setting="(58), a 0", quantity="value", published=4.6931, ours=at_zero),
        row(
            setting="(58), a 0 above the minimum",
            quantity="%",
            published=16.3,
            ours=100 * (at_zero / printed.value - 1),
        ),
        row(setting="(57), minimum", quantity="a", ours=exact.at, note="exactly at a = 0"),
        row(setting="(57), a 0", quantity="value", ours=exact_at_zero),
        row(setting="(57), a +-0.5", quantity="value", ours=spof(0.5, form="correct")),
        row(setting="(57), a +-1", quantity="value", ours=spof(1.0, form="correct")),
        row(setting="DP-SGD below C, a 0", quantity="value", published=1.0, ours=sgd(0.0)),
        row(
            setting="DP-SGD below C, a -1",
            quantity="value",
            published=sgd(-1.0),
            ours=sgd(-1.0, form="correct"),
            note="the printed value is too small for a < 0",
        ),
        row(setting="DP-SGD, clipped", quantity="value", published=8.0, ours=2 * CLIP),
    ]
    notes = ("S11: the corrected curve supports a = 0 without reservation",)
    result = PAPER.result("fig6", "sensitivity over the expansion point", rows, panels, notes)
    return result.judged(formula_verdicts.of_curves(rows))


def audit(request: ItemRequest) -> Result:
    """Compute what the printed noise certifies, and attack what is trained from it."""
    rows = []
    for shift in (0.0, 1.0, CONSTANT, 8.75, CODE * CONSTANT):
        factor = spof_sensitivity.audited_factor(shift)
        rows.append(
            ComparisonRow(
                item="audit",
                setting=f"step 5, one visit, epsilon 1, c_j {shift:g}, as if c_j were public",
                quantity="epsilon",
                published=1.0,
                ours=factor,
                epsilon_claimed=1.0,
                # Only a constant scale is certified: c_j comes from the record (S6).
                epsilon_certified=math.inf if shift else factor,
                relation="" if shift else TARGET_ONLY,
                note="S4: two draws of scale Dhat / (sqrt(2) epsilon) each",
            )
        )
    per_user = SOURCE_ROWS
    for what, visits, relation in (
        (f"one record in {SOURCE_EPOCHS} epochs", SOURCE_EPOCHS, TARGET_ONLY),
        (f"one user, {per_user} records", per_user * SOURCE_EPOCHS, "replace_user, as target only"),
    ):
        cost = spof_sensitivity.audited_epsilon(1.0, 0.0, visits=visits)
        rows.append(
            ComparisonRow(
                item="audit",
                setting=f"step 5 with fresh noise, {what}, c 0, epsilon 1",
                quantity="epsilon",
                published=1.0,
                ours=cost,
                epsilon_claimed=1.0,
                epsilon_certified=cost,
                relation=relation,
                note="S7: no composition is counted; parallel composition covers users only",
            )
        )
    rows += _unequal_scales()
    trials = 1000 if request.quick else 10_000
    rows.append(_attack(trials))
    y = [10 ** (exponent / 10) for exponent in range(61)]
    panel = Panel(
        title="one coefficient, c_j 8.75 or 9.25, epsilon 1",
        x_label="|value|",
        y_label="log ratio of densities",
        lines=[
            Line(label="c_j from the record", x=y, y=_ratios(y, 8.75, 9.25)),
            Line(label="c_j from the bound c l", x=y, y=_ratios(y, 17.5, 17.5)),
            Line(label="claimed, epsilon 1", x=y, y=[1.0] * len(y), level=True),
        ],
        log_x=True,
        log_y=True,
    )
    notes = (
        "S4: at c 0 one visit costs sqrt(2) epsilon",
        "S6: a scale that depends on the record has no finite epsilon at all",
        "S7: codes and inputs enter every gradient without noise, so the trained weights are "
        "certified for nothing; the corrected mode releases the record once",
    )
    result = PAPER.result("audit", "claimed and audited epsilon", rows, [panel], notes)
    return result.judged(formula_verdicts.of_audit(rows))


def _ratios(y: Sequence[float], shift: float, other: float) -> list[float]:
    """Return the largest loss over both signs of a coefficient's noisy value, targets 0 and 1."""
    at = torch.tensor(y, dtype=REAL)
    scales = [spof_sensitivity.spof_scale(FEATURES, 1.0, c) for c in (shift, other)]
    found = [
        spof_sensitivity.log_ratio(sign * at, 0.5, scales[0], -0.5, scales[1]).abs()
        for sign in (-1, 1)
    ]
    return torch.maximum(*found).tolist()


def _unequal_scales() -> list[ComparisonRow]:
    sizes = (1e3, 1e4, 1e5)
    return [
        ComparisonRow(
            item="audit",
            setting=f"one coefficient with value {size:.0e}, c_j 8.75 or 9.25, epsilon 1",
            quantity="log ratio",
            published=1.0,
            ours=found,
            epsilon_claimed=1.0,
            epsilon_certified=math.inf,
            note="S6: grows without bound",
        )
        for size, found in zip(sizes, _ratios(sizes, 8.75, 9.25), strict=True)
    ]


def _attack(trials: int) -> ComparisonRow:
    """Attack records 0 and 1, with one published gradient of the decoder each time.

    The gradient is the code times the noisy gradient of the logits. Whatever the noise, its rows
    are proportional to the code; the encoder is public after training, so the record is told by
    the direction.
    """
    generator = torch.Generator().manual_seed(0)
    bound = math.sqrt(6 / (FEATURES + CODE))
    shape = (FEATURES, CODE)
    encoder, decoder = (
        bound * (2 * torch.rand(size, generator=generator, dtype=REAL) - 1)
        for size in (shape, shape[::-1])
    )
    secret = torch.randint(0, 2, (trials,), generator=generator)
    records = secret.to(REAL)[:, None].expand(trials, FEATURES).contiguous()
    hidden = torch.sigmoid(records @ encoder)
    shift = spof_loss.shift(hidden, CONSTANT)
    key = Key.from_unsafe_seed(0)
    noise = coef.Noise(
        scale=spof_sensitivity.spof_scale(FEATURES, 1.0, shift),
        stream=key.stream(Purpose.LAPLACE, 0),
        rounding=key.stream(Purpose.ROUNDING, 0),
    )
    _, slope = coef.quadratic(hidden @ decoder, records, form="printed", noise=noise, shift=shift)
    gradients = hidden[:, :, None] * slope[:, None, :]
    directions = torch.linalg.svd(gradients)[0][:, :, 0]
    candidates = torch.sigmoid(
        torch.tensor([[0.0], [1.0]], dtype=REAL).expand(2, FEATURES) @ encoder
    )
    near = (directions @ torch.nn.functional.normalize(candidates).T).abs().argmax(1)
    share = float((near == secret).to(REAL).mean())
    return ComparisonRow(
        item="audit",
        setting="which of two records, from one noisy gradient of the decoder, epsilon 1",
        quantity="right guesses",
        published=math.e / (1 + math.e),
        ours=share,
        spread=1.96 * math.sqrt(share * (1 - share) / trials),
        epsilon_claimed=1.0,
        epsilon_certified=math.inf,
        data=f"{trials} draws",
        seeds=1,
        note="S7: the published column is the most that epsilon 1 allows; +- is half a 95 % "
        "interval",
    )
