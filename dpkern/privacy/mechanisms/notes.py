"""List what is wrong, loose or unclear in the printed mechanisms, by id.

``S1`` to ``D7`` and ``C1`` are the defects that were found in the papers' text, ``S6.2`` to
``S6.6`` those of the published Spectral-DP code. A plan carries the notes of what it really does,
so published mode shows them and corrected mode does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...base.errors import InvalidInput


@dataclass(frozen=True)
class Note:
    """A remark.

    Attributes:
        id: its name in the register of defects.
        text: one sentence for the report.
    """

    id: str
    text: str

    def __str__(self) -> str:
        return f"{self.id}: {self.text}"


_TEXTS = {
    "N1": "the printed composition drops a term and uses an approximate tail; the certificate "
    "does not rest on it",
    "N2": "symbols of the notes were read as gamma = 1/n and sqrt(log(n/delta))",
    "G1": "real noise leaves the odd part of a spectrum unprotected; each layer's own noise "
    "decides",
    "G2": "noise of half the variance at the same sigma is the Gaussian mechanism of multiplier "
    "sigma / sqrt(2)",
    "G3": "every layer is clipped by itself, so one sample moves all of them: the certificate "
    "adds their squares",
    "G4": "noise is drawn once per sample, so its variance depends on the number of samples",
    "G5": "the printed variance of the output noise is wrong at self-conjugate indices",
    "G6": "the printed gradient lacks a unitary factor and a conjugation",
    "G7": "the printed Renyi formulas reverse a conversion and leave out amplification",
    "G8": "accuracy, caption, batch size and learning rate of the source disagree with each other",
    "D1": "the printed noise is not the optimum: it grows with the importance, and the privacy "
    "constraint is violated by kappa^2",
    "D2": "the order beta and the constant c1 are not given: the best integer and 1.889882 are "
    "used",
    "D3": "the sensitivity alpha is that of a sum although an average is released, and the "
    "importance clips an aggregate, which two neighbours can move by 2 alpha",
    "D4": "the claim divides epsilon and delta by the sampling rate, which no theorem supports",
    "D5": "the pruning mask is chosen from the samples without noise",
    "D6": "the information bound needs pure differential privacy, which Gaussian noise has not",
    "D7": "sizes of data sets and the gloss of gamma do not agree with the sources they come from",
    "A1": "noise divided by the batch size is enough for sums of records that share one draw, and "
    "then differences of records are released exactly; with draws of their own a record's inputs "
    "cost |L| rho epsilon_2 / (2 |h_0|)",
    "A2": "the sensitivity of relevances takes the network as fixed, but it is trained on the same "
    "records without noise",
    "A3": "neurons of a convolution, what of the loss is perturbed and how often are not defined: "
    "the readings are options",
    "A4": "lemma 7 bounds the loss's error with a wrong third derivative; nothing rests on it",
    "A5": "signs in (24) and lemma 4, the power in line 27 and the range of relevances are read as "
    "they must be meant",
    "A6": "a feature's share of the budget has no floor, so its noise has no ceiling",
    "S1": "the printed quadratic coefficient x/2 - 1/4 has lost Taylor's 1/2 and a sign; the "
    "polynomial's is 1/8",
    "S2": "the printed polynomial has its only stationary point at z = 1 for every target and no "
    "lower bound for targets below 1/2, so runs may diverge",
    "S3": "no finite G bounds all derivatives of proposition 1, which is not about the printed "
    "polynomial",
    "S4": "both coefficients get noise of scale Dhat / (sqrt(2) epsilon), which costs sqrt(2) "
    "epsilon where there is no stabilisation constant",
    "S5": "the printed sensitivity grows with the stabilisation constant, although a constant on "
    "logits is post-processing",
    "S6": "a noise scale depends on the private record, so no pure epsilon follows from it",
    "S7": "records enter codes and gradients without noise, and fresh noise at every visit is not "
    "composed",
    "S8": "with environmental noise the printed coefficients are b alpha_2 and b alpha_3, where b "
    "alpha_2 and b^2 alpha_3 are right, and b is the code length, not 1, without it",
    "S9": "the printed variance of the environment's effect lacks a square, and its inverse map is "
    "wrong",
    "S10": "environmental noise is said to lower the sensitivity with probability 1/2 or more; it "
    "does so with less than 2^-100",
    "S11": "the printed curve over the expansion point makes a sum of logarithms a ratio",
    "S12": "the printed gradient stands at a fixed point, an n-vector updates matrices, and "
    "clipping to 4 never happens",
    "S13": "stabilisation vector, update of the decoder and schedule are given in two ways or not "
    "at all: readings and defaults are ours",
    "S14": "printed operation counts leave out squarings and multiplications by scales",
    "S15": "noise read from a table repeats",
    "C1": "the source mixes variance with standard deviation, or L1 with L2 norms",
    "S6.2": "the published mask keeps one diagonal orientation and the last index: no low-pass",
    "S6.3": "the published code releases retained frequencies outside the noised block without "
    "noise",
    "S6.4": "the published block-circulant code noises one frequency of each pair and takes real "
    "parts: certified sigma / 2 at most",
    "S6.5": "the published code clips gradients of the mean but noises each sample by sigma C / N: "
    "certified sigma / sqrt(N) at most",
    "S6.6": "the published code clips each of L layers to C / sqrt(L) with noise sigma C, which "
    "is right",
}


def notes(*ids: str) -> tuple[Note, ...]:
    """Return the notes of these ids, in this order.

    Raises:
        InvalidInput: an id that is not in the register.
    """
    for name in ids:
        if name not in _TEXTS:
            raise InvalidInput(
                "notes",
                expected=f"ids among {', '.join(_TEXTS)}",
                got=name,
                remedy="Add the note's text to dpkern/privacy/mechanisms/notes.py.",
            )
    return tuple(Note(name, _TEXTS[name]) for name in ids)
