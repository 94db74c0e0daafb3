"""The test of batch invariance: what passes, what is named, and what certificates say of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.step_models import LeNet
from dpkern import InvalidInput, PrivacyEngine, UnsupportedModule, survey
from dpkern.base.threads import torch_threads
from dpkern.engine.batch_invariance import BatchInvariance
from dpkern.engine.batch_trial import TrialBatch
from dpkern.engine.clip_norms import L1Normed, NormedGradients
from dpkern.engine.layers.expression import Expression
from dpkern.engine.per_sample_gradients import ExplicitGradients
from dpkern.engine.row_bits import _runs_compiled, checksums
from dpkern.ops import direct, product
from dpkern.ops.backends import cpu
from dpkern.ops.clip import ClipResult
from dpkern.privacy.accounting import Ledger
from dpkern.privacy.accounting.history import BATCHED_BITS, REAL_SUMS, TESTED_BITS
from dpkern.privacy.mechanisms import DPSGD, SpectralDP
from tests.engine.test_exact_released import Images

Loss = Callable[..., Tensor]


class Encoder(nn.Module):
    """Embedding, one transformer layer, and a head over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(30, 16)
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.token(ids)))


class Rounded(nn.Module):
    """Multiplies by one over the number of rows, and by that number."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 / len(x)) * len(x)


class LastPlace(nn.Module):
    """Rounds the last row otherwise, as a vector's remainder may be."""

    def forward(self, x: Tensor) -> Tensor:
        last = torch.arange(len(x)) == len(x) - 1
        return x * (1 + last[:, None] * 2.0**-23)


