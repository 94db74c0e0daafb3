"""A report with every kind of figure, for the tests of its renderers; its numbers are made up."""

from __future__ import annotations

from dpkern.base.report import Figure, Mark, Report, ReportTable, Series

SYSTEMS = ("SPOF", "DP-SGD", "DP-SGD, 44 n + 283")

STACKED = Figure(
    name="operations",
    title="Operations per record, n = 14, l = 7",
    caption="SPOF takes a quarter of DP-SGD's operations; the square root alone costs 252.",
    kind="stacked",
    x_label="system",
    y_label="macro operations (AMD K7)",
    series=[
        Series(label="noise", x=SYSTEMS, y=[196, 98, 98]),
        Series(label="coefficients", x=SYSTEMS, y=[70, None, None]),
        Series(label="stabilisation", x=SYSTEMS, y=[98, None, None]),
        Series(label="clipping divisions", x=SYSTEMS, y=[None, 480, 480]),
        Series(label="norm: squares and sum", x=SYSTEMS, y=[None, 97, 55]),
        Series(label="square root", x=SYSTEMS, y=[None, 252, 252]),
        Series(label="gradient terms", x=SYSTEMS, y=[None, 476, 14]),
    ],
)
N = (8, 16, 32, 64, 128, 256)
LINES = Figure(
    name="size",
    title="Operations against the number of features",
    caption="At l = n/2 SPOF is dearer from n = 127 on.",
    kind="lines",
    x_label="features n, l = n/2",
    y_label="macro operations",
    series=[
        Series(label="SPOF", x=N, y=[(19 + n // 2) * n for n in N]),
        Series(label="DP-SGD as printed", x=N, y=[80 * n + 283 for n in N]),
        Series(label="DP-SGD, n squarings", x=N, y=[77 * n + 283 for n in N]),
        Series(label="DP-SGD, a = 0", x=N, y=[44 * n + 283 for n in N]),
    ],
    marks=[
        Mark(x=127, y=10443, text="crossover near n = 127"),
        Mark(x=59, y=2880, text="n = 59 with a = 0"),
    ],
    log_x=True,
    log_y=True,
)
SENSITIVITY = Figure(
    name="sensitivity",
    title="How the ratio answers to each primitive's cost",
    caption="Change of the ratio if one primitive costs 10 % more.",
    kind="bars",
    x_label="primitive",
    y_label="change of the ratio, %",
    series=[Series(label="ratio", x=["ADD", "MUL", "DIV", "OR"], y=[2.1, 0.4, -4.9, 0.03])],
    horizontal=True,
)
ROOFLINE = Figure(
    name="roofline",
    title="Roofline of a step",
    caption="Noise is bound by arithmetic, the sums by memory.",
    kind="roofline",
    x_label="FLOP per byte",
    y_label="FLOP/s",
    series=[
        Series(label="copy bandwidth 11 GB/s", x=[0.01, 8.2], y=[1.1e8, 9e10]),
        Series(label="matmul peak 90 GFLOP/s", x=[8.2, 1000], y=[9e10, 9e10]),
        Series(label="clip.clip_sum", x=[0.5], y=[4.4e9], points=True),
        Series(label="update.step", x=[0.3], y=[1.1e9], points=True),
        Series(label="ghost.conv_norm", x=[30], y=[4.1e10], points=True),
        Series(label="product.matmul", x=[110], y=[8.0e10], points=True),
    ],
    log_x=True,
    log_y=True,
)
LAYERS = [f"layer{i}.{j}.conv{k}.weight" for i in (1, 2, 3) for j in (0, 1) for k in (1, 2)]
PER_LAYER = Figure(
    name="layers",
    title="Seconds per layer",
    caption="Eleven parts; the smallest are drawn as one.",
    kind="stacked",
    x_label="parameter",
    y_label="ms",
    series=[
        Series(label=f"part {p}", x=LAYERS, y=[(p + 1) * (i + 1) / 10 for i in range(len(LAYERS))])
        for p in range(11)
    ],
)
REPORT = Report(
    name="sample",
    title="What a private step costs <on paper>",
    summary="SPOF takes 364 operations per record and DP-SGD 1403: 74.06 % less.",
    facts={
        "spof": 364,
        "dpsgd-da": 1403,
        "reduction": 74.056,
        "limit": float("inf"),
        "</script>": 1,
    },
    tables=[
        ReportTable(
            title="Operations & costs",
            columns=["system", "operations", "ratio", "source"],
            rows=[["SPOF", 364, 0.2594, "G.1"], ["DP-SGD", 1403, 1.0, None]],
            note="Per record.",
        ),
        ReportTable(title="Words", columns=["op", "words"], rows=[["noise", 1234567]]),
    ],
    figures=[STACKED, LINES, SENSITIVITY, ROOFLINE, PER_LAYER],
    notes=["Nothing about time.", "A gate counts like an addition."],
)
