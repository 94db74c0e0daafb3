"""Release coordinates: linear maps there and back, and what they say of themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpkern.base.errors import InvalidInput
from dpkern.privacy.mechanisms import DiagonalMap, PartialNoiseMap, ReleaseMap, Site, WhitenedCrop
from tests.engine.released_cases import CONV, crop

CIRCULANT = Site(kind="circulant", shape=(3, 2, 8), input=(1,), output=(1,))
MATRIX = np.random.default_rng(3).standard_normal((5, 8))
SCALE = torch.rand((20, 10, 2, 2), dtype=torch.float64) + 0.5

RELEASES: dict[str, tuple[ReleaseMap, tuple[int, ...], tuple[int, ...]]] = {
    "crop": (crop(), CONV.shape, (20, 10, 4)),
    "low rank": (crop(2), CONV.shape, (20, 10, 2)),
    "gain": (WhitenedCrop(site=CONV, gain=0.25), CONV.shape, CONV.shape),
    "circulant": (
        WhitenedCrop(site=CIRCULANT, signal=MATRIX, post=np.linalg.pinv(MATRIX)),
        (3, 2, 8),
        (3, 2, 5),
    ),
    "diagonal": (DiagonalMap(scale=SCALE), CONV.shape, CONV.shape),
    "centre": (DiagonalMap(centre=SCALE), CONV.shape, CONV.shape),
}
each = pytest.mark.parametrize(
    ("release", "parameter", "shape"), list(RELEASES.values()), ids=list(RELEASES)
)


@each
def test_maps_are_linear_and_batched(
    release: ReleaseMap, parameter: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    rows = torch.randn((3, *parameter), generator=torch.Generator().manual_seed(0))
    out = release.forward(rows)
    assert release.shape(parameter) == release.signal_shape(parameter) == shape
    assert out.shape == (3, *shape)
    assert out.dtype is torch.float64
    for row, mapped in zip(rows, out, strict=True):
        torch.testing.assert_close(release.forward(row), mapped, rtol=1e-13, atol=1e-13)
    both = release.forward(2 * rows[0].double() - rows[1])
    torch.testing.assert_close(both, 2 * out[0] - out[1], rtol=1e-12, atol=1e-12)
    back = release.to_gradient(out[0])
    assert back.shape == parameter
    gain = getattr(release, "gain", 1.0)
    if out[0].numel() == rows[0].numel():
        torch.testing.assert_close(back, rows[0].double() * gain)
    else:
        # Only what the coordinates hold comes back, and it is all of them.
        assert not torch.allclose(back.float(), rows[0])
    torch.testing.assert_close(release.forward(back), out[0] * gain, rtol=1e-9, atol=1e-9)


def test_a_crop_is_its_matrix_on_every_pair() -> None:
    release = crop(3, gain=2.0)
    rows = torch.randn(CONV.shape, dtype=torch.float64)
    assert release.signal is not None
    assert release.post is not None
    for o, c in ((0, 0), (19, 3)):
        flat = rows[o, c].flatten().numpy()
        wanted = torch.from_numpy(2.0 * release.signal @ flat)
        torch.testing.assert_close(release.forward(rows)[o, c], wanted)
        y = np.arange(3.0)
        noisy = torch.zeros((20, 10, 3), dtype=torch.float64)
        noisy[o, c] = torch.from_numpy(y)
        torch.testing.assert_close(
            release.to_gradient(noisy)[o, c], torch.from_numpy(release.post @ y).view(2, 2)
        )
        assert float(release.to_gradient(noisy).abs().sum()) == pytest.approx(
            float(np.abs(release.post @ y).sum())
        )


def test_open_adds_mapped_noise_to_the_signal() -> None:
    matrix = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    release = PartialNoiseMap(site=CONV, noise=matrix, gain=0.5)
    assert not release.covers_all_directions
    assert release.shape(CONV.shape) == (20, 10, 2)
    assert release.signal_shape(CONV.shape) == CONV.shape
    rows = torch.randn(CONV.shape)
    drawn = torch.randn((20, 10, 2), dtype=torch.float64)

    def add(values: torch.Tensor) -> torch.Tensor:
        assert values.shape == drawn.shape
        assert not values.any()
        return values.add_(drawn)

    noisy = release.noised(release.forward(rows), add).flatten(2)
    clean = 0.5 * rows.double().flatten(2)
    torch.testing.assert_close(noisy - clean, drawn @ torch.from_numpy(matrix).T)
    assert torch.equal(noisy[..., 3], clean[..., 3])


@pytest.mark.parametrize(
    ("release", "plain", "operands"),
    [
        (WhitenedCrop(site=CONV), True, False),
        (WhitenedCrop(site=CONV, norm="spectrum"), True, True),
        (WhitenedCrop(site=CONV, gain=0.5), False, False),
        (crop(), False, False),
        (crop(norm="kept"), False, True),
        (crop(band="half"), False, True),
        (DiagonalMap(), True, False),
        (DiagonalMap(centre=SCALE), False, False),
        (DiagonalMap(scale=SCALE, norm="gradient"), False, False),
    ],
)
def test_what_a_release_needs(release: ReleaseMap, plain: bool, operands: bool) -> None:
    assert release.is_identity == plain
    assert release.needs_operands == operands
    assert release.covers_all_directions


def test_releases_are_compared_by_value() -> None:
    assert crop() == crop()
    assert hash(crop()) == hash(crop())
    assert crop() != crop(seed=1)
    assert crop() != crop(gain=2.0)
    assert crop(band=(3, 4)) != crop(band=(3, 5))
    assert DiagonalMap(scale=SCALE) == DiagonalMap(scale=SCALE.clone())
    assert DiagonalMap(scale=SCALE) != DiagonalMap(scale=SCALE + 1)
    assert DiagonalMap(scale=SCALE) != DiagonalMap(centre=SCALE)
    assert WhitenedCrop(site=CONV) != DiagonalMap()


@pytest.mark.parametrize(
    "make",
    [
        lambda: WhitenedCrop(site=CONV, signal=np.ones((3, 5))),
        lambda: WhitenedCrop(site=CONV, signal=np.ones((3, 4)), post=np.ones((3, 4))),
        lambda: WhitenedCrop(site=CONV, signal=np.ones((4, 4))),
        lambda: PartialNoiseMap(site=CONV, noise=np.ones((5, 4))),
        lambda: WhitenedCrop(site=Site(kind="other", shape=(3,))),
        lambda: WhitenedCrop(site=CONV, norm="whole"),
        lambda: DiagonalMap(norm="spectrum"),
    ],
    ids=["signal", "post", "no way back", "noise", "site", "norm", "diagonal norm"],
)
def test_bad_releases_are_refused(make: object) -> None:
    with pytest.raises(InvalidInput):
        make()  # type: ignore[operator]