class InnerLoss(nn.Module):
    """Returns its loss beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layer(x)
        return outputs.square().sum(), outputs


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), *between, nn.ReLU(), nn.Linear(32, 10))


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.LayerNorm(128),
        nn.Linear(128, 10),
    )


def tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Loss]] = {
    "mlp": (mlp, (20,), nn.CrossEntropyLoss()),
    "lenet": (LeNet, (1, 28, 28), nn.CrossEntropyLoss()),
    "grouped": (grouped, (3, 8, 8), nn.CrossEntropyLoss()),
    "encoder": (Encoder, (), tokens),
}


def samples(shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if not shape:
        ids = torch.randint(30, (2, count, 7), generator=generator)
        return ids[0], ids[1]
    x = torch.randn(count, *shape, generator=generator)
    return x, torch.randint(10, (count,), generator=generator)


class Made:
    """A private model without a loader, and its sums before noise."""

    def __init__(self, module: nn.Module, reduction: str = "mean", **options: Any) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        self.engine = PrivacyEngine()
        bounds = {} if "mechanism" in options else {"max_grad_norm": 0.1, "noise_multiplier": 1.0}
        options = {**bounds, "arithmetic": "exact"} | options
        self.engine.make_private(
            module=module,
            optimizer=self.optimizer,
            data_loader=None,
            loss_reduction=reduction,
            sample_rate=1.0,
            expected_batch_size=8.0,
            **options,
        )
        self.results: list[ClipResult] = []
        add, adopt = self.engine.step.add, self.engine.step.adopt

        def keep(**given: Any) -> None:
            self.results.append(given["sum"])
            add(**given)

        def keep_replayed(
            sums: tuple[Tensor, ...], *, samples: int, nonfinite: int, clipped_as: object = None
        ) -> None:
            flat = self.engine.capture.program.flat
            assert flat is not None
            last = self.results[-1]  # a recorded one, of the same plan
            norms = flat.norms(samples)
            found = {"norms": norms, "batch_size": samples, "nonfinite": nonfinite}
            self.results.append(replace(last, sums=sums, **found))
            adopt(sums, samples=samples, nonfinite=nonfinite, clipped_as=clipped_as)

        self.engine.step.add = keep  # type: ignore[method-assign]
        self.engine.step.adopt = keep_replayed  # type: ignore[method-assign]

    def test(self, x: Tensor, y: Tensor, loss: Loss) -> BatchInvariance:
        found = self.engine.validate(None, x, targets=y, loss=loss)
        assert found is not None
        return found

    def step(self, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
        """The integer sum of one step."""
        self.engine.new_samples()
        loss(self.module(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return torch.cat([part.flatten().clone().long() for part in self.results[-1].sums])

    @property
    def certified_for(self) -> str:
        return self.engine.step.certify(1e-5).certified_for

    @property
    def notes(self) -> str:
        return "; ".join(self.engine.step.certify(1e-5).notes)


@pytest.fixture(scope="module", params=MODELS)
def tried(request: pytest.FixtureRequest) -> tuple[str, Made, BatchInvariance]:
    torch.manual_seed(0)
    model, shape, loss = MODELS[request.param]
    made = Made(model())
    return request.param, made, made.test(*samples(shape, 40), loss)


def test_models_pass_and_each_operation_has_its_word(
    tried: tuple[str, Made, BatchInvariance],
) -> None:
    name, made, found = tried
    words = {each.operation: each.word for each in found.operations}
    assert found.word == "tested"
    assert not found.uses
    assert found.rows == 48
    assert not found.reads
    largest = max(p.numel() for p in made.module.parameters() if p.dim() == 2)
    products = "proved" if direct.is_own_product(torch.float32, largest) else "tested"
    assert words["product.matmul"] == products
    norms = {"grouped": "group", "encoder": "layer"}
    if name in norms:
        assert words[f"ghost.{norms[name]}_norm_backward"] == "proved"
        assert words[f"native_{norms[name]}_norm"] == "tested"
    assert words["_log_softmax"] == "tested"


def test_certificates_of_tested_steps_have_no_condition(
    tried: tuple[str, Made, BatchInvariance],
) -> None:
    name, made, _ = tried
    _, shape, loss = MODELS[name]
    x, y = samples(shape, 40)
    for count in (40, 33, 1):
        made.step(x[:count], y[:count], loss)
    assert made.certified_for == TESTED_BITS
    assert "if" not in made.certified_for.split()
    assert "tested for " in made.notes
    assert "_log_softmax" in made.notes


def test_one_record_more_moves_the_sums_by_its_own_integers(
    tried: tuple[str, Made, BatchInvariance],
) -> None:
    """In any company: means are undone before they round, and shapes are filled up."""
    name, made, _ = tried
    _, shape, loss = MODELS[name]
    x, y = samples(shape, 40)
    alone = made.step(x[:1], y[:1], loss)
    assert alone.any()
    for others in (slice(1, 4), slice(1, 24), slice(5, 38)):
        rest = made.step(x[others], y[others], loss)
        first = made.step(torch.cat([x[:1], x[others]]), torch.cat([y[:1], y[others]]), loss)
        last = made.step(torch.cat([x[others], x[:1]]), torch.cat([y[others], y[:1]]), loss)
        assert torch.equal(first - rest, alone)
        assert torch.equal(last - rest, alone)


FAILING: dict[str, tuple[Callable[[], nn.Module], Loss, set[str]]] = {
    "divided by rows": (lambda: mlp(Rounded()), nn.CrossEntropyLoss(), {"mul"}),
    "the last place": (lambda: mlp(LastPlace()), nn.CrossEntropyLoss(), {"arange"}),
    "masks": (lambda: mlp(nn.Dropout()), nn.CrossEntropyLoss(), set()),
    "a mean that divides first": (
        mlp,
        lambda outputs, y: F.mse_loss(outputs, F.one_hot(y, 10).float()),
        {"mse_loss_backward"},
    ),
    "a mean of a third": (
        mlp,
        lambda outputs, y: F.cross_entropy(outputs, y) / 3,
        {"nll_loss_backward"},
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_what_depends_on_the_batch_is_named(case: str) -> None:
    model, loss, operations = FAILING[case]
    torch.manual_seed(0)
    made, (x, y) = Made(model()), samples((20,), 50)
    found = made.test(x, y, loss)
    assert found.word == "not invariant"
    assert found.uses
    named = {each.operation for each in found.operations if each.word == "not invariant"}
    assert bool(named & operations) == bool(operations)
    made.step(x, y, loss)
    assert made.certified_for == BATCHED_BITS
    assert "depends on its batch by rounding" in made.notes
    assert all(operation in made.notes for operation in named)


class Adapted(nn.Module):
    """A frozen layer with a product of two trained matrices added to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(33, 33) / 6, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(5, 33)), nn.Parameter(torch.randn(33, 5))
        self.head = nn.Linear(33, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.view(-1, 4, 33), self.weight + self.b @ self.a)
        return self.head(y.mean(1))


