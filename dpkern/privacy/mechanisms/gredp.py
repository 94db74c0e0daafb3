"""GReDP: noise on the spectrum of a layer's gradient, of which the real part is kept.

For one sample and one layer, F the unitary DFT on a P x Q grid,

    G_ij = sqrt(PQ) conj(F(D_i)) o F(X_j)          the spectrum of all lags of the correlation
    Ghat = G / max(1, ||G||_2 / C) + tau           tau: sd a sigma C on Re, b sigma C on Im
    gradient = Re F^-1(Ghat) at the kernel's lags  once per batch: F^-1 and Re are linear

Block-circulant layers (W[r, s] = w[(s - r) mod d]) do the same in one dimension and release every
lag. By Parseval ||G|| is the norm of the correlation map, so neither signal nor noise needs a
transform, only that norm does, and not even it with ``clip_domain='cropped'``.

What it certifies: real and imaginary part of the inverse of circular noise are independent and the
data sits in the real part alone, so each layer is the Gaussian mechanism with sd sigma C / sqrt(2);
with noise of sd sigma C on both parts it is DP-SGD. Real noise is even in the lag: where both u and
-u are released, their difference has no noise.

Reference: GReDP, Algorithms 1 and 2, equations (8) to (20), Theorems 1 to 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ...base.errors import InvalidInput
from ...base.validate import choice
from ...ops.spectral import Band, pencil
from ._spectral_options import taps
from ._spectral_plan import OPEN, SLACK, SpectralMechanism, SpectralRelease
from .release import PartialNoiseMap, WhitenedCrop
from .site import Site

SCALINGS = ("corrected", "as_printed")
CLAIMS = ("gaussian", "theorem3")


@dataclass(frozen=True, kw_only=True)
class GReDP(SpectralMechanism):
    """The GReDP mechanism: noise on the spectrum of a layer's gradient.

    ``SpectralMechanism`` has the fields of every spectral mechanism.

    Args:
        noise_kind: default ``circular`` (published), ``circular_full`` (corrected).
        clip_domain: ``spectrum`` clips all lags (published), ``cropped`` the gradient (corrected).
        clipping: default ``per_layer``, every parameter to C (published), ``flat`` (corrected).
        unitary_scaling: ``as_printed`` leaves out the factor sqrt(PQ) (sqrt(d) for circulant
            layers) of (15) and (19), in published mode only.
        claim_rule: ``gaussian``: every release is the Gaussian mechanism of multiplier sigma.
            ``theorem3``: one release is (sqrt(2 log(1.25/delta)) / sigma, delta)-private; of
            several the theorem says nothing, and they are claimed as with ``gaussian``.

    Corrected, with its defaults, is DP-SGD with a flat clip: the same plan and the same noise.
    """

    name: ClassVar[str] = "gredp"
    title: ClassVar[str] = "GReDP"
    source: ClassVar[str] = "GReDP, algorithms 1 and 2"
    clip_domains: ClassVar[tuple[str, ...]] = ("spectrum", "cropped")
    defaults: ClassVar[dict[str, dict[str, Any]]] = {
        "published": {
            "noise_kind": "circular",
            "clip_domain": "spectrum",
            "clipping": "per_layer",
            "fft_size": "padded",
        },
        "corrected": {
            "noise_kind": "circular_full",
            "clip_domain": "cropped",
            "clipping": "flat",
            "fft_size": "padded",
        },
    }
    corrected_only: ClassVar[dict[str, tuple[Any, ...]]] = {"unitary_scaling": ("corrected",)}

    unitary_scaling: str = "corrected"
    claim_rule: str = "gaussian"

    def _check_options(self) -> None:
        choice(SCALINGS, unitary_scaling=self.unitary_scaling)
        choice(CLAIMS, claim_rule=self.claim_rule)
        if self.claim_rule == "theorem3" and self.mode == "corrected":
            raise InvalidInput(
                "claim_rule",
                expected="'gaussian' with mode='corrected'",
                got=self.claim_rule,
                remedy="Leave claim_rule out, or pass mode='published': it is about claims only.",
            )

    @property
    def needs_sites(self) -> bool:
        """Whether sites are needed: not where every parameter is released as DP-SGD would."""
        plain = self.noise_kind == "circular_full" and self.unitary_scaling == "corrected"
        return not (plain and self.clip_domain == "cropped")

    @property
    def _integers(self) -> bool:
        same = self.clip_domain == "cropped" and self.unitary_scaling == "corrected"
        # Under one bound for all, noise of two scales has no common lattice.
        return (
            same
            and (self.noise_kind == "circular_full" or self.clipping == "per_layer")
            and (self.isotropic)
        )

    def claim(
        self, *, steps: int, sample_rate: float, delta: float, dataset_size: int | None
    ) -> float | None:
        """Return theorem 3 for a single release, if it was chosen; else the event's claim."""
        del sample_rate, dataset_size
        if self.claim_rule != "theorem3" or steps != 1 or not self.noisy:
            return None
        return math.sqrt(2 * math.log(1.25 / delta)) / self.noise_multiplier

    @property
    def claim_text(self) -> str:
        """The source of the claim ``epsilon_claimed``."""
        if self.claim_rule == "theorem3":
            return "theorem 3 for one release; several as Gaussian events of multiplier sigma"
        return super().claim_text

    def _release(self, site: Site, size: tuple[int, ...]) -> SpectralRelease:
        a, b = self.parts
        gain = 1.0
        if self.unitary_scaling == "as_printed":
            gain = 1 / math.sqrt(math.prod(size))
        # A circulant layer releases every lag: the norm of its spectrum is its gradient's.
        whole = site.kind == "circulant" or self.clip_domain == "cropped"
        norm = "gradient" if whole else "spectrum"
        if self.isotropic and whole and gain == 1:
            return SpectralRelease(scale=a)
        if self.isotropic:
            return SpectralRelease(
                WhitenedCrop(norm=norm, site=site, size=size, gain=gain), scale=a
            )
        law = pencil(Band(size, "all"), *taps(site), a, b)
        if law.multiplier**2 < OPEN:
            return SpectralRelease(
                PartialNoiseMap(norm=norm, site=site, size=size, gain=gain, noise=law.noise)
            )
        crop = WhitenedCrop(
            norm=norm, site=site, size=size, gain=gain, signal=law.signal, post=law.post
        )
        return SpectralRelease(crop, law.scale, law.stretch * SLACK)

    def _note_ids(self) -> tuple[str, ...]:
        halved = not self.isotropic or self.noise_kind == "circular"
        reasons = {
            "G1": not self.isotropic,
            "G2": halved,
            "G3": self.clipping != "flat",
            "G4": self.noise_point == "per_sample",
            "G5": halved,
            "G6": True,
            "G7": self.claim_rule == "theorem3",
            "C1": True,
        }
        return tuple(name for name, applies in reasons.items() if applies)
