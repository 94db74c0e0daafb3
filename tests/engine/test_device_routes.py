"""On devices, gradients are materialized where bytes and FLOPs say that it is faster, and fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpkern.base.errors import BackendError, InvalidInput
from dpkern.engine import device_cost, per_sample_gradients, routes
from dpkern.engine.device_cost import Work
from dpkern.engine.per_sample_gradients import (
    ConvolutionGradients,
    ExplicitGradients,
    LinearGradients,
    RoundedGradients,
)

SQUARE = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
GPT2 = {"attention": (768, 2304), "projection": (768, 768), "up": (768, 3072), "down": (3072, 768)}


def linear(
    positions: int, d: int, p: int, batch: int = 16, dtype: torch.dtype = torch.bfloat16
) -> LinearGradients:
    sizes = (batch, positions)
    a, g = (torch.empty(*sizes, n, dtype=dtype, device="meta") for n in (d, p))
    return LinearGradients(a, g)


def convolution(channels: int, side: int, batch: int = 256) -> ConvolutionGradients:
    x = torch.empty(batch, channels, side, side, device="meta")
    return ConvolutionGradients(x, x.clone(), (3, 3), SQUARE)


@pytest.mark.parametrize("layer", GPT2)
def test_every_layer_of_gpt2_keeps_its_gradients(layer: str) -> None:
    assert routes.worth_keeping(linear(1024, *GPT2[layer]))


@pytest.mark.parametrize("vocabulary", [50257, 50304])
def test_a_vocabulary_is_kept_as_well(vocabulary: int) -> None:
    assert routes.worth_keeping(linear(1024, 768, vocabulary))


def test_keeping_all_of_gpt2_takes_4_gigabytes_and_saves_more_than_half() -> None:
    works = [Work.of(linear(1024, *GPT2[layer])) for layer in GPT2] * 12
    works.append(Work.of(linear(1024, 768, 50257)))
    assert sum(work.gradients for work in works) == pytest.approx(3.95e9, rel=0.02)
    assert sum(work.product for work in works) == pytest.approx(4.05e12, rel=0.01)
    traffic = sum(3 * work.gradients for work in works) / device_cost.BANDWIDTH
    assert traffic == pytest.approx(2.75e-3, rel=0.02)
    kept, alone = sum(w.materialized for w in works), sum(w.norm_alone for w in works)
    assert 11e-3 < kept < 13e-3
    assert 27e-3 < alone < 30e-3


def test_wide_layers_break_even_where_slower_sums_and_norms_cost_the_traffic() -> None:
    """F / R - F / K + N = 6 P / W: at most 519 positions at 299 and 500 TFLOP/s.

    Up to 320 positions sums are no slower than the library.
    """
    wide = 1 << 14  # operands are small beside gradients
    work = Work.of(linear(600, wide, wide))
    assert work.speed == pytest.approx(299e12, rel=0.01)
    even = 3 / device_cost.BANDWIDTH / (1 / work.speed - 1 / work.keeping)
    assert even == pytest.approx(519, abs=1)
    assert routes.worth_keeping(linear(519, wide, wide))
    assert not routes.worth_keeping(linear(448, wide, wide))


def test_sums_of_a_few_hundred_positions_have_larger_tiles() -> None:
    """256 x 192 numbers: 1.71 times the products for what is loaded of 128 x 128."""
    assert Work.of(linear(197, 768, 3072)).speed == pytest.approx(513e12, rel=0.01)
    older = Work.of(linear(321, 768, 3072)).speed
    assert Work.of(linear(197, 768, 3072)).speed == pytest.approx(12 / 7 * older)
    # Chunks half empty, a type or a width that is not loaded so, a gradient that no tile fits.
    for other in (linear(66, 768, 3072), linear(197, 770, 768), linear(197, 64, 64)):
        assert Work.of(other).speed <= older
    both = linear(197, 768, 768)
    single = LinearGradients(both.a.float(), both.g.float())
    assert Work.of(single).speed == device_cost.PLAIN_PRODUCTS


def test_the_model_takes_larger_tiles_where_the_kernels_do() -> None:
    pytest.importorskip("triton")
    from dpkern.ops.backends._triton import chained, precision

    assert (chained.ROWS, chained.COLUMNS) == device_cost.CHAINED
    assert chained.DEPTH == device_cost.CHUNK
    assert precision.CHAIN == device_cost.CHAINED_POSITIONS
    for positions in (43, 66, 86, 128, 150, 197, 257, 320, 321):
        both = linear(positions, 768, 768)
        made = chained.possible(chained.Operands.linear(both.a, both.g))
        assert made == (Work.of(both).speed > 400e12)


def test_norms_of_a_few_hundred_positions_are_gram_matrices() -> None:
    """Of 210 positions 3 tiles: 256 x 192 products for 210 x 768, and operands loaded twice."""
    work = Work.of(linear(210, 768, 768))
    assert work.norm == pytest.approx(2.0 * 16 * 256 * 192 * 1536 / 500e12)
    assert work.norm < 0.7 * work.product / work.speed
    for positions in (197, 210):
        assert not routes.worth_keeping(linear(positions, 768, 768))
    for other in (linear(210, 760, 768), linear(210, 768, 760), linear(210, 48, 48)):
        assert Work.of(other).norm == Work.of(other).product / Work.of(other).speed
    assert Work.of(linear(210, 768, 1030)).norm < work.norm * 2
    both = linear(197, 768, 768)
    wide = LinearGradients(both.a.float(), both.g.float())
    assert Work.of(wide).norm == Work.of(wide).product / device_cost.PLAIN_PRODUCTS


def test_norms_of_197_positions_are_as_fast_as_their_programs_are_many() -> None:
    """64 samples of two layers are 128 programs for 132 multiprocessors; 128 of one are as many."""
    products = 128 * (128 + 64 + 8) + 64 * (64 + 8) + 8 * 8
    for batch in (64, 128):
        work = Work.of(linear(197, 768, 3072, batch))
        assert work.norm == pytest.approx(2.0 * 132 / 128 * batch * products * 3840 / 500e12)
    # Chunks of features that are not full go by tiles of 128 x 128.
    assert Work.of(linear(197, 768, 3088, 64)).norm > 1.5 * Work.of(linear(197, 768, 3072, 64)).norm


def test_convolutions_break_even_where_a_second_product_costs_the_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without TF32, 2 T P / R = 8 P / W: T = 4 R / W, 18.6 positions at 20 TFLOP/s."""
    monkeypatch.setattr(device_cost, "tf32_convolutions", lambda: False)
    even = 4 * device_cost.PLAIN_PRODUCTS / device_cost.BANDWIDTH
    assert even == pytest.approx(18.6, abs=0.1)
    assert not routes.worth_keeping(convolution(2048, 4))
    assert routes.worth_keeping(convolution(2048, 5))