def _last_differs(function: Callable[..., Any], batched: bool) -> Callable[..., Any]:
    """Lead the last of several samples back otherwise, if they are led back together."""

    def led_back(self: Expression, g: Tensor, **options: bool) -> Any:
        found = function(self, g, **options)
        if not batched or not options:
            return found
        last = torch.arange(len(g)) == len(g) - 1
        return [rows * (1 + last.view(-1, 1, 1) * 2.0**-20) for rows in found]

    return led_back


@pytest.mark.parametrize("batched", [True, False], ids=["not invariant", "invariant"])
def test_expressions_are_tested_too_and_led_back_sample_by_sample_where_they_fail(
    batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Expression, "_gradients", _last_differs(Expression._gradients, batched))
    made, (x, y) = Made(Adapted()), samples((132,), 40)
    loss = nn.CrossEntropyLoss()
    with cpu.use_own_products(True):
        found = made.test(x, y, loss)
        assert found.word == "tested"
        assert found.samples_apart is made.engine.capture.samples_apart
        assert found.samples_apart or not batched
        assert "mm" in found.named("tested").split(", ")
        alone = made.step(x[:1], y[:1], loss)
        rest = made.step(x[1:24], y[1:24], loss)
        last = made.step(torch.cat([x[1:24], x[:1]]), torch.cat([y[1:24], y[:1]]), loss)
    assert torch.equal(last - rest, alone)
    assert made.certified_for == TESTED_BITS


def test_expressions_that_stay_different_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is led back differs by the number of samples, apart or not."""
    own, calls = Expression._gradients, [0.0]

    def led_back(self: Expression, g: Tensor, **options: bool) -> Any:
        calls[0] += 1
        return [rows * (1 + calls[0] * 2.0**-23) for rows in own(self, g, **options)]

    torch.manual_seed(0)
    monkeypatch.setattr(Expression, "_gradients", led_back)
    made, (x, y) = Made(Adapted()), samples((132,), 40)
    with cpu.use_own_products(True):
        found = made.test(x, y, nn.CrossEntropyLoss())
        assert found.word == "not invariant"
        assert {use.split()[0] for use in found.uses} == {"a", "b"}
        made.step(x, y, nn.CrossEntropyLoss())
    assert made.certified_for == BATCHED_BITS


@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_coordinates_are_tested_too_and_made_sample_by_sample_where_they_fail(
    keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of several samples at once are made to round by how many there are."""
    own = NormedGradients._apart

    def rounded(self: NormedGradients, samples: slice) -> NormedGradients:
        found = own(self, samples)
        coordinates = found.coordinates
        off = 1 + found.batch * 2.0**-22 * (found.batch > 1)
        monkeypatch.setattr(found, "coordinates", lambda scale: coordinates(scale) * off)
        return found

    monkeypatch.setattr(NormedGradients, "_apart", rounded)
    torch.manual_seed(0)
    module, loss = Images(), nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 3, 9, 9, generator=generator), torch.arange(40) % 4
    made = Made(
        module,
        mechanism=SpectralDP(
            sites=survey(module, x[:2]),
            noise_multiplier=1.0,
            max_grad_norm=0.1,
            keep_fraction=keep,
            clipping="flat",
        ),
    )
    with cpu.use_own_products(True), torch_threads(1):
        found = made.test(x, y, loss)
        assert (found.word, found.samples_apart) == ("tested", True)
        alone = made.step(x[:1], y[:1], loss)
        for _ in range(4):
            rest = made.step(x[1:24], y[1:24], loss)
            last = made.step(torch.cat([x[1:24], x[:1]]), torch.cat([y[1:24], y[:1]]), loss)
            assert torch.equal(last - rest, alone)
        assert made.engine.capture.program.replays > 2
    assert made.certified_for == TESTED_BITS


def test_operations_of_some_sizes_alone_hide_no_others() -> None:
    """A weight of 16 rows is compared with the identity where a pass has 16 rows."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(20, 16), nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.first(x), torch.eye(16) + self.weight)

    torch.manual_seed(0)
    made, (x, y) = Made(Square()), samples((20,), 20)
    with cpu.use_own_products(True):
        found = made.test(x, y, nn.CrossEntropyLoss())
    assert found.word == "tested"
    assert {"product.matmul", "_log_softmax"} <= {each.operation for each in found.operations}
    nothing = replace(found, operations=())
    assert nothing.word == "tested"  # what names no operation proves none


class Switched(nn.Module):
    """One of two activations, or of two ways to the same matrix."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.column, self.row = nn.Parameter(torch.randn(20, 1)), nn.Parameter(torch.randn(1, 20))
        self.head = nn.Linear(20, 10)
        self.between, self.switched = between, False

    def forward(self, x: Tensor) -> Tensor:
        apart = self.switched and not self.between
        y = F.linear(x, self.column @ self.row if apart else self.column * self.row)
        return self.head(y.sigmoid() if self.switched and self.between else y.tanh())


