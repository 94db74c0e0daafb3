"""The just-in-time kernels: threads, forks, kept machine code, and no rearranged arithmetic.

That they compute what the reference and the compiled kernels compute is shown by the tests of the
ops, the golden file and the comparison of bits, which run on every backend.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkern.audit.generator import in_child
from dpkern.base import dispatch
from dpkern.base.errors import BackendError
from dpkern.base.rng import Purpose
from dpkern.ops import clip, ghost, noise, testing, update
from tests.evidence import bits

pytestmark = pytest.mark.skipif(
    not dispatch.availability("numba")[0], reason=dispatch.availability("numba")[1]
)
STREAM = testing.KEY.stream(Purpose.NOISE, 4)
ROUNDING = testing.KEY.stream(Purpose.ROUNDING, 4)
FUSED = re.compile(r"\bvfn?m(add|sub)")
WITH_KERNEL = {
    "clip.clip_sum",
    "clip.sample_norm",
    "ghost.clip_factors",
    "ghost.contract",
    "ghost.explicit_norm",
    "noise.add_noise",
    "noise.keystream",
    "noise.lattice_draws",
    "noise.rounding_bits",
    "noise.source_draws",
    "update.step",
}
SUMS = torch.linspace(-1e3, 1e3, 100_000)


def noisy(count: int) -> torch.Tensor:
    x = SUMS[:count].clone()
    return noise.add_noise(x, stream=STREAM, rounding=ROUNDING, scale=1.1, backend="numba")


def test_the_ops_of_a_step_have_kernels_and_the_others_say_that_they_have_none() -> None:
    rows = [row for row in dispatch.table() if row["backend"] == "numba"]
    assert {row["op"] for row in rows if row["available"]} == WITH_KERNEL
    assert {row["reason"] for row in rows if not row["available"]} == {"has no kernel for this op"}


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_draws_are_those_of_the_reference(law: str) -> None:
    figures = bits.draw_mismatches(100_000, law, 20, seed=5)
    numba = {name: n for name, n in figures["mismatches"].items() if name.startswith("numba")}
    assert numba == {"numba x1": 0, "numba x2": 0}
    assert figures["largest_scales"] > 4  # among them draws from the tail


@pytest.mark.parametrize("total", ["int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("rule", [*bits.SGD_RULES, *bits.ADAM_RULES], ids=repr)
def test_updates_have_the_bits_of_the_other_kernels(rule: update.Rule, total: str) -> None:
    adam = isinstance(rule, update.Adam)  # torch does not round the square root correctly
    if adam and "cpu" not in testing.available_backends():
        pytest.skip("no compiled kernels to compare with")
    kind = torch.float64 if total == "float64" else torch.float32
    generator = torch.Generator().manual_seed(2)
    sizes = (5000, 1, 0, 3001)
    params = [torch.randn(n, generator=generator, dtype=kind) for n in sizes]
    sums = [bits.moderate(n, getattr(torch, total), generator) for n in sizes]
    drawn = update.Noise(
        distribution="gaussian",
        scales=(1.1, 0.3, 1.0, 1e3),
        stream=STREAM,
        rounding=ROUNDING,
        positions=(3, 5100, 5101, 5107),
    )

    def updated(backend: str) -> list[torch.Tensor]:
        mine = [p.clone() for p in params]
        state = rule.init(mine)
        given: dict[str, Any] = {"rule": rule, "state": state, "backend": backend}
        for _ in range(3):
            update.step(mine, sums, noise=drawn, gradient_scale=1 / 64, **given)
        return [*mine, *(b for buffers in state.buffers.values() for b in buffers)]

    wanted = updated("cpu" if adam else "reference")
    for got, want in zip(updated("numba"), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", clip.GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("style", clip.STYLES)
def test_exact_sums_are_those_of_the_reference_with_any_number_of_threads(
    dtype: torch.dtype, style: str
) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = [(301, 40, 7), (301, 1), (301, 600)]
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    bound: Any = [0.5, 1.0, 2.0] if style == "per_layer" else 1.0
    unit: Any = [1e-6, 2e-6, 3e-6] if style == "per_layer" else 1e-6
    given: dict[str, Any] = {"style": style, "arithmetic": "exact", "unit": unit}
    wanted = clip.clip_sum(grads, bound, backend="reference", **given)
    for threads in (1, 2, 3):
        with testing.threads(threads):
            got = clip.clip_sum(grads, bound, backend="numba", **given)
        assert all(torch.equal(a, b) for a, b in zip(got.sums, wanted.sums, strict=True))
        testing.assert_close("norms", got.norms, wanted.norms, 1e-12)


def test_threads_do_not_change_the_noise_and_may_call_at_the_same_time() -> None:
    with testing.threads(1):
        wanted = noisy(100_000)
    with testing.threads(3):
        assert torch.equal(noisy(100_000), wanted)
        with ThreadPoolExecutor(4) as callers:
            results = list(callers.map(noisy, [100_000] * 8))
    assert all(torch.equal(result, wanted) for result in results)


def test_a_forked_child_of_a_threaded_parent_runs_kernels() -> None:
    def fingerprint() -> bytes:
        # Two threads of ours, one of torch, whose own would not be there either.
        return hashlib.sha256(noisy(20_000).numpy().tobytes()).digest()

    with testing.threads(2):
        wanted = fingerprint()
        assert in_child(fingerprint) == wanted


def test_nothing_is_fused_or_reordered_but_float64_sums() -> None:
    import numba

    from dpkern.ops.backends._numba import compile, rows
    from dpkern.ops.backends._numba import noise as noise_kernels

    assert "fastmath" not in compile._OPTIONS
    assert rows.power_sum.targetoptions["fastmath"] == {"reassoc"}

    @numba.njit(fastmath=True)  # type: ignore[untyped-decorator, unused-ignore]
    def fused(x: Any) -> Any:
        return x * x * 3 + x

    fused(1.5)
    if not FUSED.search(fused.inspect_asm(fused.signatures[0])):
        pytest.skip("no fused instructions here")
    plain = numba.njit(**compile._OPTIONS)(noise_kernels._noise_floats.py_func)
    target = torch.zeros(600)
    words, source = noise_kernels.source_of(None, STREAM, "gaussian")
    streams = words, noise_kernels.words_of(ROUNDING)
    grid = torch.ones(2).numpy()
    plain(streams, source, grid, 0, target.data_ptr(), 0, 600)
    assert not FUSED.search(plain.inspect_asm(plain.signatures[0]))


def test_a_changed_source_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dpkern.ops.backends._numba import compile

    assert compile.CACHE is not None
    assert compile.CACHE.name == f"numba-{compile._sources()}"
    before = compile._sources()
    (tmp_path / "ops" / "backends" / "_numba").mkdir(parents=True)
    (tmp_path / "base").mkdir()
    base = ("base/codes.py", "base/laws.py", "base/layouts.py")
    for name in (*base, "ops/clip.py", "ops/backends/_numba/chacha.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(compile, "_HERE", tmp_path / "ops" / "backends" / "_numba")
    empty = compile._sources()
    (tmp_path / "base" / "laws.py").write_text("changed")
    assert len({before, empty, compile._sources()}) == 3


def test_without_a_writable_place_kernels_are_compiled_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from numba import config

    from dpkern.ops.backends._numba import compile

    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level("INFO", logger="dpkern"):
        assert compile._cache_place() is None
    assert "no writable place" in caplog.text
    monkeypatch.setattr(compile, "CACHE", None)

    @compile.kernel
    def doubled(x: Any) -> Any:
        return 2 * x

    assert doubled(21) == 42
    assert config.CACHE_DIR == str(tmp_path / "file")  # others' setting is as before


def test_a_second_process_finds_the_machine_code() -> None:
    noisy(1000)
    program = (
        "import torch; from tests.ops.backends.test_numba import noisy; noisy(1000);"
        "from dpkern.ops.backends._numba.noise import _noise_floats as kernel;"
        "print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=os.curdir
    )
    assert done.stdout.split() == ["1", "0"], done.stderr


def test_without_numba_the_reason_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpkern.ops.backends import numba

    monkeypatch.setitem(sys.modules, "numba", None)
    available, reason = numba.load()
    assert not available
    assert "pip install numba" in reason


def test_calls_that_it_cannot_run_are_refused() -> None:
    with pytest.raises(BackendError, match="one scale per call"):
        noise.add_noise(
            torch.zeros(3),
            stream=STREAM,
            rounding=ROUNDING,
            scale=torch.ones(3),
            backend="numba",
        )


def test_an_op_without_a_kernel_is_refused_by_name_and_else_runs_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, g = torch.tensor([[-1, -1, 3]]), torch.ones(1, 3, 2)
    with pytest.raises(BackendError, match=r"'numba' for ghost\.embedding_norm: .* has no kernel"):
        ghost.embedding_norm(ids, g, backend="numba")
    monkeypatch.setattr(dispatch, "PREFERENCE", {"cpu": ("numba", "reference")})
    monkeypatch.setattr(ghost.embedding_norm, "_orders", {})
    assert ghost.embedding_norm.backend_of(ids, g) == "reference"
