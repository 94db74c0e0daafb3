"""List every figure and table of every source, and the item that reproduces it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SourcePart:
    """A figure, table or statement of a source.

    Attributes:
        source: name of the source.
        part: figure or table, as the source numbers it.
        about: its subject.
        paper, item: what ``dpkern reproduce`` takes.
    """

    source: str
    part: str
    about: str
    paper: str
    item: str = ""

    @property
    def command(self) -> str:
        return f"dpkern reproduce {self.paper} {self.item}".strip()

    @property
    def stem(self) -> str:
        """The stem of the item's files."""
        return f"{self.paper}-{self.item}" if self.item else self.paper


_SPOF, _GREDP, _ADLM = "SPOF", "GReDP", "AdLM"
_DIRECTIONAL, _NOTES, _SPECTRAL = "Directional noise", "PN-SGD and LDP notes", "Spectral-DP"

PARTS: tuple[SourcePart, ...] = (
    SourcePart(_SPOF, "figure 1", "architecture", "spof", "fig1"),
    SourcePart(_SPOF, "figure 2", "accuracy over the stabilisation constant", "spof", "fig2"),
    SourcePart(_SPOF, "figure 3", "accuracy over epsilon", "spof", "fig3"),
    SourcePart(_SPOF, "figure 3, as its code ran", "the authors' protocol", "spof", "released"),
    SourcePart(
        _SPOF, "figure 2, as its code ran", "the authors' protocol", "spof", "released-fig2"
    ),
    SourcePart(_SPOF, "figure 4", "density of the largest multiplier", "spof", "fig4"),
    SourcePart(_SPOF, "figure 5", "probability that it is at most 1", "spof", "fig5"),
    SourcePart(_SPOF, "figure 6", "sensitivity over the expansion point", "spof", "fig6"),
    SourcePart(_SPOF, "section VII, gains and times", "gain over DP-SGD", "spof", "comparison"),
    SourcePart(_SPOF, "section VII, open rate", "learning rates", "spof", "rates"),
    SourcePart(_SPOF, "section IV", "polynomials of the loss", "spof", "losses"),
    SourcePart(_SPOF, "algorithm 1, step 5", "what its noise certifies", "spof", "audit"),
    SourcePart(_SPOF, "section VI", "multipliers of the environment", "spof", "multipliers"),
    SourcePart(_GREDP, "figure 1", "training", "gredp", "fig1"),
    SourcePart(_GREDP, "figure 2", "pipeline", "gredp", "fig2"),
    SourcePart(_GREDP, "tables II to VI", "networks", "gredp", "models"),
    SourcePart(_GREDP, "table I", "accuracy from scratch", "gredp", "table1"),
    SourcePart(_GREDP, "figure 3", "training dynamics", "gredp", "fig3"),
    SourcePart(_GREDP, "text, table VIII", "accuracy over epsilon", "gredp", "by-eps"),
    SourcePart(_GREDP, "figure 4", "batch size", "gredp", "fig4"),
    SourcePart(_GREDP, "figure 5", "learning rate", "gredp", "fig5"),
    SourcePart(_GREDP, "table VII", "transfer learning", "gredp", "table7"),
    SourcePart(_GREDP, "table VIII", "clipping norm", "gredp", "table8"),
    SourcePart(_GREDP, "theorems 1 and 2", "variance of the real part", "gredp", "variance"),
    SourcePart(_GREDP, "theorem 3, corollary 2", "what they certify", "gredp", "checks"),
    SourcePart(_ADLM, "figure 1", "relevance of records", "adlm", "fig1"),
    SourcePart(_ADLM, "figure 2", "network and noise", "adlm", "fig2"),
    SourcePart(_ADLM, "figure 3", "mean relevance with noise", "adlm", "fig3"),
    SourcePart(_ADLM, "figure 4", "accuracy on MNIST", "adlm", "fig4"),
    SourcePart(_ADLM, "figure 5", "accuracy on CIFAR-10", "adlm", "fig5"),
    SourcePart(_ADLM, "lemmas 1 to 6, theorem 1", "what a record pays", "adlm", "sensitivity"),
    SourcePart(_ADLM, "readings of (17)", "sharing of noise, size of h0", "adlm", "readings"),
    SourcePart(_ADLM, "three columns", "printed, released, corrected", "adlm", "released"),
    SourcePart(_ADLM, "lemma 7", "error of the polynomial loss", "adlm", "lemma7"),
    SourcePart(_DIRECTIONAL, "figure 1", "utility subspace", "directional", "fig1"),
    SourcePart(_DIRECTIONAL, "figure 2", "distortion and rate", "directional", "fig2"),
    SourcePart(_DIRECTIONAL, "table 1", "settings", "directional", "table1"),
    SourcePart(_DIRECTIONAL, "table 2", "time of a step", "directional", "table2"),
    SourcePart(_DIRECTIONAL, "figure 3", "accuracy over epochs", "directional", "fig3"),
    SourcePart(_DIRECTIONAL, "figure 4", "accuracy over epsilon", "directional", "fig4"),
    SourcePart(_DIRECTIONAL, "figure 5 (a) to (d)", "lot size, pruning", "directional", "fig5"),
    SourcePart(_DIRECTIONAL, "figure 6", "clipping bound", "directional", "fig6"),
    SourcePart(_DIRECTIONAL, "algorithm 1, line 12", "rule of sampling", "directional", "sampling"),
    SourcePart(_DIRECTIONAL, "(11) to (13)", "worst direction", "directional", "kappa"),
    SourcePart(_NOTES, "steps 1 to 5", "noise of projected SGD", "pnsgd", "table"),
    SourcePart(_NOTES, "privacy analysis", "four rules", "pnsgd", "rules"),
    SourcePart(_NOTES, "remark on moments", "strong composition", "pnsgd", "plot"),
    SourcePart(_NOTES, "utility bound", "bound over n", "pnsgd", "bound"),
    SourcePart(_NOTES, "utility bound, measured", "excess risk", "pnsgd", "experiment"),
    SourcePart(_NOTES, "randomized response", "channels", "ldp", "channels"),
    SourcePart(_NOTES, "frequencies", "estimator", "ldp", "estimator"),
    SourcePart(_NOTES, "motivating example", "survey", "ldp", "survey"),
    SourcePart(_NOTES, "labels", "training on randomized labels", "ldp", "labels"),
    SourcePart(_SPECTRAL, "filter", "noise that is kept", "spectral", "keep"),
    SourcePart(_SPECTRAL, "published code", "layer by layer", "spectral", "quirks"),
    SourcePart(_SPECTRAL, "clip", "norms of a filtered layer", "spectral", "whitened"),
    SourcePart(_SPECTRAL, "three columns", "printed, released, corrected", "spectral", "released"),
    SourcePart("all", "every claim of epsilon", "claimed and certified", "claims"),
    SourcePart("all", "mechanisms", "equal certified epsilon", "comparison"),
    SourcePart("none", "objective release", "accuracy over epsilon", "objective-release"),
)

__all__ = ["PARTS", "SourcePart"]