@pytest.mark.parametrize("between", [True, False], ids=["between layers", "in an expression"])
def test_operations_that_were_not_tested_end_its_statement(between: bool) -> None:
    torch.manual_seed(0)
    module, loss = Switched(between), nn.CrossEntropyLoss()
    made, (x, y) = Made(module), samples((20,), 30)
    with cpu.use_own_products(True):
        assert made.test(x, y, loss).word == "tested"
        for _ in range(4):
            made.step(x, y, loss)
        assert made.certified_for == TESTED_BITS
        module.switched = True
        made.step(x, y, loss)
    assert made.certified_for == BATCHED_BITS
    assert "operations behind them" in made.notes


def test_coordinates_made_apart_lie_in_memory_of_their_own() -> None:
    """The library may round by the place of an operand, which follows the sample's number."""
    record = L1Normed(ExplicitGradients(torch.randn(4, 3, 3)))
    for apart in (False, True):
        record.samples_apart = apart
        (part,) = record._apart(slice(2, 3)).record.per_sample()
        assert torch.equal(part, record.per_sample()[2])
        shared = (
            part.untyped_storage().data_ptr() == record.per_sample().untyped_storage().data_ptr()
        )
        assert shared is not apart


@pytest.mark.parametrize("own", [False, True])
def test_other_products_are_named_where_the_librarys_may_be_the_reason(own: bool) -> None:
    made, (x, y) = Made(mlp(LastPlace())), samples((20,), 20)
    with cpu.use_own_products(own):
        found = made.test(x, y, nn.CrossEntropyLoss())
    assert found.word == "not invariant"
    assert ("use_own_products(True)" in str(found)) is not own


@pytest.mark.parametrize("own", [False, True])
def test_whose_product_it_is_follows_from_the_factors_however_they_are_named(own: bool) -> None:
    x, w = torch.ones(3, 5), torch.ones(5, 2)
    with cpu.use_own_products(own):
        for args, named in (((x, w), {}), ((x,), {"w": w}), ((), {"x": x, "w": w})):
            assert _runs_compiled(product.matmul, args, named) is own


def test_a_summed_loss_needs_nothing_undone() -> None:
    made, (x, y) = Made(mlp(), reduction="sum"), samples((20,), 20)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, F.one_hot(targets, 10).float(), reduction="sum")

    assert made.test(x, y, loss).word == "tested"
    difference = made.step(x[:20], y[:20], loss) - made.step(x[:19], y[:19], loss)
    assert torch.equal(difference, made.step(x[19:20], y[19:20], loss))


def test_a_mean_is_undone_before_it_rounds() -> None:
    """Without a test and padding too, gradients are those of the summed loss to the last bit."""
    x, y = samples((20,), 7)
    found = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        made = Made(mlp(), reduction=reduction)
        found.append(made.step(x, y, nn.CrossEntropyLoss(reduction=reduction)))
    assert torch.equal(*found)


@pytest.mark.parametrize("form", ["keyword", "function", "weighted", "scaled"])
def test_every_form_of_a_backward_pass_is_undone(form: str) -> None:
    x, y = samples((20,), 7)

    def sums(backward: Callable[[Tensor], None]) -> Tensor:
        torch.manual_seed(0)
        made = Made(mlp(), max_grad_norm=1e6)
        made.engine.new_samples()
        backward(F.cross_entropy(made.module(x), y))
        made.optimizer.step()
        return torch.cat([part.flatten().long() for part in made.results[-1].sums])

    backwards: dict[str, Callable[[Tensor], None]] = {
        "keyword": lambda loss: loss.backward(retain_graph=True),  # type: ignore[no-untyped-call]
        "function": lambda loss: torch.autograd.backward([loss]),
        "weighted": lambda loss: loss.backward(torch.tensor(2.0)),  # type: ignore[no-untyped-call]
        "scaled": lambda loss: torch.autograd.backward(loss, grad_tensors=torch.tensor(2.0)),
    }
    factor = 2 if form in ("weighted", "scaled") else 1
    plain = sums(lambda loss: (loss * factor).backward())  # type: ignore[no-untyped-call]
    assert torch.equal(sums(backwards[form]), plain)


