"""Randomized response: exact probabilities, equal bits on every backend, unbiased estimates."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from dpkern import DPStep
from dpkern.base.errors import InvalidInput
from dpkern.base.rng import Key, Purpose
from dpkern.ops import noise, symbols
from dpkern.papers.pnsgd import divergence
from dpkern.privacy import accounting
from dpkern.privacy.mechanisms import RandomizedResponse
from dpkern.privacy.mechanisms.randomized_response import survey
from tests.ops.backends.every_backend import every_backend

STREAM = Key.from_unsafe_seed(5).stream(Purpose.SYMBOLS, 1)
WORDS = 1 << 64


def near(value: float, rel: float = 1e-7) -> object:
    return pytest.approx(value, rel=rel)


@pytest.mark.parametrize(("k", "epsilon"), [(2**28 - 57, 2.0**-16), (2**30 - 1, 1e-3)])
def test_a_last_lie_likelier_than_the_truth_is_refused(k: int, epsilon: float) -> None:
    with pytest.raises(InvalidInput, match="categories"):
        RandomizedResponse(epsilon=epsilon, categories=k)
    # As many categories are fine where the truth stands out more.
    found = RandomizedResponse(epsilon=0.1, categories=k)
    last = WORDS - found.keep - (k - 2) * found.width
    assert found.width <= last <= found.keep


def test_printed_probabilities() -> None:
    binary = RandomizedResponse(epsilon=1.0)
    assert binary.lie == near(0.2689414, 1e-6)
    assert binary.truth / binary.lie == near(math.e, 1e-15)
    four = RandomizedResponse(epsilon=1.0, categories=4)
    assert (four.truth, four.lie) == (near(0.4753669, 1e-6), near(0.1748777, 1e-6))
    for epsilon, k in ((0.1, 2), (3.0, 10), (8.0, 1000)):
        found = RandomizedResponse(epsilon=epsilon, categories=k)
        total = math.exp(epsilon) + k - 1
        assert (found.truth, found.lie) == (near(math.exp(epsilon) / total), near(1 / total))


@pytest.mark.parametrize("epsilon", [2.0**-20, 0.1, 1.0, math.log(3), 20.0, 32.0])
@pytest.mark.parametrize("k", [2, 3, 10])
def test_the_channel_is_private_exactly_and_wastes_nothing(epsilon: float, k: int) -> None:
    mechanism = RandomizedResponse(epsilon=epsilon, categories=k)
    channel = mechanism.channel()
    assert all(sum(row) == 1 for row in channel)
    ratio = Fraction(mechanism.keep, mechanism.width)
    assert ratio == max(Fraction(max(column), min(column)) for column in zip(*channel, strict=True))
    # log(ratio) <= epsilon, in integers: ratio <= a rational number below e^epsilon.
    terms = [Fraction(1)]
    for n in range(1, 150):
        terms.append(terms[-1] * Fraction(epsilon) / n)
    below = sum(terms)
    assert ratio <= below
    # One more word for the truth would be too many.
    more = symbols.alternative_width(mechanism.keep + 1, k)
    assert mechanism.keep + 1 > below * (1 + Fraction(1, 1 << 80)) * more
    assert mechanism.ldp_epsilon == pytest.approx(epsilon, rel=1e-5)
    assert divergence.contraction(channel, ratio) == 0
    assert divergence.contraction(channel, 1 + (ratio - 1) / 2) > 0


def test_contraction_of_the_binary_channel() -> None:
    mechanism = RandomizedResponse(epsilon=1.0)
    r = Fraction(WORDS - mechanism.keep, WORDS)
    for gamma in (Fraction(1), Fraction(3, 2), Fraction(5, 2), Fraction(3)):
        found = divergence.contraction(mechanism.channel(), gamma)
        assert found == max(Fraction(0), (1 - r) - gamma * r)


def test_the_certificate_is_pure_and_replace_one() -> None:
    for epsilon, k in ((1.0, 2), (1.0, 4), (0.1, 10), (5.0, 3)):
        mechanism = RandomizedResponse(epsilon=epsilon, categories=k)
        found = accounting.certify(mechanism, sample_rate=1.0, steps=1, delta=1e-12)
        assert found.relation == "replace_one"
        assert found.certified_for == "released bits"
        # The accountant's grid adds up to 2e-4.
        assert mechanism.ldp_epsilon - 1e-9 <= found.epsilon <= epsilon + 3e-4


CASES = [
    (torch.uint8, 2, 1000, 0),
    (torch.uint8, 256, 3000, 5),
    (torch.int32, 3, 777, 2**33 + 3),
    (torch.int64, 10, 30_000, 7),
    (torch.int64, 2, 0, 0),
    (torch.int64, 1 << 30, 50, 1),
]


@every_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_symbols_follow_their_words(case: tuple[torch.dtype, int, int, int], backend: str) -> None:
    dtype, k, count, position = case
    values = (torch.arange(count) * 2654435761 % k).to(dtype)
    keep = max(RandomizedResponse(epsilon=0.5, categories=k).keep, -(-WORDS // k))
    got = symbols.randomize(
        values, stream=STREAM, keep=keep, categories=k, position=position, backend=backend
    )
    first = position // 8
    blocks = -(-(position + count) // 8) - first
    words = noise.keystream(STREAM, first_block=first, blocks=blocks).tolist()
    width = (WORDS - keep) // (k - 1)
    wanted = []
    for i, x in enumerate(values.tolist()):
        at = 2 * (position % 8 + i)
        u = (words[at] % 2**32) + (words[at + 1] % 2**32 << 32)
        wanted.append(x if u < keep else (x + 1 + min((u - keep) // width, k - 2)) % k)
    assert got.tolist() == wanted
    assert got.dtype is dtype


@pytest.mark.parametrize("k", [2, 5])
def test_responses_have_the_channels_frequencies(k: int) -> None:
    mechanism = RandomizedResponse(epsilon=1.0, categories=k)
    count = 1_000_000
    for truth in (0, k - 1):
        values = torch.full((count,), truth, dtype=torch.uint8)
        counts = torch.bincount(mechanism.randomize(values, stream=STREAM).long(), minlength=k)

        def chi_square(law: list[float], counts: torch.Tensor = counts) -> float:
            wanted = count * torch.tensor(law, dtype=torch.float64)
            return float(((counts - wanted) ** 2 / wanted).sum())

        law = [float(p) for p in mechanism.channel()[truth]]
        assert chi_square(law) < 25  # P < 1e-4 with four degrees of freedom
        wrong = RandomizedResponse(epsilon=1.02, categories=k).channel()[truth]
        assert chi_square([float(p) for p in wrong]) > 25


def test_estimates_are_unbiased_and_have_the_variance_of_theory() -> None:
    mechanism = RandomizedResponse(epsilon=1.0, categories=4)
    frequencies = [0.5, 0.3, 0.2, 0.0]
    answers = torch.tensor([0] * 500 + [1] * 300 + [2] * 200, dtype=torch.uint8)
    found = survey(mechanism, answers, stream=STREAM, repeats=2000)
    assert found.sum(dim=1).tolist() == pytest.approx([1.0] * 2000)
    variance = mechanism.variance(frequencies, 1000)
    error = found.mean(dim=0) - torch.tensor(frequencies, dtype=torch.float64)
    assert (error.abs() < 5 * (variance / 2000).sqrt()).all()
    # The relative deviation of a sample variance is about sqrt(2 / n).
    assert torch.allclose(found.var(dim=0), variance, rtol=5 * math.sqrt(2 / 2000))
    naive = torch.bincount(mechanism.randomize(answers, stream=STREAM).long(), minlength=4) / 1000
    assert abs(float(naive[3])) > 0.1  # what nobody said is answered often


def test_positions_continue_over_calls() -> None:
    mechanism = RandomizedResponse(epsilon=0.3, categories=3)
    values = torch.arange(100) % 3
    whole = mechanism.randomize(values, stream=STREAM)
    parts = [
        mechanism.randomize(values[i : i + 33].clone(), stream=STREAM, position=i)
        for i in range(0, 100, 33)
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(mechanism.randomize(values, stream=STREAM, position=1), whole)


def test_it_noises_no_gradients() -> None:
    mechanism = RandomizedResponse(epsilon=1.0)
    with pytest.raises(InvalidInput, match="randomize"):
        DPStep(mechanism, [torch.zeros(2)], expected_batch_size=1, sample_rate=0.1)
    with pytest.raises(InvalidInput, match="randomize"):
        mechanism.with_noise_multiplier(1.0)


REFUSED = {
    "floats": (lambda: randomize(torch.zeros(3)), "symbols"),
    "too large": (lambda: randomize(torch.tensor([0, 2])), "symbols"),
    "negative": (lambda: randomize(torch.tensor([-1])), "symbols"),
    "with gaps": (lambda: randomize(torch.zeros(8, dtype=torch.int64)[::2]), "symbols"),
    "no stream": (lambda: randomize(torch.tensor([0]), stream=None), "stream"),
    "one category": (lambda: randomize(torch.tensor([0]), categories=1), "categories"),
    "more lies than truth": (lambda: randomize(torch.tensor([0]), keep=WORDS // 2 - 1), "keep"),
    "no room for a lie": (lambda: randomize(torch.tensor([0]), keep=WORDS), "keep"),
    "before the stream": (lambda: randomize(torch.tensor([0]), position=-1), "position"),
    "epsilon": (lambda: RandomizedResponse(epsilon=0.0), "epsilon"),
    "a large epsilon": (lambda: RandomizedResponse(epsilon=40.0), "epsilon"),
    "k": (lambda: RandomizedResponse(epsilon=1.0, categories=1), "categories"),
    "nothing": (lambda: RandomizedResponse(epsilon=1.0).estimate(torch.zeros(0)), "responses"),
    "other": (lambda: RandomizedResponse(epsilon=1.0).estimate(torch.tensor([2])), "responses"),
}


def randomize(values: torch.Tensor, **changes: object) -> torch.Tensor:
    given: dict[str, object] = {"stream": STREAM, "keep": WORDS // 2, **changes}
    return symbols.randomize(values, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, argument = REFUSED[name]
    with pytest.raises(InvalidInput, match=argument):
        call()
