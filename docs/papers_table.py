"""Write docs/papers.md and its pictures: every figure and table of every source, with its verdict.

``python docs/papers_table.py FOLDER`` takes the folder that ``dpkern reproduce all`` has filled, or
some items of it; without it the page is written anew from what is committed. Results under
``benchmarks/results`` that have verdicts of their own, such as runs on real data, replace those of
``all``.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpkern.papers import everything
from dpkern.papers.result import (
    NONE_PUBLISHED,
    ComparisonRow,
    DiagramBox,
    Line,
    Panel,
    Result,
)
from dpkern.papers.sources import PARTS, SourcePart

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers.md"
PICTURES = ROOT / "docs" / "pictures" / "papers"
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = RESULTS / "papers.json"
WORDS = {"fails": "fails", "holds": "holds", "not decidable here": "not decidable here"}
"""Verdicts, in the order in which one of them leads."""

HEAD = """# The papers, claim by claim

Every figure and table of every source has one command, one picture and one verdict.
`dpkern reproduce all` computes all of them and writes a page for each paper, with every claim, its
interval and its reason:

```
dpkern reproduce all --quick                     # generated and embedded data
dpkern reproduce all --quick --resume            # after Ctrl-C: finished settings are kept
dpkern reproduce gredp all --data mnist=FOLDER   # one paper at the source's size
```

On two busy cores of an AMD EPYC the first one took 10 minutes, in one thread or in two; figures 4
and 5 of AdLM, a quarter of that, have lost a third of their runs since. On a Xeon, busy too, it had
taken 7 minutes 42 seconds. Everything is checked, data included, before the first training. After
Ctrl-C in the middle of nine items, of some twice, and four times in `all`, `--resume` computed no
finished setting again and ended with the numbers of a run without a break; only measured times
differ.

A verdict on an accuracy needs the source's data (the data set's own files, by their digests), all
of it, and five runs. Below every figure of accuracies stands what training without noise reached
(SPOF's beside the best constant output); where that is too little for the runs with noise to show
anything, the figure is not drawn, but for `spof released`, which shows what the authors' code does.
A quick run decides formulas and epsilons only, and says so. *fails* for an epsilon means that some
pair of neighbouring records spends more; where no such pair is known, and no certificate either,
the claim is *not decidable here*. Every figure counts the runs that the divergence guard stopped,
and those that *collapsed*: whose outputs are the same for every record. A red cross marks places
where most runs did either. Figures of tables have a row for each of theirs; what is infinite
stands at the right edge.

The table gives the verdict that leads, and how many there are of each. Its pictures are those of
the quick run{others}. Table VII needs weights in torchvision's layout:
`dpkern reproduce gredp table7 --weights FILE --train-last 1`.

Every number of a protocol is an option, with the source's value as default: rows, epochs, rates,
batches, bounds, epsilon, delta, device, and with `--set NAME=NUMBER` the rest, such as
`dpkern reproduce spof fig3 --set constant=1.25`. A name that is none lists them. Other numbers than
the source's decide no accuracy.
"""


LONGER = """## Longer runs

These ran for longer than a quick run, and stand under `benchmarks/results`:

| command | data | runs of a setting | accuracies |
|---|---|---|---|
{rows}

SPOF's figure 2 in its authors' protocol on their table (`--data fitbit=FOLDER`) has fourteen
settings of 50 runs of 29,184 steps, 35 s of processor time each, and 35 of the corrected method.
From c 2.5 on, and without the constant, every run as released gives all records the same output.
Corrected, accuracy on held-out rows falls from c 0 to c 2.5 at every epsilon.

GReDP's table I on MNIST at 30 epochs of batches of 500 has 3,600 steps a run, of 40 ms (without
privacy, DP-SGD), 57 (Spectral-DP), 54 (GReDP) and 59 ms (what it is) in a run of one epoch with one
thread of an EPYC (Zen 4): 15 minutes a seed. The fifteen runs took 55 minutes of processor time on
a busy machine, to whose load the times of its rows belong. At the printed rate training without
privacy stays 3.8 points below the printed accuracy, so that private runs cannot be the source's
either; three runs decide no accuracy.