@pytest.mark.parametrize("tested", [False, True])
def test_a_pass_in_between_changes_no_scale(tested: bool) -> None:
    """The loss that goes backward says how many samples its mean is over."""
    x, y = samples((20,), 30)
    sums = []
    for between in (False, True):
        torch.manual_seed(0)
        made = Made(mlp(), max_grad_norm=1e6)
        if tested:
            made.test(x, y, nn.CrossEntropyLoss())

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs, targets)

        made.step(x[:5], y[:5], loss)  # the first pass is probed
        made.engine.new_samples()
        outputs = made.module(x[:5])
        if between:
            made.module(x)
        loss(outputs, y[:5]).backward()  # type: ignore[no-untyped-call]
        made.optimizer.step()
        result = made.results[-1]
        assert result.batch_size == 5
        sums.append(torch.cat([part.flatten().long() for part in result.sums]))
        words = TESTED_BITS if tested and not between else BATCHED_BITS
        assert made.certified_for == words
    assert torch.equal(*sums)


def test_narrow_losses_keep_their_mean() -> None:
    """A bfloat16 cannot hold the number of samples."""
    x, y = samples((20,), 261)
    sums = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        made = Made(mlp(), max_grad_norm=1e6, noise_multiplier=2.0**-4)
        made.engine.new_samples()
        F.cross_entropy(made.module(x), y).to(dtype).backward()  # type: ignore[no-untyped-call]
        assert made.engine.capture.mean_undone == (dtype is torch.float32)
        made.optimizer.step()
        sums.append(torch.cat([part.flatten().double() for part in made.results[-1].sums]))
    assert float((sums[0] - sums[1]).norm() / sums[0].norm()) < 1e-5


def test_rows_that_fill_a_batch_up_are_in_no_mean() -> None:
    """A mean that is not undone is over the records, not over the rows of the padded batch."""
    x, y = samples((20,), 10)
    sums = []
    for padded in (False, True):
        torch.manual_seed(0)
        made = Made(mlp(), max_grad_norm=100.0, noise_multiplier=2.0**-4)
        if padded:
            made.test(x, y, nn.CrossEntropyLoss())
        made.engine.new_samples()
        F.cross_entropy(made.module(x), y).bfloat16().backward()  # type: ignore[no-untyped-call]
        assert not made.engine.capture.mean_undone
        made.optimizer.step()
        sums.append(torch.cat([part.flatten().double() for part in made.results[-1].sums]))
    assert float((sums[0] - sums[1]).norm() / sums[0].norm()) < 1e-5


def test_half_precision_keeps_its_mean() -> None:
    x, y = samples((20,), 16)
    made = Made(mlp())
    made.engine.new_samples()
    with torch.autocast("cpu", torch.float16):
        outputs = made.module(x)
    F.cross_entropy(outputs.float(), y).backward()  # type: ignore[no-untyped-call]
    assert not made.engine.capture.mean_undone


def test_masks_that_the_test_did_not_draw_end_its_statement() -> None:
    made, (x, y), loss = Made(mlp(nn.Dropout())), samples((20,), 16), nn.CrossEntropyLoss()
    made.module.eval()
    assert made.test(x, y, loss).word == "tested"
    made.step(x, y, loss)
    assert made.certified_for == TESTED_BITS
    made.module.train()
    made.step(x, y, loss)
    assert made.certified_for == BATCHED_BITS
    assert "other modes" in made.notes


LEAVING: dict[str, Callable[[Made, Tensor, Tensor, Loss], None]] = {
    "a larger batch": lambda made, x, y, loss: made.step(
        torch.cat([x, x]), torch.cat([y, y]), loss
    ),
    "another loss": lambda made, x, y, loss: made.step(
        x, y, lambda outputs, t: loss(2 * outputs, t)
    ),
    "another shape": lambda made, x, y, loss: made.step(x[:, :-1], y[:, :-1], loss),
}


