"""Audit a user's release: ``path.py:name``, a function or a ``Subject``.

A function is called with records ``[B, d]``, float32, and answers

    release(records) -> [n]             one release; called once for each run
    release(records, runs) -> [runs, n] so many releases of the same records at once

with fresh noise each. Its script may say with constants beside it

    DIMENSION = 16      d, the numbers of a record
    BATCH = 4           records of D; the canary is one more
    BOUND = 1.0         a statement that no record has a larger L2 norm
    CLAIM = Gaussian(1.0), Approximate(2.0, 1e-5), ...     of dpkern.audit.claims
    STATEMENT = Statement(...)     of dpkern.audit.plan: what is said of a whole run
    LOADER = DataLoader(...)       its batches, compared with the statement's sampling

Without ``BOUND`` any finite record may come, and the function bounds what each one contributes: the
canaries then have norm 2^14, the other records norm 2^-4. Neighbours are D and D with one record
more. A ``Statement`` may be named itself, ``path.py:STATEMENT``: nothing is run then. The file runs
with all rights of the caller: audit no file that you would not run.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...base import validate as check
from ...base.errors import DPKernError, InvalidInput
from ...base.script_file import spec_of
from .. import plan
from ..claims import Claim, NoClaim
from ..findings import Check
from ..subject import Pair, Subject
from .stated import StatementSubject

UNBOUNDED = 2.0**14
"""Norm of a canary that is to be clipped."""

ORDINARY = 2.0**-4
"""Norm of the other records, relative to the bound where there is one."""


@dataclass(frozen=True, kw_only=True)
class ScriptSubject(Subject):
    """A release that is a function of records.

    Attributes:
        function: release function, called as described above.
        name: name in reports.
        dimension: numbers of a record.
        batch: records of D.
        bound: largest norm of a record. None means that the function bounds records.
        claimed: claim about one release.
        stated: statement about a run of releases. None means that nothing is stated.

    Raises:
        InvalidInput: no function of one or two arguments, or numbers out of range.
    """

    function: Callable[..., Any]
    name: str
    dimension: int = 16
    batch: int = 4
    bound: float | None = None
    claimed: Claim = field(default_factory=NoClaim)
    certified: Claim = field(default_factory=NoClaim)
    stated: StatementSubject | None = None

    def __post_init__(self) -> None:
        check.integer(1, dimension=self.dimension)
        check.integer(0, batch=self.batch)
        if self.bound is not None:
            check.positive(bound=self.bound)
        if not isinstance(self.claimed, Claim):
            raise InvalidInput(
                "claim",
                expected="Gaussian, Laplace, Pure or Approximate of dpkern.audit.claims",
                got=type(self.claimed).__name__,
                remedy="Write, for example, CLAIM = Gaussian(1.0).",
            )
        _ = self._at_once

    @cached_property
    def _at_once(self) -> bool:
        """Whether one call makes many releases."""
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        try:
            found = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError) as error:
            raise _no_function(self.name, type(self.function).__name__) from error
        needed = [p for p in found if p.default is p.empty and p.kind in places]
        others = [p for p in found if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
        if others or len(needed) not in (1, 2):
            raise _no_function(self.name, f"({', '.join(p.name for p in found)})")
        return len(needed) == 2

    def release(self, data: Tensor, runs: int, seed: int) -> Tensor:
        """Return ``[runs, n]``; torch's global generator is seeded, for noise that uses it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self._at_once:
                return self._checked(self.function(data.clone(), runs), runs)
            rows = [torch.as_tensor(self.function(data.clone())).flatten() for _ in range(runs)]
            return self._checked(torch.stack(rows), runs)

    def _checked(self, released: Any, runs: int) -> Tensor:
        tensor = torch.as_tensor(released)
        if tensor.dim() != 2 or len(tensor) != runs:
            raise InvalidInput(
                self.name,
                expected=f"{runs} releases [{runs}, n]",
                got=f"a tensor of shape {list(tensor.shape)}",
                remedy="Return [n] from release(records) or [runs, n] from release(records, runs).",
            )
        return tensor.detach()

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Return pairs: canary in one coordinate, uniform, in a random direction, as weakest."""
        d = self.dimension
        chosen = torch.Generator().manual_seed(d)
        directions = {
            "coordinate": torch.eye(d, dtype=torch.float64)[0],
            "uniform": torch.ones(d, dtype=torch.float64),
            "random": torch.randn(d, dtype=torch.float64, generator=chosen),
        }
        if weakest is not None and weakest.numel() == d:
            directions["weakest"] = weakest.detach().cpu().double().flatten()
        ordinary = torch.randn(self.batch, d, generator=chosen)
        small = ORDINARY * (1.0 if self.bound is None else self.bound)
        without = ordinary * (small / ordinary.norm(dim=1, keepdim=True))
        return tuple(
            Pair(name=name, without=without, present=torch.cat([without, self._canary(v)[None]]))
            for name, v in directions.items()
        )

    def _canary(self, direction: Tensor) -> Tensor:
        """Return a record of the largest norm, in float32 and not above a stated bound."""
        norm = UNBOUNDED if self.bound is None else self.bound
        record = (direction * (norm / float(direction.norm()))).float()
        while self.bound is not None and float(record.double().norm()) > self.bound:
            record = torch.nextafter(record, torch.zeros(()))
        return record

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Check what is stated, and that adversarial records leave allowed releases finite."""
        found = () if self.stated is None else self.stated.checks(quick=quick)
        return found if self.bound is not None else (*found, self._hostile())

    def _hostile(self) -> Check:
        hostile = {"NaN": math.nan, "infinity": math.inf, "1e38": 1e38}
        records = self.pairs(None)[0].present
        bad = []
        for name, value in hostile.items():
            records[-1, 0] = value
            if not bool(torch.isfinite(self.release(records, 1, 0)).all()):
                bad.append(name)
        return Check(
            layer="sensitivity",
            name="hostile records",
            passed=not bad,
            text=f"a record with {', '.join(bad)} shows in a release that is not finite"
            if bad
            else f"records with {', '.join(hostile)} leave releases finite",
        )


