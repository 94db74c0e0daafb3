"""Sites of small networks for the tests of spectral mechanisms."""

from __future__ import annotations

from dpkern.privacy.mechanisms import Site


def conv(out: int, ci: int, kernel: int, size: int, *, padding: int = 0, stride: int = 1) -> Site:
    """A square convolution."""
    output = (size + 2 * padding - kernel) // stride + 1
    return Site(
        kind="conv",
        shape=(out, ci, kernel, kernel),
        input=(size, size),
        output=(output, output),
        stride=(stride, stride),
        padding=(padding, padding),
        dilation=(1, 1),
    )


def circulant(p: int, q: int, d: int) -> Site:
    """A block-circulant layer at one position."""
    return Site(kind="circulant", shape=(p, q, d), input=(1,), output=(1,))


def other(*shape: int) -> Site:
    """A bias, a norm, a dense matrix."""
    return Site(kind="other", shape=shape)


NETWORK = (conv(6, 1, 5, 32), other(6), conv(16, 6, 5, 14), other(16), circulant(2, 3, 8))
LENET = (conv(6, 1, 5, 32), conv(16, 6, 5, 14), conv(120, 16, 5, 5))


def shapes(sites: tuple[Site, ...]) -> list[tuple[int, ...]]:
    """Of the parameters."""
    return [site.shape for site in sites]