@pytest.mark.parametrize("case", LEAVING)
def test_steps_of_another_kind_are_certified_under_the_condition(case: str) -> None:
    torch.manual_seed(0)
    made, (x, y), loss = Made(Encoder()), samples((), 32), tokens
    made.test(x, y, loss)
    made.step(x, y, loss)
    assert made.certified_for == TESTED_BITS
    LEAVING[case](made, x, y, loss)
    assert made.certified_for == BATCHED_BITS
    assert "other steps than those that were taken" in made.notes
    made.step(x, y, loss)  # and it stays so
    assert made.engine.step.ledger.state_dict()["entries"][-1]["certified_for"] == BATCHED_BITS


def test_other_numbers_of_threads_are_other_steps() -> None:
    made, (x, y), loss = Made(mlp()), samples((20,), 16), nn.CrossEntropyLoss()
    made.test(x, y, loss)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        made.step(x, y, loss)
    finally:
        torch.set_num_threads(threads)
    assert made.certified_for == BATCHED_BITS


def test_rows_that_fill_a_batch_up_are_seen_by_nobody() -> None:
    torch.manual_seed(0)
    made, (x, y), loss = Made(mlp()), samples((20,), 16), nn.CrossEntropyLoss()
    plain = made.step(x[:5], y[:5], loss)
    made.test(x, y, loss)
    shapes = []

    def seen(outputs: Tensor, targets: Tensor) -> Tensor:
        shapes.append(tuple(outputs.shape))
        return loss(outputs, targets)

    filled = made.step(x[:5], y[:5], seen)
    assert shapes == [(5, 10)]
    result = made.results[-1]
    assert result.batch_size == 5
    assert len(result.norms) == 5
    assert int(result.nonfinite) == 0
    assert float((filled - plain).double().norm() / plain.double().norm()) < 1e-4


def test_rows_of_zeros_may_come_out_as_anything() -> None:
    class Directions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.norm(dim=1, keepdim=True)

    model = nn.Sequential(nn.Linear(20, 8, bias=False), Directions(), nn.Linear(8, 10))
    made, (x, y), loss = Made(model), samples((20,), 16), nn.CrossEntropyLoss()
    assert made.test(x, y, loss).word == "tested"
    sums = made.step(x[:5], y[:5], loss)
    assert int(made.results[-1].nonfinite) == 0
    assert math.isfinite(float(made.results[-1].norms.max()))
    assert torch.equal(sums, made.step(x[:5], y[:5], loss))
    assert made.certified_for == TESTED_BITS


def test_outputs_without_rows_are_refused() -> None:
    made, (x, y) = Made(InnerLoss(), reduction="sum"), samples((20,), 16)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return outputs[0]

    with pytest.raises(UnsupportedModule, match="batches are padded"):
        made.test(x, y, loss)
    made.step(x[:5], y[:5], loss)
    assert made.certified_for == BATCHED_BITS


@pytest.mark.parametrize(
    ("options", "got"),
    [({"arithmetic": "float"}, "float"), ({"keep_budget": 10_000}, "bytes")],
)
def test_what_the_test_is_not_made_for_is_refused(options: dict[str, Any], got: str) -> None:
    made, (x, y) = Made(mlp(), **options), samples((20,), 16)
    with pytest.raises(InvalidInput, match=got):
        made.test(x, y, nn.CrossEntropyLoss())
    with pytest.raises(InvalidInput, match="samples in their first dimension"):
        Made(mlp()).test(x, y[:3], nn.CrossEntropyLoss())


def private_loader(sampling: str, most: int | None) -> tuple[PrivacyEngine, Any, Any, Any]:
    torch.manual_seed(0)
    module = mlp()
    data = torch.utils.data.TensorDataset(*samples((20,), 200))
    engine = PrivacyEngine()
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=25),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        arithmetic="exact",
        sampling=sampling,
        max_physical_batch_size=most,
    )
    return engine, *made


@pytest.mark.parametrize(("sampling", "most"), [("poisson", 20), ("fixed", None)])
def test_a_loop_over_a_loader_keeps_the_words(sampling: str, most: int | None) -> None:
    engine, module, optimizer, loader = private_loader(sampling, most)
    loss, (x, y) = nn.CrossEntropyLoss(), samples((20,), 12)
    found = engine.validate(None, x, targets=y, loss=loss)
    assert found is not None
    assert found.rows == 32
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss(module(inputs), targets).backward()
        optimizer.step()
    assert engine.step.steps == 8
    assert engine.step.certify(1e-5).certified_for == TESTED_BITS