def _no_function(name: str, got: str) -> InvalidInput:
    return InvalidInput(
        name,
        expected="a dpkern Subject, or a function of (records) or (records, runs)",
        got=got,
        remedy="Name it as path.py:name.",
    )


@dataclass(frozen=True, kw_only=True)
class Script(Subject):
    """The release or subject that a script calls ``symbol``; every process reads the file itself.

    Attributes:
        path: the file.
        symbol: a function or a ``Subject`` in it.
    """

    path: str
    symbol: str

    def __getstate__(self) -> dict[str, Any]:
        """Return path and name: what was loaded may not be picklable."""
        return {"path": self.path, "symbol": self.symbol}

    @cached_property
    def _found(self) -> Subject:
        with _theirs("script"):
            module = _module(Path(self.path))
        found = getattr(module, self.symbol, None)
        label = f"{Path(self.path).name}:{self.symbol}"
        if isinstance(found, Subject):
            return found
        stated = _stated(module, label)
        if stated is not None and found is stated.statement:
            return stated
        if found is None:
            raise InvalidInput(
                "script",
                expected=f"a name in {self.path}",
                got=self.symbol,
                remedy="Name one of: "
                + ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v)),
            )
        if not callable(found):
            raise _no_function(label, type(found).__name__)
        given = {
            field: getattr(module, constant)
            for field, constant in _CONSTANTS.items()
            if hasattr(module, constant)
        }
        return ScriptSubject(function=found, name=label, stated=stated, **given)

    @property
    def usual_runs(self) -> int:  # type: ignore[override]
        """The usual runs of the loaded subject."""
        return self._found.usual_runs

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the loaded subject."""
        return self._found.name

    @property
    def claimed(self) -> Claim:  # type: ignore[override]
        """The claim of the loaded subject."""
        return self._found.claimed

    @property
    def certified(self) -> Claim:  # type: ignore[override]
        """The certified claim of the loaded subject."""
        return self._found.certified

    def release(self, data: Any, runs: int, seed: int) -> Tensor:
        """Call ``release`` of the loaded subject."""
        with _theirs(self.name):
            return self._found.release(data, runs, seed)

    def pairs(self, weakest: Tensor | None) -> Sequence[Pair]:
        """Call ``pairs`` of the loaded subject."""
        with _theirs(self.name):
            return self._found.pairs(weakest)

    def null(self) -> Any:
        """Call ``null`` of the loaded subject."""
        with _theirs(self.name):
            return self._found.null()

    def noise_sd(self) -> Tensor | float | None:
        """Call ``noise_sd`` of the loaded subject."""
        with _theirs(self.name):
            return self._found.noise_sd()

    def checks(self, *, quick: bool) -> Sequence[Check]:
        """Call ``checks`` of the loaded subject."""
        with _theirs(self.name):
            return self._found.checks(quick=quick)


@contextmanager
def _theirs(name: str) -> Iterator[None]:
    """Run code of a script: whatever ends it is a refusal, and never a verdict.

    An exit with code 0 would otherwise look like a passed audit, an exception like a contradiction.
    """
    try:
        yield
    except DPKernError:
        raise
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise InvalidInput(
            name,
            expected="code that runs to its end",
            got=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})",
            remedy="Repair the script; its imports, functions and sizes are run as they are.",
        ) from error


def _stated(module: ModuleType, label: str) -> StatementSubject | None:
    """Return what the file states about a run; None if it states nothing.

    Raises:
        InvalidInput: no ``Statement``, or a loader without one.
    """
    statement = getattr(module, "STATEMENT", None)
    loader = getattr(module, "LOADER", None)
    if statement is None and loader is None:
        return None
    if not isinstance(statement, plan.Statement):
        raise InvalidInput(
            "STATEMENT",
            expected="a dpkern.audit.plan.Statement, which says how LOADER should draw too",
            got=type(statement).__name__,
            remedy="Write STATEMENT = Statement(event=..., steps=..., epsilon=..., delta=...).",
        )
    return StatementSubject(statement=statement, loader=loader, name=label)


_CONSTANTS = {"dimension": "DIMENSION", "batch": "BATCH", "bound": "BOUND", "claimed": "CLAIM"}


def is_script(reference: str) -> bool:
    """Whether this names something in a file and not a mechanism."""
    return reference.rpartition(":")[0].endswith(".py") or reference.endswith(".py")


def load(reference: str) -> Script:
    """Load the subject ``path.py:name``; the name defaults to ``release``.

    Raises:
        InvalidInput: no such file, a file that raises or exits, no such name there, or nothing that
            can be audited.
    """
    path, _, symbol = reference.rpartition(":") if not reference.endswith(".py") else ("", "", "")
    script = Script(path=str(Path(path or reference).resolve()), symbol=symbol or "release")
    _ = script.name  # reads the file: what is wrong is said before anything runs
    return script


def _module(path: Path) -> ModuleType:
    """Load the file as a module of its own, once per process while its content stays the same."""
    if not path.is_file() or path.suffix != ".py":
        raise InvalidInput(
            "script",
            expected="a Python file",
            got=str(path),
            remedy="Pass path.py:name with a path from here.",
        )
    content = str(path).encode() + path.read_bytes()
    name = f"dpkern_script_{blake2b(content, digest_size=16).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_of(path, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the file look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
