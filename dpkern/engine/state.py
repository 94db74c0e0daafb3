"""Guard the state that a module remembers: it must follow no data.

It may change by count, by loading, or inside ``engine.public()``.

Every pass compares identities and versions of parameters and buffers with those that the last pass
left behind, which is cheap; contents decide where they differ. Before ``state_dict()`` and copies
of the module contents alone decide, since ``.data`` writes change no version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.errors import UnsupportedModule
from .contents import content_hash, readable
from .hooks import Hook
from .parameter import without_torch_function
from .provenance.refusals import samples_loaded
from .table_entries import Table, TableEntries, read

if TYPE_CHECKING:
    from .pass_look import PassLook

SMALL = 1 << 20
"""Maximum bytes of a tensor whose content is compared around every public block."""

_VERSION = Tensor._version

_Place = tuple[str, Tensor]
Marks = tuple[list[int], list[int]]
"""Identities and versions of tensors."""

Left = tuple[TableEntries, list[Tensor], list[bool], Marks]
"""Tables, tensors, whether each is not the engine's, and the marks that a pass has left."""


class StateGuard:
    """The approved contents of a module's buffers and frozen parameters.

    Args:
        module: the root.
        trained: returns the ``id`` of each parameter that the engine updates; those may change.
        whole: tells whether parameters are always the same objects; else buffers alone are watched.
    """

    def __init__(
        self, module: nn.Module, trained: Callable[[], set[int]], whole: Callable[[], bool]
    ) -> None:
        self.module = module
        self.counted: set[str] = set()
        """Names of tensors that a probe saw changing alike for different samples."""
        self.on_finding: Callable[[UnsupportedModule], None] | None = None
        """Callback before an error about contents at ``state_dict()`` is raised."""
        self._trained = trained
        self._whole = whole
        self._approved: dict[str, tuple[int, torch.dtype]] = {}
        self._handles: list[Any] = []
        self._left: Marks | None = None
        self.quick: PassLook | None = None
        """Stands for ``before_pass`` and ``after_pass`` as long as nothing changes."""
        self._modules: list[tuple[str, nn.Module]] = []
        self._entered: Marks = ([], [])
        self._ids: set[int] = set()
        self._trained_names: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read anew which modules there are, and their tables of tensors."""
        self._modules = list(self.module.named_modules())
        self._buffers: list[Table] = [part._buffers for _, part in self._modules]
        self._tables_of_all: list[Table] = [
            *self._buffers,
            *(part._parameters for _, part in self._modules),
        ]
        self._entries: TableEntries | None = None
        """The tables' entries when tensors were last read from them.

        They keep these tensors alive, so that no other tensor gets the same identity.
        """
        self._tensors: list[Tensor] = []
        self._own_ids: list[int] = []
        self._other: list[bool] = []
        """Whether each tensor is one that the engine does not update."""

    def attach(self) -> None:
        """Approve what is there, and watch ``state_dict`` and ``load_state_dict``."""
        self._forget()
        self._ids = self._trained()
        self.refresh()
        self._trained_names = {name for name, t in self._places() if id(t) in self._ids}
        self.approve()
        self._left = self._marks()
        for name, part in self._modules:
            if not isinstance(part, torch.jit.ScriptModule):  # it takes no such hooks
                self._watch(name, part)

    def detach(self) -> None:
        """Stop watching ``state_dict`` and ``load_state_dict``."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def approve(self, names: set[str] | None = None) -> None:
        """Accept the present contents of all tensors, or of those named."""
        for name, tensor in self._watched():
            if names is None or name in names:
                self._approved[name] = (content_hash(tensor), tensor.dtype)

    def before_pass(self) -> None:
        """Refuse what was written since the last pass, other than by loading or moving.

        Raises:
            UnsupportedModule: names it.
        """
        quick = self._seen_quickly()
        now = self._entered = self._marks()
        if self._left is None:
            return
        self._left = quick or self._left
        (ids, versions), (known, left) = now, self._left
        if ids is known or ids == known:
            # Steps change trained parameters, which is the only change in most loops.
            other = self._other
            if [*compress(versions, other)] == [*compress(left, other)]:
                return
        written = self._written(self._left, now)
        self._check(self._unapproved(self._lasting(written)), "between forward passes")

    def after_pass(self) -> None:
        """Refuse what this pass wrote without a probe having seen that it follows no data.

        Raises:
            UnsupportedModule: names it.
        """
        self._entered = self._seen_quickly() or self._entered
        before, now, self._left = self._left, self._marks(), None
        if now != self._entered:
            names = self._unapproved(self._lasting(self._written(self._entered, now)))
            if self._whole():
                ours = self._written(self._entered, now, trained=True)
                names += [name for name, _ in ours if name not in self.counted]
            self._check(names, "in a forward pass")
        # What stands in the place of others in a pass without gradients may not stay there.
        is_swapped = before is not None and not torch.is_grad_enabled() and before[0] != now[0]
        self._left = before if is_swapped else now

    @contextmanager
    def public(self) -> Iterator[None]:
        """Approve what is written in this block, as it comes from public data."""
        if self._left is not None:
            self.before_pass()
        before = self._looked()
        fine = {name for name, _ in self._watched()} - set(self._unapproved_fast())
        yield
        after = self._looked()
        names = {name for name in after if after[name] != before.get(name)}
        self.approve({name for name in names if name in fine or name not in before})
        self._forget()
        self._left = self._marks()

    def check(self, prefix: str = "", part: nn.Module | None = None) -> None:
        """Refuse contents that were not approved, in one module or in all.

        Raises:
            UnsupportedModule: names them.
        """
        places = self._watched() if part is None else self._watched([(prefix, part)])
        names = self._unapproved(places)
        if names and self.on_finding is not None:
            self.on_finding(_changed(names, "since they were last checked"))
        self._check(names, "since they were last checked")

    @property
    def marks_left(self) -> Left | None:
        """The tensors as the last pass has left them; None where that is not known."""
        if self._left is None or self._entries is None or self._left[0] is not self._own_ids:
            return None
        return self._entries, self._tensors, self._other, self._left

    def _seen_quickly(self) -> Marks | None:
        """End the quick looks; return what the last one has seen."""
        quick, self.quick = self.quick, None
        return None if quick is None else quick.marks()

    def _forget(self) -> None:
        """Take what is there before the next pass as it is."""
        self._entered = self._seen_quickly() or self._entered
        self._left = None

    def _check(self, names: list[str], when: str) -> None:
        if names:
            raise _changed(names, when)

    def _watch(self, name: str, part: nn.Module) -> None:
        def saving(*_: Any) -> None:
            self.check(name, part)

        def loaded(*_: Any) -> None:
            dot = f"{name}." if name else ""
            own = {dot + n for table in (part._parameters, part._buffers) for n in table}
            self.approve(own)
            self._forget()

        hooked: Any = part  # torch leaves these two without types

        def loading(_: nn.Module, given: Mapping[str, Any], *__: Any) -> None:
            for key, value in given.items():
                if hasattr(value, "follows_records"):
                    raise samples_loaded(key)

        self._handles += [
            hooked.register_state_dict_pre_hook(_CheckedHook(saving)),
            hooked.register_load_state_dict_post_hook(Hook(loaded)),
        ]
        if part is self.module:  # torch makes errors of what a copy raises its own
            self._handles.append(hooked.register_load_state_dict_pre_hook(Hook(loading)))

    def _places(self, modules: list[tuple[str, nn.Module]] | None = None) -> list[_Place]:
        found: list[_Place] = []
        for name, part in modules or self._modules:
            dot = f"{name}." if name else ""
            for table in self._tables(part):
                found += [(dot + n, t) for n, t in table.items() if t is not None]
        return found

    def _marked(self) -> list[_Place]:
        """Return the tensors of ``_marks`` with their names, in the same order."""
        tables = ("_buffers", "_parameters") if self._whole() else ("_buffers",)
        return [
            (f"{name}.{n}" if name else n, t)
            for table in tables
            for name, part in self._modules
            for n, t in getattr(part, table).items()
            if t is not None
        ]

    def _tables(self, part: nn.Module) -> Sequence[dict[str, Any]]:
        return (part._parameters, part._buffers) if self._whole() else (part._buffers,)

    def _watched(self, modules: list[tuple[str, nn.Module]] | None = None) -> Iterator[_Place]:
        for name, tensor in self._places(modules):
            if id(tensor) not in self._ids and readable(tensor):
                yield name, tensor

    def _marks(self) -> Marks:
        """Return identity and version of every parameter and buffer."""
        if self._entries is None or not self._entries.same():
            tables = self._tables_of_all if self._whole() else self._buffers
            self._entries = TableEntries(tables)
            self._tensors = [t for table in tables for t in table.values() if t is not None]
            self._own_ids = [*map(id, self._tensors)]
            self._other = [own not in self._ids for own in self._own_ids]
        with without_torch_function():
            try:
                versions = read(_VERSION, self._tensors)
            except RuntimeError:  # tensors of inference mode have none
                versions = [-1 if t.is_inference() else t._version for t in self._tensors]
        return self._own_ids, versions

    def _written(self, before: Marks, now: Marks, *, trained: bool = False) -> list[_Place]:
        """Return the tensors whose mark has changed: trained parameters, or all others."""
        ids, versions = now
        if ids == before[0]:
            pairs = enumerate(zip(before[1], versions, strict=True))
            changed = [i for i, (old, new) in pairs if old != new]
        else:
            known = set(zip(*before, strict=True))
            changed = [i for i, m in enumerate(zip(*now, strict=True)) if m not in known]
        changed = [i for i in changed if (ids[i] in self._ids) == trained]
        if not changed:
            return []
        places = self._marked()
        return [places[i] for i in changed]

    def _lasting(self, places: list[_Place]) -> list[_Place]:
        """Leave out other tensors in the place of trained ones, in a pass without gradients.

        ``torch.func.functional_call`` puts a teacher's weights there for that pass.
        """
        if torch.is_grad_enabled():
            return places
        return [place for place in places if place[0] not in self._trained_names]

    def _unapproved(self, places: Iterable[_Place]) -> list[str]:
        names = []
        for name, tensor in places:
            if name in self.counted:
                continue
            known = self._approved.get(name)
            if known is None and tensor.requires_grad:
                continue  # its gradients are refused as leaked
            if known is not None and known[1] is not tensor.dtype:
                self._approved[name] = (content_hash(tensor), tensor.dtype)  # it was cast
            elif known is None or known[0] != content_hash(tensor):
                names.append(name)
        return names

    def _unapproved_fast(self) -> list[str]:
        return self._unapproved((n, t) for n, t in self._watched() if t.nbytes <= SMALL)

    def _looked(self) -> dict[str, Any]:
        """Return the hash of each small tensor's content, and place and version of large ones."""
        with without_torch_function():
            return {
                name: content_hash(t)
                if t.nbytes <= SMALL
                else (id(t), t.data_ptr(), -1 if t.is_inference() else t._version)
                for name, t in self._watched()
            }


class _CheckedHook(Hook):
    """A hook that is called before it is copied, since a copy of the module holds the state too."""

    def __reduce__(self) -> Any:
        self.call()
        return super().__reduce__()


def _changed(names: list[str], when: str) -> UnsupportedModule:
    shown = ", ".join(sorted(dict.fromkeys(names))[:5])
    return UnsupportedModule(
        f"buffer or frozen parameter {shown}",
        expected="contents that only engine.public(), load_state_dict() or a count changes",
        got=f"others, written {when}",
        remedy="Write from public data or released weights inside engine.public(), and keep "
        "everything else outside of the module: what it absorbs from the data reaches "
        "state_dict() or later steps without noise.",
    )
