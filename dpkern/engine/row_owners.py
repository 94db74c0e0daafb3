"""Find which sample each row of an operand belongs to, where rows were gathered inside the module.

A mixture of experts sorts its tokens by expert, a mask picks some of them, a batch is split in two.
Autograd's graph says how: it holds the indices. They are followed back to the operand of a captured
operation, whose rows are known. What is not listed here is not followed, and the first dimension is
then taken to be the batch, as ever. The probe of the batch dimension looks at either in the same
way.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from ..base.errors import UnsupportedModule

if TYPE_CHECKING:
    from .uses import CapturedOp

DEPTH = 64
"""Maximum number of operations that are followed back."""


class RowOwners(NamedTuple):
    """The samples that the rows of an operand belong to.

    Attributes:
        owners: the sample of each row, ``[rows]``.
        gathered: whether rows were picked inside the module.
        each: rows of every sample before any were picked.
    """

    owners: Tensor
    gathered: bool
    each: int


_SAME_ROWS = frozenset(
    """Mul Add Sub Div Neg Silu Gelu Relu Tanh Sigmoid Softplus ToCopy Clone Alias MaskedFill
    LeakyRelu Elu Hardswish Hardtanh Pow Clamp ClampMin ClampMax Minimum Maximum NativeDropout
    Exp Where Erf Rsqrt Sqrt Unsqueeze Squeeze""".split()
)
"""Operations whose rows are those of their operands."""

_RESHAPING = frozenset("View UnsafeView ReshapeAlias".split())


class GatheredRows:
    """The uses whose operands had gathered rows, as earlier passes have shown."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], bool] = {}

    def forget(self) -> None:
        """Follow the graph of every use again, because modules or hooks have changed."""
        self._known.clear()

    def owners(
        self, operation: str, names: str, x: Tensor, batch: int, batch_id: int
    ) -> tuple[RowOwners | None, bool]:
        """Return the samples of gathered rows, and whether rows may have moved unseen.

        None stands for rows that were not gathered: the batch comes first.

        The graph is followed at each use: a module may sort some batches and leave others.

        Args:
            operation, names: of the use, and of its parameters.
            x: its operand.
            batch, batch_id: number of samples, and which samples these are.

        Raises:
            UnsupportedModule: the graph said so before, and cannot be followed now.
        """
        if x.grad_fn is None or not batch:
            return None, False
        key = (operation, names, x.dim())
        known = self._known.get(key)
        found = rows_of(x, batch, batch_id)
        gathered = found is not None and found.gathered
        self._known[key] = bool(known) or gathered
        if known and found is None and batch == 1:
            return RowOwners(torch.zeros(x.shape[0], dtype=torch.long), True, 1), False
        if known and found is None:
            raise UnsupportedModule(
                f"{names} in {operation}",
                expected="rows that can be followed to their samples, as in earlier passes",
                got="rows that were gathered in another way",
                remedy="Pick the rows of a batch by indexing, and nothing else, inside the module.",
            )
        if found is None or not gathered:
            return None, may_move(x.grad_fn)
        return found, joins_others(x.grad_fn, found.owners, batch, batch_id)


def rows_of(x: Tensor, batch: int, batch_id: int) -> RowOwners | None:
    """Return the samples of an operand's rows; None if unknown."""
    if x.grad_fn is None or x.dim() == 0 or batch < 1:
        return None
    search = _Search(batch, batch_id)
    # Whoever lists a pass's operations wants the model's, and not those of this search.
    with _disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext():
        found = search.follow(x.grad_fn, int(x.shape[0]), DEPTH)
    if found is None and not x.shape[0]:  # no sample has chosen this expert
        return RowOwners(torch.empty(0, dtype=torch.long), True, 1)
    return found


_PICKING = frozenset("Index IndexSelect Gather Sort Topk Take MaskedSelect".split())
"""Operations whose result may stand in another order, as their indices say."""

_TURNING = frozenset("Transpose Permute T".split())

MOST = 4096
"""Maximum number of operations that are looked at."""


