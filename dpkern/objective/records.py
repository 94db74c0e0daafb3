"""Tables of users' records that the (distributed) autoencoder is trained on.

One row is one record. ``m`` users stand for the m encoders; each has its own rows. A record's
features lie in [0, 1]: they are divided by public bounds, or by the maxima of their columns, which
is what the paper does. Maxima belong to the records, so that a number proved for one record's
release does not cover them: ``Records.bounds`` says which it was, and ``Records.unproved`` why
nothing can be certified.

Source: SPOF, section VII (14 features of a tracker, every column divided by its maximum, 2 users,
samples of a smaller table); the choices that it leaves open are the options here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..base import validate
from ..base.errors import InvalidInput
from . import _columns
from ._columns import Columns

PUBLIC, MAXIMA = "public", "maxima of the data"
GENERATED = "generated"
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Records:
    """Records of ``m`` users, in [0, 1].

    Attributes:
        train: float32 ``[m, N, n]``.
        test: float32 ``[m, K, n]``, held out: no row of ``train`` is in it.
        columns: heading of each feature; ``padding1``, ... are zero.
        source: the file, or ``generated``.
        synthetic: no person's data.
        bounds: ``"public"`` or ``"maxima of the data"``.
        notes: sentences on the rows that were chosen, left out, padded and drawn.
        rows: int64 ``[m, N]``: which of its user's training rows each sample is. The same row may
            be drawn more than once; whatever is released of it is released of one record.
    """

    train: torch.Tensor
    test: torch.Tensor
    columns: tuple[str, ...]
    source: str
    synthetic: bool
    bounds: str
    notes: tuple[str, ...]
    rows: torch.Tensor

    @property
    def users(self) -> int:
        """The number of users."""
        return int(self.train.shape[0])

    @property
    def features(self) -> int:
        """The number of features of a record."""
        return int(self.train.shape[2])

    @property
    def copies(self) -> int:
        """The number of times that the most frequent row occurs among its user's samples."""
        return max(int(torch.bincount(of_user).max()) for of_user in self.rows)

    @property
    def firsts(self) -> torch.Tensor:
        """Return int64 ``[m, N]``: for each sample, the user's first sample that is the same row.

        A row is released once: all its samples share what was released of the first one.
        """
        firsts = torch.empty_like(self.rows)
        for user, of_user in enumerate(self.rows):
            place = torch.arange(len(of_user))
            first = torch.full((int(of_user.max()) + 1,), len(of_user))
            first.scatter_reduce_(0, of_user, place, "amin")
            firsts[user] = first[of_user]
        return firsts

    def pooled(self) -> Records:
        """Return the same records as those of one user, as the functional mechanism takes them."""
        most = int(self.rows.max()) + 1
        apart = self.rows + most * torch.arange(self.users)[:, None]
        return replace(
            self,
            train=self.train.flatten(0, 1)[None],
            test=self.test.flatten(0, 1)[None],
            rows=apart.flatten()[None],
        )

    @property
    def unproved(self) -> str:
        """The reason why nothing can be certified of these records' release; empty if none."""
        if self.bounds == PUBLIC:
            return ""
        return (
            "columns were divided by their maxima, which depend on every record: replacing one "
            "record may move all others, and no noise covers that; pass public bounds"
        )

    def public_facts(self) -> dict[str, Any]:
        """Return what a privacy statement takes as public; a resumed run must agree with it."""
        return {
            "data": self.source,
            "synthetic": self.synthetic,
            "users": self.users,
            "records_per_user": int(self.train.shape[1]),
            "heldout_per_user": int(self.test.shape[1]),
            "columns": list(self.columns),
            "bounds": self.bounds,
            "copies_of_a_record": self.copies,
        }


Bounds = float | Sequence[float] | Mapping[str, float]


