"""Mechanisms answer for themselves: they are listed nowhere, and nobody asks which one it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import dpkern
from dpkern.base.errors import InvalidInput
from dpkern.cost import _step_maps, steps
from dpkern.privacy import mechanisms
from dpkern.privacy.mechanisms import (
    DPSGD,
    AdaClip,
    Block,
    CataloguedMechanism,
    Mechanism,
    ObjectivePerturbation,
    ReleaseMap,
)
from dpkern.privacy.mechanisms.examples import ExampleLayer
from dpkern.privacy.mechanisms.work import OpAccount

ROOT = Path(dpkern.__file__).parents[1]
MINE = ("dpkern/privacy/mechanisms/", "dpkern/papers/")
"""Where mechanisms are declared, and where a paper's experiments speak of their own."""

APPENDIX = {"dpkern/cost/autoencoder.py", "dpkern/cost/trace.py"}
"""One paper's count of its own three algorithms, two of which are mechanisms here."""

CLASSES = {kind.__name__: kind.name for kind in CataloguedMechanism.all()}
NAMES = set(CLASSES.values())
MAPS = {"PartialNoiseMap", "SubsetMap", "TopKMap", "WhitenedCrop"}
"""Release maps; ``DiagonalMap`` and ``Taps`` are the kinds that the engine has norms for."""

TESTS = {"isinstance", "issubclass"}


def mechanism_of(node: ast.AST) -> str | None:
    """The mechanism or map that an expression names."""
    if isinstance(node, ast.Constant):
        return node.value if node.value in NAMES else None
    name = getattr(node, "id", getattr(node, "attr", None))
    return CLASSES.get(str(name), str(name) if name in MAPS else None)


def listed(node: ast.AST | None) -> Iterator[str]:
    """The mechanisms that stand in a literal or a union themselves, without calls."""
    if isinstance(node, ast.Dict):
        for part in (*node.keys, *node.values):
            yield from listed(part)
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for part in node.elts:
            yield from listed(part)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from (*listed(node.left), *listed(node.right))
    elif node is not None and (found := mechanism_of(node)):
        yield found


def offences(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every catalogue and every test for one mechanism."""
    tree = ast.parse(source)
    exported = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    }
    for node in ast.walk(tree):
        found = False
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TESTS:
            found = any(True for _ in listed(node.args[1]))
        elif isinstance(node, ast.Compare):
            found = any(mechanism_of(side) for side in (node.left, *node.comparators))
        elif isinstance(node, ast.MatchClass):
            found = mechanism_of(node.cls) is not None
        elif isinstance(node, ast.Dict | ast.Tuple | ast.List | ast.Set | ast.BinOp):
            found = id(node) not in exported and len(set(listed(node))) > 1
        if found:
            yield node.lineno, ast.unparse(node)


def sources() -> list[Path]:
    return [
        path
        for folder in ("dpkern", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(MINE)
    ]


def test_nobody_lists_mechanisms_or_asks_which_one_it_is() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{line}: {text}"
        for path in sources()
        if path.relative_to(ROOT).as_posix() not in APPENDIX
        for line, text in offences(path.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(mechanism, AdaClip)",
        "isinstance(mechanism, (mechanisms.GReDP, X))",
        "isinstance(release, WhitenedCrop | Other)",
        "type(mechanism) is DPSGD",
        "name == 'fm'",
        "{'dpsgd': a, 'pruned': b}",
        "[AdLM, ILM]",
        "((SpectralDP, 'spectral_dp', 1), (GReDP, 'gredp', 2))",
        "def f(method: SPOF | FM): ...",
        "match x:\n    case Pruned(): ...",
    ],
)
def test_what_the_rule_sees(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        "DPSGD(noise_multiplier=1.0, max_grad_norm=1.0)",
        "isinstance(mechanism, LabelMechanism)",
        "def f(mechanism: AdLM) -> None: ...",
        "choose('dpsgd')",
        "__all__ = ['adlm', 'directional']",
    ],
)
def test_what_the_rule_lets_pass(source: str) -> None:
    assert not list(offences(source))


def test_the_rule_knows_maps_by_their_names() -> None:
    kinds = [ReleaseMap]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.__name__ for kind in kinds} >= MAPS


def test_the_list_is_what_the_package_exports() -> None:
    kinds = [kind for kind in vars(mechanisms).values() if isinstance(kind, type)]
    named = {k for k in kinds if issubclass(k, CataloguedMechanism) and "name" in vars(k)}
    assert set(CataloguedMechanism.all()) == named
    assert len({kind.name for kind in named}) == len(named)
    assert set(Mechanism.all()) | set(ObjectivePerturbation.all()) == named
    for kind in named:
        assert Mechanism.named(kind.name) is kind if issubclass(kind, Mechanism) else True


def test_a_callers_own_class_is_not_in_the_list() -> None:
    class Mine(DPSGD):
        name: ClassVar[str] = "mine"

    assert Mine not in Mechanism.all()
    assert "dpsgd" in [kind.name for kind in Mechanism.all()]


@pytest.mark.parametrize("kind", Mechanism.all(), ids=lambda kind: kind.name)
def test_examples_can_be_made_and_told_apart(kind: type[Mechanism]) -> None:
    made: list[Any] = [kind(**example.at(ExampleLayer(5, 3))) for example in kind.examples]
    assert made
    assert kind.title
    assert kind.source
    assert not kind.examples[0].suffix
    assert made[0].mode == "corrected"
    assert len({example.suffix for example in kind.examples}) == len(made)
    assert len({mechanism.fingerprint for mechanism in made}) == len(made)


def test_what_is_not_said_is_not_counted_as_nothing() -> None:
    class Forgetful(AdaClip):
        def count_plan(self, work: OpAccount, sizes: Sequence[int], step: int) -> None:
            Mechanism.count_plan(self, work, sizes, step)

    mechanism = Forgetful(noise_multiplier=1.0, expected_batch_size=1.0)
    with pytest.raises(InvalidInput, match="Define its count_learning and count_plan"):
        steps.form(mechanism, [(2, 3)], 1)


def test_a_map_that_does_not_say_is_not_counted_as_nothing() -> None:
    class Twice(ReleaseMap):
        def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
            return parameter

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * rows.double()

        def to_gradient(self, noisy: torch.Tensor) -> torch.Tensor:
            return noisy.double() / 2

    block = Block(shape=(2, 3), clip_group=0, bound=1.0, noise_scale=1.0, release=Twice())
    with pytest.raises(InvalidInput, match="Define its count_forward and count_back"):
        _step_maps.noised(block, torch.float32)