def may_move(start: Any) -> bool:
    """Whether rows may have been picked between the uses before and this node.

    What indices do to rows can be another thing in each batch. Those that are followed are known;
    with others a probe has to look at every batch.
    """
    stack, met, picked, turned = [start], {start}, False, False
    while stack and len(met) < MOST:
        node = stack.pop()
        if node is None or _captured(node) is not None:
            continue
        name = _name(node)
        turned = turned or name in _TURNING
        if name in _PICKING:
            picked = True
            if _along_rows(node, name):
                return True
        for following, _ in node.next_functions:
            if following not in met:
                met.add(following)
                stack.append(following)
    return (picked and turned) or len(met) >= MOST


def joins_others(start: Any, owners: Tensor, batch: int, batch_id: int) -> bool:
    """Whether gathered rows were joined with rows that may be other samples', as in a sum.

    The first operand that is followed names the owners; what others hold is looked at here.
    """
    search, stack, met = _Search(batch, batch_id), [start], {start}
    while stack and len(met) < MOST:
        node = stack.pop()
        if node is None or _captured(node) is not None:
            continue
        followed = [f for f, _ in node.next_functions if f is not None and not _is_leaf(f)]
        name = _name(node)
        if name in _PICKING and _along_rows(node, name):
            if any(map(may_move, followed)):
                return True
            continue  # in front of it, rows stand in the order of the batch
        if len(followed) > 1:
            found = [search.follow(f, len(owners), DEPTH) for f in followed]
            if any(one is None or not torch.equal(one.owners, owners) for one in found):
                return True
        for following in followed:
            if following not in met:
                met.add(following)
                stack.append(following)
    return len(met) >= MOST


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _along_rows(node: Any, name: str) -> bool:
    """Whether it picks along the first dimension."""
    if name == "Index":
        return node._saved_indices[0] is not None
    if name in ("Take", "MaskedSelect"):
        return True
    for attribute in ("_saved_index", "_saved_indices"):
        index = getattr(node, attribute, None)
        if isinstance(index, Tensor):
            return _dim(node) % max(index.dim(), 1) == 0
    return not _leaves_rows(node)


def _name(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name().removeprefix("_"))