AdLM's three columns have one seed at each epsilon that figure 4 draws, on 12,000 rows of MNIST with
5 epochs of batches of 96 at rate .003 (`--rows 12000 --epochs 5 --lr .003 --batch-size 96 --seeds
1`; accuracies after 1 and 2 epochs stand in the result). The control without noise ends at 97.7 %,
in the released code's network at 98.4 %. As printed, and corrected, AdLM stays at chance. With one
image of noise for a batch, which protects nobody, the released code reaches 81 to 82 % at epsilon
0.5 and 85 % at 2; with a draw for each record 32 and 54 %. Two other seeds at 0.5 ended within two
points of these. The twelve runs took 45 minutes of processor time on a busy machine. One run
decides no accuracy; `--seeds 5 --resume` adds the others to the same folder.

Directional noise's figure 3 has its three panels and one seed: 60 epochs of lots of 512 (`--data
mnist=FOLDER --seeds 1`), nineteen runs of 7,020 steps of 48 to 216 ms on a busy machine (50 to 85
ms alone): 3.8 hours by these times. Gaussian noise and the paper's, with and without importance,
end within 0.7 points of one another in every panel: 77.9 to 78.5 % at claimed epsilon 0.2, 77.4
to 77.6 at 0.5, 77.3 to 77.5 at 1. AdaClip stays at chance, and reaches 66 % at epsilon 1 where
its scales start at 0.01. Certified epsilons are 0.13, 0.35 and 0.74 for Gaussian noise, 0.11,
0.20 and 0.30 for the paper's without importance, and infinite with it (1/8, 1/4). One run decides
no accuracy.

What was not run, with the time that it takes by the same measure:

- AdLM's three columns with a verdict's five seeds: three hours of one core.
- more seeds of directional noise's figure 3 on MNIST: a verdict's five are 13 hours. Every run is
  kept, and `--seeds 5 --resume` adds to the same folder.
- AdLM's figure 4 at the length of the source's axis, 500 epochs: seven weeks of one core; two days
  at 20. Its released code took 80,001 steps of 1,800 records.
"""


def page(summary: Mapping[str, Any], folder: Path = RESULTS) -> str:
    """Return the page for a summary that ``dpkern reproduce all`` has written."""
    verdicts = {(one["paper"], one["item"]): one["verdicts"] for one in summary["items"]}
    replaced = []
    for part in PARTS:
        own = _own(folder, part)
        if own:
            verdicts[part.paper, part.item] = own["verdicts"]
            replaced.append(part)
    named = ", ".join(f"`{part.paper} {part.item}`" for part in replaced)
    others = f", but for {named}, which ran at length ([times](#longer-runs))" if named else ""
    lines = [HEAD.format(others=others)]
    for source in dict.fromkeys(part.source for part in PARTS):
        names = {"all": "All sources", "none": "No source"}
        lines += [f"## {names.get(source, source)}", ""]
        lines += ["| part | command | picture | verdict |", "|---|---|---|---|"]
        lines += [_row(part, verdicts) for part in PARTS if part.source == source]
        lines.append("")
    lines.append(LONGER.format(rows="\n".join(_longer(folder, part) for part in replaced)))
    return "\n".join(lines).rstrip() + "\n"


def _longer(folder: Path, part: SourcePart) -> str:
    """Return the row of a committed result: data, runs, and its accuracies in short."""
    content = _own(folder, part)
    assert content is not None
    rows = [row for row in content["rows"] if row["seeds"] and row["data"] != "formula"]
    data = dict.fromkeys(row["data"] for row in rows)
    seeds = sorted({row["seeds"] for row in rows})
    several = len({row["setting"].partition(_CLAIMED)[2] for row in rows} - {""}) > 1
    told = [
        f"{_setting(row['setting'], several)} {row['ours']:.2f} %"
        + (f" (printed {row['published']:g})" if isinstance(row["published"], float) else "")
        for row in rows
        if row["quantity"] == "accuracy %" and ", after " not in row["setting"]
    ]
    runs = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    told = told or [_leading(content["verdicts"])]
    cells = (f"`{part.command}`", "; ".join(data), runs, "; ".join(told))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_CLAIMED = ", claimed epsilon "


def _setting(words: str, several: bool) -> str:
    """Return a row's setting without its model and data set.

    Its claimed epsilon stays where there are several.
    """
    for model in ("LeNet-5, ", "MNIST, "):
        words = words.removeprefix(model)
    setting, _, epsilon = words.partition(_CLAIMED)
    return f"{setting}, epsilon {epsilon}" if several and epsilon else setting


def _own(folder: Path, part: SourcePart) -> dict[str, Any] | None:
    """Return the committed result of a part, where it has verdicts."""
    path = folder / f"{part.stem}.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content if content.get("verdicts") else None


def _row(part: SourcePart, verdicts: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
    found = verdicts.get((part.paper, part.item))
    if found is None:
        said = "needs weights that the source does not publish"
    elif not found:
        said = "a diagram; nothing is claimed"
    else:
        said = _leading(found)
    picture = f"[picture](pictures/papers/{part.stem}.png)" if found is not None else ""
    cells = (f"{part.part}: {part.about}", f"`{part.command}`", picture, said)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _leading(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the first verdict of the strongest kind, and how many there are of each."""
    counts = Counter(one["verdict"] for one in found)
    kind = next(kind for kind in WORDS if counts[kind])
    claim = next(one["claim"] for one in found if one["verdict"] == kind)
    said = ", ".join(f"{counts[each]} {word}" for each, word in WORDS.items() if counts[each])
    return f"**{kind}**: {claim}" + (f" ({said})" if len(found) > 1 else "")


def redraw(content: Mapping[str, Any], path: Path) -> None:
    """Draw a committed result's panels again."""
    panels = [
        Panel(
            **{
                **panel,
                "lines": [Line(**_numbers(line, "x", "y", "half")) for line in panel["lines"]],
                "boxes": [DiagramBox(**box) for box in panel["boxes"]],
            }
        )
        for panel in content["panels"]
    ]
    result = Result(
        rows=[_comparison(row) for row in content["rows"]],
        panels=panels,
        settings={},
        control=content.get("control", ""),
        **{name: content[name] for name in ("paper", "item", "title")},
    )
    with TemporaryDirectory() as folder:
        shutil.copy(result.write(Path(folder))["png"], path)


def _comparison(row: Mapping[str, Any]) -> ComparisonRow:
    """Return a row as it was before it was written."""
    names = ("ours", "published", "epsilon_claimed", "epsilon_certified")
    published = None if row["published"] == NONE_PUBLISHED else row["published"]
    return ComparisonRow(**_numbers({**row, "published": published}, *names))


def _numbers(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Turn words for numbers that are not finite into numbers."""
    words = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

    def number(value: Any) -> Any:
        if isinstance(value, list):
            return [number(one) for one in value]
        return words.get(value, value) if isinstance(value, str) else value

    return {name: number(value) if name in names else value for name, value in content.items()}


def update(folder: Path) -> None:
    """Take pictures and summary from a folder of ``dpkern reproduce all``, and write the page."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    if (folder / "verdicts.json").exists():
        shutil.copy(folder / "verdicts.json", SUMMARY)
    else:
        made = merged(json.loads(SUMMARY.read_text()), folder)
        SUMMARY.write_text(json.dumps(made, indent=1) + "\n")
    for part in PARTS:
        own, path = _own(RESULTS, part), PICTURES / f"{part.stem}.png"
        if own:
            redraw(own, path)
        elif (folder / path.name).exists():
            shutil.copy(folder / path.name, path)
        else:
            continue
        _shrink(path)


def merged(summary: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the summary with the items whose quick results stand in the folder replaced."""
    items = {(one["paper"], one["item"]): one for one in summary["items"]}
    for part in PARTS:
        path = folder / f"{part.stem}.json"
        if path.exists():
            content = json.loads(path.read_text())
            (items[part.paper, part.item],) = everything.summary([content], quick=True)["items"]
    papers = list(dict.fromkeys(paper for paper, _ in items))
    ordered = sorted(items, key=lambda pair: papers.index(pair[0]))
    return {**summary, "items": [items[pair] for pair in ordered]}


def _shrink(path: Path) -> None:
    """Give the picture a palette, which a third of the bytes is enough for."""
    from PIL import Image

    with Image.open(path) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        update(Path(sys.argv[1]))
    PAGE.write_text(page(json.loads(SUMMARY.read_text())))