def test_stored_gradients_of_convolutions_are_made_on_tensor_cores() -> None:
    """In TF32 where torch may; norms alone and sums are not, so that more layers are kept."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        work = Work.of(convolution(512, 4))
        assert work.keeping > 7 * work.speed
        assert routes.worth_keeping(convolution(512, 4))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        work = Work.of(convolution(512, 4))
        assert work.keeping == work.speed == device_cost.PLAIN_PRODUCTS


def test_convolutions_whose_numbers_are_loaded_singly_are_slow() -> None:
    half = convolution(64, 32)
    half = ConvolutionGradients(half.x.bfloat16(), half.g.bfloat16(), (3, 3), SQUARE)
    work = Work.of(half)
    assert work.speed > 8 * device_cost.PLAIN_PRODUCTS
    assert work.held == 4 * half.x.nbytes  # the copy is written and read
    few = ConvolutionGradients(half.x[:, :24].contiguous(), half.g, (3, 3), SQUARE)
    assert Work.of(few).speed == device_cost.PLAIN_PRODUCTS


def test_part_filled_tiles_are_slow() -> None:
    whole, half = Work.of(linear(1024, 768, 128)), Work.of(linear(1024, 768, 129))
    assert half.speed == pytest.approx(whole.speed * 129 / 256)


def test_float32_breaks_even_at_fewer_positions() -> None:
    assert not routes.worth_keeping(linear(70, 4096, 4096))
    assert routes.worth_keeping(linear(70, 4096, 4096, dtype=torch.float32))


@pytest.mark.parametrize(("width", "positions"), [(256, 32), (768, 41), (4096, 48)])
def test_float32_breaks_even_where_the_documentation_says(width: int, positions: int) -> None:
    assert routes.worth_keeping(linear(positions, width, width, dtype=torch.float32))
    assert not routes.worth_keeping(linear(positions - 1, width, width, dtype=torch.float32))


def test_mixed_operands_are_priced_as_they_are_multiplied() -> None:
    mixed = linear(100, 4096, 4096)
    mixed = LinearGradients(mixed.a.float(), mixed.g)
    assert Work.of(mixed).speed == device_cost.PLAIN_PRODUCTS


def test_few_positions_take_the_norm_from_gram_matrices() -> None:
    few = Work.of(linear(32, 1024, 1024))
    assert few.norm < few.product
    assert not routes.worth_keeping(linear(32, 1024, 1024))
    assert not routes.worth_keeping(linear(1, 64, 64))


def test_smaller_gradients_than_operands_are_always_kept() -> None:
    """They save memory."""
    assert routes.worth_keeping(linear(100, 64, 16))


@pytest.mark.parametrize(
    ("channels", "side", "kept"),
    [(64, 32, True), (128, 16, True), (256, 8, False), (512, 4, False)],
)
def test_16_bit_convolutions_of_resnet_18_are_kept_where_maps_are_large(
    channels: int, side: int, kept: bool
) -> None:
    x = torch.empty(256, channels, side, side, dtype=torch.bfloat16, device="meta")
    assert routes.worth_keeping(ConvolutionGradients(x, x.clone(), (3, 3), SQUARE)) is kept


def test_gradients_that_a_norm_has_made_are_kept_if_that_saves_a_product() -> None:
    assert routes.worth_writing(linear(1024, 768, 3072))
    assert not routes.worth_writing(linear(32, 4096, 4096))


class Small:
    """Gradients of 16 entries; what they need of memory is made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, limit: Any = None) -> None:
        monkeypatch.setattr(routes, "memory_for_gradients", lambda device: room)
        self.budget = routes.KeepBudget(limit)
        a = torch.ones(2, 3, 2)
        g = torch.ones(2, 3, 8)
        self.record = LinearGradients(a, g)
        monkeypatch.setattr(routes, "worth_keeping", lambda *_: True)
        monkeypatch.setattr(LinearGradients, "gradient_bytes", 1000)
        self.extra = 1000 - self.record.held_bytes

    def kept(self) -> bool:
        return isinstance(self.budget.kept(self.record), ExplicitGradients)