def load(
    path: str | Path,
    *,
    users: int = 2,
    features: int = 14,
    columns: Sequence[str] | None = None,
    user_column: str | None = None,
    bounds: Bounds | None = None,
    samples: int | None = None,
    held_out: float = 0.2,
    seed: int = 0,
) -> Records:
    """Load records from a CSV file.

    Args:
        path: the file; its first line is a header unless it holds a number.
        users: m.
        features: n; further numeric columns are left out, missing ones padded with zeros.
        columns: headings of the features; None takes numeric columns in the file's order.
        user_column: heading of the column that names a row's person. The persons are dealt to the m
            users in turn, in order of their first rows. None deals shuffled rows.
        bounds: public largest value of each feature: one for all, one per chosen column, or by
            heading. None takes the maxima of the data.
        samples: training samples of each user, drawn with replacement from the user's rows. None
            takes as many rows of each user as the one with the fewest has.
        held_out: share of each user's rows that is held out.
        seed: public seed of shuffling and drawing.

    Raises:
        InvalidInput: an unreadable or ragged file, unknown or too few columns, NaN, infinite or
            negative values, values above their bound, a user without rows, or too few rows to
            train and hold out.
    """
    validate.integer(1, users=users)
    validate.integer(2, features=features)
    validate.open_unit(held_out=held_out)
    validate.integer(0, MAX_SEED, seed=seed)
    if samples is not None:
        validate.integer(1, samples=samples)
    table = _columns.read(Path(path))
    if user_column is not None:
        table.known("user_column", user_column)
    chosen, notes = _columns.choose(
        table, features=features, columns=columns, user_column=user_column
    )
    if columns is None:
        notes.append("which columns are numeric was read off the rows and counts as public")
    values = _values(table, chosen)
    largest, kind = _largest(table, chosen, values, bounds)
    scaled = (values / largest).float()
    if kind == MAXIMA:
        notes.append("every column divided by its maximum over all rows: a data-dependent step")
    if len(chosen) < features:
        missing = features - len(chosen)
        scaled = torch.cat([scaled, torch.zeros(len(scaled), missing)], 1)
        notes.append(f"{missing} of {features} features padded with zeros")
    generator = torch.Generator().manual_seed(seed)
    if user_column is None:
        order = torch.randperm(len(scaled), generator=generator)
        parts = [order[user::users] for user in range(users)]
        notes.append("rows dealt to the users after shuffling: no user column was named")
    else:
        parts = _by_person(table.cells[user_column], users, user_column)
        notes.append(
            f"values of {user_column} dealt to {users} users in turn: the user of a row counts as "
            "public, and so does the number of each user's rows"
        )
    train, test, rows = _parts(scaled, parts, samples, held_out, generator)
    if samples is not None:
        notes.append(f"{samples} samples per user drawn with replacement from its training rows")
    elif any(len(part) != len(parts[0]) for part in parts):
        notes.append("rows left over, so that every user has as many as the one with the fewest")
    padding = tuple(f"padding{i + 1}" for i in range(features - len(chosen)))
    return Records(
        train=train,
        test=test,
        columns=chosen + padding,
        source=str(path),
        synthetic=False,
        bounds=kind,
        notes=tuple(notes),
        rows=rows,
    )


def _values(table: Columns, chosen: Sequence[str]) -> torch.Tensor:
    """Return the chosen columns, float64 ``[rows, chosen]``, finite and not negative."""
    values = torch.tensor([table.numbers(name) for name in chosen], dtype=torch.float64).T
    _refuse(table, chosen, values, ~torch.isfinite(values), "finite numbers")
    _refuse(table, chosen, values, values < 0, "values >= 0")
    return values


def _refuse(
    table: Columns,
    chosen: Sequence[str],
    values: torch.Tensor,
    wrong: torch.Tensor,
    expected: str,
    remedy: str = "Repair or remove these rows, or choose other columns.",
) -> None:
    """Raise for the first wrong cell."""
    found = wrong.nonzero()
    if len(found):
        row, column = found[0].tolist()
        value, name = float(values[row, column]), chosen[column]
        cell = "a blank or NaN cell" if math.isnan(value) else f"{value:g}"
        raise InvalidInput(
            "data",
            expected=f"{expected} in column {name}",
            got=f"{cell} in {table.path} line {table.lines[row]} ({len(found)} such cells)",
            remedy=remedy,
        )


def _largest(
    table: Columns, chosen: Sequence[str], values: torch.Tensor, bounds: Bounds | None
) -> tuple[torch.Tensor, str]:
    """Return each column's divisor, float64 ``[chosen]``, and whether it is public."""
    if bounds is None:
        maxima = values.max(0).values
        return torch.where(maxima > 0, maxima, torch.ones_like(maxima)), MAXIMA
    if isinstance(bounds, Mapping):
        unknown = sorted(set(bounds) ^ set(chosen))
        given = [bounds.get(name, math.nan) for name in chosen]
    else:
        unknown = []
        given = [bounds] * len(chosen) if isinstance(bounds, int | float) else list(bounds)
    if unknown or len(given) != len(chosen):
        raise InvalidInput(
            "bounds",
            expected=f"one number, or one for each of {', '.join(chosen)}",
            got=f"{', '.join(unknown)} missing or unknown" if unknown else f"{len(given)} numbers",
            remedy="Give the largest value that each column may have, from public knowledge.",
        )
    for name, bound in zip(chosen, given, strict=True):
        validate.positive_at(f"bounds[{name}]", bound)
    largest = torch.tensor(given, dtype=torch.float64)
    over = values > largest
    remedy = "Pass public bounds that hold for every record; do not read them off the data."
    _refuse(table, chosen, values, over, "values up to the public bound", remedy)
    return largest, PUBLIC