class _Search:
    """The way back from one operand; every node is looked at once for each number of rows."""

    def __init__(self, batch: int, batch_id: int) -> None:
        self.batch, self.batch_id = batch, batch_id
        self._known: dict[tuple[Any, int], RowOwners | None] = {}

    def follow(self, node: Any, rows: int, depth: int) -> RowOwners | None:
        """Return the samples of a node's rows, and whether rows were gathered on the way."""
        if node is None or depth == 0:
            return None
        key = node, rows
        if key not in self._known:
            self._known[key] = None  # for the way back to itself, which there is not
            self._known[key] = self._looked_at(node, rows, depth)
        return self._known[key]

    def _looked_at(self, node: Any, rows: int, depth: int) -> RowOwners | None:
        captured = _captured(node)
        if captured is not None:
            return _of_use(captured, rows, self.batch, self.batch_id)
        name = _name(node)
        if name in _RESHAPING:
            return self._reshaped(node, rows, depth)
        picked = _picked(node, name, rows)
        if picked is not None:
            index, before, inner = picked
            found = self.follow(node.next_functions[0][0], before, depth - 1)
            if found is None:
                return None
            return RowOwners(found.owners[index.to(found.owners.device)], True, found.each * inner)
        if name in _SAME_ROWS or (name in _OF_A_DIMENSION and _leaves_rows(node)):
            for following, _ in node.next_functions:
                found = self.follow(following, rows, depth - 1)
                if found is not None:
                    return found
        return None

    def _reshaped(self, node: Any, rows: int, depth: int) -> RowOwners | None:
        sizes = list(node._saved_self_sym_sizes)
        while len(sizes) > 1 and sizes[0] == 1 != rows:
            del sizes[0]  # a dimension in front of the rows
        before = int(sizes[0]) if sizes else 0
        if not before and not rows:
            return self.follow(node.next_functions[0][0], 0, depth - 1)
        if not before or not rows or (rows % before and before % rows):
            return None
        found = self.follow(node.next_functions[0][0], before, depth - 1)
        if found is None or rows == before:
            return found
        owners, gathered, each = found
        if rows > before:
            times = rows // before
            return RowOwners(owners.repeat_interleave(times), gathered, each * times)
        together = owners.view(rows, before // rows)
        if not bool((together == together[:, :1]).all()):
            return None
        return RowOwners(together[:, 0], gathered, -(-each * rows // before))


_OF_A_DIMENSION = frozenset(("Split", "Slice", "Softmax", "SplitWithSizes", "Select"))


def _leaves_rows(node: Any) -> bool:
    """Whether the operation runs along another dimension than the first."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        sizes = node._saved_result.shape
    return _dim(node) % len(sizes) != 0


def _dim(node: Any) -> int:
    """Return the dimension that the operation runs along."""
    dim = int(node._saved_dim)
    return dim - (1 << 64) if dim >= 1 << 63 else dim  # autograd shows it as an unsigned number


def _captured(node: Any) -> CapturedOp | None:
    """Return the use that made the node, recorded or replayed; None if no use did."""
    use: Any = getattr(node, "use", node)
    run = getattr(use, "run", None)
    if run is not None:
        found: CapturedOp = run.use_of(use.site)
        return found
    return None if use is node else use


def _of_use(use: CapturedOp, rows: int, batch: int, batch_id: int) -> RowOwners | None:
    if use.batch_id != batch_id or use.rows != rows:
        return None
    if use.owners is not None:
        return RowOwners(use.owners, True, use.each)
    if rows % batch:
        return None
    return RowOwners(torch.arange(rows) // (rows // batch), False, rows // batch)


def _picked(node: Any, name: str, rows: int) -> tuple[Tensor, int, int] | None:
    """Return the indices that picked rows, and the number of rows before; None for others.

    The last number is how many rows one of these becomes, at most, without a repetition.
    """
    if name not in ("Index", "IndexSelect", "Slice", "Split"):
        return None
    sizes = list(node._saved_self_sym_sizes)
    indices = list(node._saved_indices) if name == "Index" else []
    while len(indices) > 1 and indices[0] is None and sizes[0] == 1:
        del indices[0], sizes[0]  # a dimension in front of the rows
    before = int(sizes[0]) if sizes else 0
    index, inner = None, 1
    if name == "Index":
        first, *more = indices
        if first is None or any(t is not None for t in more):
            return None
        if first.dtype == torch.bool:
            # A mask of several dimensions tells the row by its first one.
            index, inner = first.nonzero()[:, 0], first[:1].numel()
        elif first.dim() == 1:
            index = first.remainder(before) if before else None
    elif name == "IndexSelect" and node._saved_dim == 0:
        index = node._saved_index
    elif name == "Slice" and node._saved_dim == 0:
        parts = slice(node._saved_start, min(node._saved_end, before), node._saved_step)
        index = torch.arange(before)[parts]
    if index is None or index.dim() != 1 or len(index) != rows:
        return None
    return index.detach().long().cpu(), before, inner


def by_sample(tensor: Tensor, owners: Tensor, batch: int, each: int = 0) -> Tensor:
    """Return ``[rows, ...] -> [B, most, ...]``: each sample's rows, filled up with zeros.

    Args:
        tensor, owners, batch: rows, the sample of each, and the number of samples.
        each: as many rows at least. Where integers are made of them, how many others have may not
            matter.
    """
    owners = owners.to(tensor.device)
    order = owners.argsort(stable=True)
    counts = torch.bincount(owners, minlength=batch)
    first = counts.cumsum(0) - counts
    most = max(1, each, int(counts.max())) if batch else max(1, each)
    made = tensor.new_zeros((batch, most, *tensor.shape[1:]))
    sorted_owners = owners[order]
    place = torch.arange(len(owners), device=tensor.device) - first[sorted_owners]
    made[sorted_owners, place] = tensor[order]
    return made