def test_a_share_of_the_devices_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(monkeypatch, room=0)
    assert not small.kept()
    small = Small(monkeypatch, room=2 * small.extra + 1)
    assert [small.kept() for _ in range(3)] == [True, True, False]
    assert small.budget.used == 2 * small.extra
    small.budget.used = 0  # new samples
    assert small.kept()


def test_given_budgets_count_on_devices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Small(monkeypatch, room=10**9, limit=0).kept()
    assert not Small(monkeypatch, room=10**9, limit=0.25).kept()
    assert Small(monkeypatch, room=0, limit=10**9).kept()
    with pytest.raises(InvalidInput, match="keep_budget"):
        routes.KeepBudget(-1)


def test_no_choice_of_exact_arithmetic_depends_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(monkeypatch, room=10**9)
    small.budget.cached = 0  # as exact arithmetic asks for
    assert not small.kept()
    assert not small.budget.in_bytes


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def refused_memory(*_: Any) -> None:
    try:
        out_of_memory()
    except torch.OutOfMemoryError as error:
        raise BackendError("GPU memory", expected="room", got="none", remedy="Less.") from error


@pytest.mark.parametrize("fail", [out_of_memory, refused_memory])
def test_where_memory_runs_out_the_norm_is_taken_alone(
    fail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(monkeypatch, room=10**9)
    monkeypatch.setattr(LinearGradients, "materialize", fail)
    assert small.budget.kept(small.record) is small.record
    assert small.budget.used == 0


def test_other_failures_are_not_taken_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise BackendError("cuda kernel", expected="a launch", got="error 1", remedy="None.")

    small = Small(monkeypatch, room=10**9)
    monkeypatch.setattr(LinearGradients, "materialize", broken)
    with pytest.raises(BackendError, match="error 1"):
        small.kept()


def operands_on_a_device(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> tuple[routes.KeepBudget, LinearGradients]:
    """A budget with room, and a layer's operands as a device keeps them."""
    monkeypatch.setattr(per_sample_gradients, "KEPT_IN_16_BITS", {"cpu"})
    monkeypatch.setattr(routes, "worth_keeping", lambda *_: True)
    generator = torch.Generator().manual_seed(1)
    a, g = (torch.randn(3, 9, n, generator=generator).to(dtype) for n in (20, 30))
    return routes.KeepBudget(1 << 20), LinearGradients(a, g)


def test_gradients_of_bfloat16_operands_are_kept_in_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget, record = operands_on_a_device(monkeypatch, torch.bfloat16)
    made = budget.kept(record)
    assert isinstance(made, RoundedGradients)
    assert made.grads.dtype is torch.bfloat16
    assert budget.used == made.grads.nbytes - record.held_bytes
    stored = made.per_sample()
    assert stored.dtype is torch.float32
    torch.testing.assert_close(made.squared_norms(), stored.double().square().sum((1, 2)))
    factors, out = torch.tensor([0.5, 0.0, 2.0]), torch.zeros(30, 20)
    made.add_sum(factors, out)
    torch.testing.assert_close(out, torch.einsum("b,bpd->pd", factors, stored))
    torch.testing.assert_close(stored, record.per_sample(), rtol=2.0**-8, atol=1e-5)
    last = made.part(slice(1, 3))
    assert torch.equal(last.per_sample(), stored[1:])
    assert torch.equal(last.squared_norms(), made.squared_norms()[1:])
    assert made.l1_norms().tolist() == pytest.approx(stored.abs().sum((1, 2)).tolist(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_operands_keep_gradients_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range of float16 is too small for gradients."""
    budget, record = operands_on_a_device(monkeypatch, dtype)
    made = budget.kept(record)
    assert isinstance(made, ExplicitGradients)
    assert made.grads.dtype is torch.float32


def test_exact_sums_and_other_norms_take_gradients_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget, record = operands_on_a_device(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(routes, "worth_writing", lambda *_: True)
    assert isinstance(budget.kept(record, written=True), ExplicitGradients)
    budget.cached = 0  # as exact arithmetic asks for
    assert isinstance(budget.kept(record), ExplicitGradients)