def _by_person(names: Sequence[str], users: int, column: str) -> list[torch.Tensor]:
    """Return the row numbers of each user."""
    persons = {name: i for i, name in enumerate(dict.fromkeys(names))}
    if "" in persons or len(persons) < users:
        raise InvalidInput(
            "user_column",
            expected=f"at least {users} different values in {column}, none of them blank",
            got="a blank one" if "" in persons else f"{len(persons)}: a user would have no rows",
            remedy="Pass fewer users, or another user column.",
        )
    whose = torch.tensor([persons[name] % users for name in names])
    return [(whose == user).nonzero()[:, 0] for user in range(users)]


def _parts(
    scaled: torch.Tensor,
    parts: Sequence[torch.Tensor],
    samples: int | None,
    held_out: float,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(train, test, rows)``: held out first, so that no draw reaches a held-out row."""
    held = [max(1, round(len(part) * held_out)) for part in parts]
    kept = [len(part) - out for part, out in zip(parts, held, strict=True)]
    if min(kept) < 1:
        raise InvalidInput(
            "data",
            expected="at least one training and one held-out row for every user",
            got=f"{', '.join(str(len(part)) for part in parts)} rows of the users",
            remedy="Bring more rows, or pass fewer users or a smaller share held out.",
        )
    train, test, rows = [], [], []
    for part, out in zip(parts, held, strict=True):
        mixed = part[torch.randperm(len(part), generator=generator)]
        own = len(part) - out
        drawn = (
            torch.arange(min(kept))
            if samples is None
            else torch.randint(own, (samples,), generator=generator)
        )
        rows.append(drawn)
        train.append(scaled[mixed[out:][drawn]])
        test.append(scaled[mixed[: min(held)]])
    return torch.stack(train), torch.stack(test), torch.stack(rows)


def generated(
    *, users: int = 2, records: int = 1000, features: int = 14, held_out: float = 0.2, seed: int = 0
) -> Records:
    """Generate synthetic records in the manner of an activity tracker's days, without any file.

    With a day's activity ``a ~ N(mean_j, 1)`` of user j, its length ``b ~ N(0, 1)`` and own noise
    e, feature i of a record is

        x_i = min(1, level_i exp(0.6 (p_i a + q_i b) + 0.35 e_i)),

    log-normal (heavy-tailed), correlated through a and b, and cut at the public bound 1; of every
    third feature only what exceeds its level counts, so that many of its values are 0, as of
    minutes of exercise. The users' means are 1 apart in all; levels and loadings are drawn from
    the seed.

    Args:
        users: m.
        records: training records N of each user.
        features: n.
        held_out: share of all records of a user that is held out, made besides the N.
        seed: seed of everything that is drawn; the same seed gives the same records.

    Raises:
        InvalidInput: a size below its least value.
    """
    validate.integer(1, users=users)
    validate.integer(1, records=records)
    validate.integer(2, features=features)
    validate.open_unit(held_out=held_out)
    validate.integer(0, MAX_SEED, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    total = records + max(1, round(records * held_out / (1 - held_out)))

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(features, generator=generator)

    level, activity, length = uniform(0.1, 0.5), uniform(0.2, 1.0), uniform(-0.5, 0.5)
    means = torch.linspace(-0.5, 0.5, users) if users > 1 else torch.zeros(1)
    day = torch.randn(users, total, 2, generator=generator)
    own = torch.randn(users, total, features, generator=generator)
    a, b = day[..., :1] + means[:, None, None], day[..., 1:]
    values = level * torch.exp(0.6 * (activity * a + length * b) + 0.35 * own)
    rare = torch.arange(features) % 3 == 2
    values = torch.where(rare, (values - level).clamp(min=0), values).clamp(max=1.0)
    return Records(
        train=values[:, :records].contiguous(),
        test=values[:, records:].contiguous(),
        columns=tuple(f"feature{i + 1}" for i in range(features)),
        source=GENERATED,
        synthetic=True,
        bounds=PUBLIC,
        notes=("synthetic records: no person's data",),
        rows=torch.arange(records).expand(users, records).contiguous(),
    )