def test_poisson_batches_need_a_largest_size() -> None:
    engine, *_ = private_loader("poisson", None)
    x, y = samples((20,), 12)
    with pytest.raises(InvalidInput, match="max_physical_batch_size"):
        engine.validate(None, x, targets=y, loss=nn.CrossEntropyLoss())


def test_histories_keep_their_words() -> None:
    exact = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="exact")
    ledger = Ledger(batched=True)
    ledger.state_invariance(True, ("tested for all",))
    ledger.record(exact, sample_rate=0.1, dimension=10)
    saved = Ledger(batched=True)
    saved.load_state_dict(ledger.state_dict())
    certificate = saved.certify(1e-5)
    assert certificate.certified_for == TESTED_BITS
    assert "tested for all" in certificate.notes
    saved.record(exact, sample_rate=0.1, dimension=10)  # nobody has tested this machine
    assert saved.certify(1e-5).certified_for == BATCHED_BITS
    rough = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, arithmetic="float")
    ledger.record(rough, sample_rate=0.1, dimension=10)
    assert ledger.certify(1e-5).certified_for == REAL_SUMS


@pytest.mark.parametrize("records", [1, 3, 40])
def test_copies_stand_in_every_place(records: int) -> None:
    for size in (16, 32, 112):
        batches = list(TrialBatch.of_size(size, records))
        assert {-(-len(batch) // 16) * 16 for batch in batches} == {size}
        assert any(len(batch) < size for batch in batches)
        full = [batch.copies >= 0 for batch in batches if len(batch) == size]
        assert bool(torch.stack(full).any(0).all())
        for batch in batches:
            copies = batch.copies >= 0
            assert torch.equal(batch.rows[copies], batch.copies[copies])
            assert not batch.large[copies].any()


@pytest.mark.parametrize("records", [3, 16, 40])
def test_every_reference_comes_to_every_place_of_a_cache_line(records: int) -> None:
    seen = {
        (int(row), place)
        for batch in TrialBatch.all(32, records)
        for place, row in enumerate(batch.copies.tolist())
        if len(batch) == 16
    }
    assert {(row, place) for row in range(min(16, records)) for place in range(16)} <= seen


class OneAtOnePlace(nn.Module):
    """Another bit of one record's numbers, where its row is the sixth of sixteen."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)) % 16 == 5
        there = places & (x[:, 0] == x[:, 0].max())
        factor = torch.where(there, 1 + 2**-23, 1.0)
        return x * factor[:, None]


def test_a_place_that_only_one_record_feels_is_found() -> None:
    """Libraries whose products go by a row's place in memory round some numbers otherwise."""
    torch.manual_seed(0)
    made, (x, y) = Made(nn.Sequential(OneAtOnePlace(), *mlp())), samples((20,), 16)
    x[0, 0] = 3e6  # above what trial batches make of the others
    with cpu.use_own_products(True):
        found = made.test(x, y, nn.CrossEntropyLoss())
    assert found.word == "not invariant"


def test_checksums_tell_single_bits() -> None:
    x = torch.randn(6, 5)
    x[3] = x[0]
    numbers = checksums(x, 6)
    assert numbers is not None
    assert numbers[0] == numbers[3] != numbers[1]
    x[3, 2] = torch.nextafter(x[3, 2], torch.tensor(math.inf))
    changed = checksums(x, 6)
    assert changed is not None
    assert changed[3] != numbers[3]
    zero = checksums(torch.tensor([[0.0], [-0.0]]), 2)
    assert zero is not None
    assert zero[0] != zero[1]
    assert checksums(x, 4) is None


def test_inputs_with_their_channels_last_are_not_what_was_tested() -> None:
    torch.manual_seed(0)
    made = Made(grouped())
    x, y = samples((3, 8, 8), 48)  # none are filled up, which would put them in rows
    loss = nn.CrossEntropyLoss()
    assert made.test(x, y, loss).word == "tested"
    for _ in range(5):
        made.step(x, y, loss)
    assert made.engine.capture.program.replays > 0
    assert "tested" in made.certified_for
    made.step(x.to(memory_format=torch.channels_last), y, loss)
    assert "tested" not in made.certified_for
