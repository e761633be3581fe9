"""Which rows of a pass each op acts on, and ops of many requests as one call.

Ops that apply in the same round (the same place among their request's ops at a site), at the same layers, with the
same arithmetic, are one `Change`: their tensors stand in one table per layer, and each row looks its own up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.core.binding import BoundOp
from midstream.core.errors import CaptureError
from midstream.core.interventions import Function, acts_on
from midstream.core.op import Op
from midstream.core.ops import Ablate, Add, Affine, Clamp, LowRank, Replace, Rotate, Router
from midstream.core.sites import Site

from . import kinds
from .ledger import Ledger
from .step import Ints, StepBatch
from .stream import Stream

_TENSOR_OF: Final = {"add": "vectors", "replace": "vectors", "clamp": "unit", "ablate": "basis"}


@dataclass(frozen=True)
class _Key:
    """What ops share that are one call."""

    site: Site
    round: int
    layers: tuple[int, ...]
    kind: str
    heads: tuple[int, ...] | None
    gated: bool
    norm_match: bool = False
    cap_norm: bool = False
    measure: str | None = None
    positioned: bool = False
    # for kinds whose tensors are too large to look up row by row: the op itself
    alone: int | None = None


def _key(bound: BoundOp, round_: int) -> _Key:
    op = bound.op
    aligned = getattr(op, "only_aligned", None)
    by_row = isinstance(op, Add | Replace | Clamp) or (
        isinstance(op, Ablate) and all(len(of["basis"]) == 1 for of in bound.tensors.values())
    )
    return _Key(
        op.site,
        round_,
        op.layers,
        op.kind,
        getattr(op, "heads", None),
        op.gate is not None,
        getattr(op, "norm_match", False),
        getattr(op, "cap_norm", False),
        aligned.measure if aligned else None,
        _positions(op) is not None,
        None if by_row else id(bound),
    )


def _positions(op: Op) -> tuple[int, ...] | None:
    """The absolute positions that each have a vector of their own."""
    return op.positions if isinstance(op, Add | Replace) else None


def changes_of(requests: Sequence[Sequence[BoundOp]], ledger: Ledger) -> list[Change]:
    """The ops of all requests, gathered by key; ops that change nothing are left out."""
    members: dict[_Key, list[tuple[int, BoundOp]]] = {}
    for request, ops in enumerate(requests):
        for bound in ops:
            if not bound.op.silent:
                members.setdefault(_key(bound, round_of(ops, bound, bound.op.site)), []).append((request, bound))
    return [Change(key, of, len(requests), ledger) for key, of in members.items()]


def round_of(ops: Sequence[BoundOp], bound: BoundOp, site: Site) -> int:
    """How many ops of a request come before `bound` at a site."""
    return sum(other.op.site == site and other.place < bound.place for other in ops)


class Change:
    """Ops of one key: their rows of a pass, and the call that changes them."""

    def __init__(self, key: _Key, members: Sequence[tuple[int, BoundOp]], requests: int, ledger: Ledger) -> None:
        self.key, self.layers = key, key.layers
        self.site: Site = key.site
        self.order = (key.round, 1)
        self._ledger = ledger
        unique = {id(bound): bound for _, bound in members}
        self._ops = list(unique.values())
        place = {of: index for index, of in enumerate(unique)}
        self._op_of = np.full(requests, -1, dtype=np.int64)
        self._slot_of = np.zeros(requests, dtype=np.int64)  # at the first layer; the others follow it
        for request, bound in members:
            self._op_of[request] = place[id(bound)]
            self._slot_of[request] = ledger.slot(request, bound, self.layers[0])
        scopes = [_Scope(bound.op) for bound in self._ops]
        self._scopes = list(dict.fromkeys(scopes))
        self._scope_of = np.array([self._scopes.index(scope) for scope in scopes], dtype=np.int64)
        counts = [len(_positions(bound.op) or (0,)) for bound in self._ops]
        self._first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)  # in the table
        self._tables: dict[tuple[int, torch.device], Tensor] = {}
        self._numbers: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def begin(self, step: StepBatch, device: torch.device, masks: dict[Any, NDArray[np.bool_]]) -> None:
        """Find the rows of a pass; `masks` keeps what a scope selects of it, for all changes."""
        op = self._op_of[step.request]
        mine = op >= 0
        for index, scope in enumerate(self._scopes):
            if scope not in masks:
                masks[scope] = acts_on(scope.op, step)
            mine &= masks[scope] | (self._scope_of[op] != index)
        step, op = step.take(mine), op[mine]
        entry = self._first[op]
        if self.key.positioned:
            entry = entry + self._position_places(step, op)
        columns = (step.row, entry, op, self._slot_of[step.request])
        first = None if step.again is None else torch.as_tensor(~step.again).double().to(device)
        row, entries, ops, slots = (torch.as_tensor(column).to(device) for column in columns)
        self._rows = _Rows(step, row, entries, ops, slots, first)

    def _position_places(self, step: StepBatch, op: Ints) -> Ints:
        """Which of its op's positions each row has."""
        places = np.zeros(len(step), dtype=np.int64)
        for index, bound in enumerate(self._ops):
            of = op == index
            places[of] = np.searchsorted(np.array(_positions(bound.op), dtype=np.int64), step.position[of])
        return places

    @property
    def acts(self) -> bool:
        """Whether some row of this pass may change."""
        return len(self._rows.step) > 0

    def apply(self, layer: int, stream: Stream) -> None:
        """Change the rows of the pass that stand in `stream`."""
        rows = self._rows.on(stream.device)
        if self.key.gated:
            rows = rows.take(self._reached(layer))
        if not len(rows.step):
            return
        whole = stream.take(rows.index)
        columns = self._columns(stream.device)
        x = (whole if columns is None else whole[:, columns]).float()
        y = self._changed(layer, x, rows)
        relative = kinds.norm(y - x)[:, 0] / kinds.norm(x)[:, 0].clamp(min=1e-30)
        self._ledger.count(rows.slot + self.layers.index(layer), relative, rows.first)
        changed = y.to(stream.dtype)
        stream.put(rows.index, changed if columns is None else whole.index_copy(1, columns, changed))

    def _columns(self, device: torch.device) -> Tensor | None:
        """The places in a row of the heads that the ops name."""
        if self.key.heads is None:
            return None
        size = self._ops[0].layout[self.layers[0]].head_size or 0
        places = [head * size + place for head in self.key.heads for place in range(size)]
        return torch.tensor(places, device=device)

    def _reached(self, layer: int) -> NDArray[np.int64]:
        """Of this pass's rows, those whose gate is open, and which its evidence precedes at this layer."""
        step = self._rows.step
        keep = np.zeros(len(step), dtype=np.bool_)
        for request in np.unique(step.request):
            bound = self._ops[int(self._op_of[request])]
            reached = (step.request == request) & acts_on(bound.op, step, layer)
            if reached.any() and self._ledger.decision(int(request), bound.place):
                keep |= reached
        return np.flatnonzero(keep)

    def _changed(self, layer: int, x: Tensor, rows: _Rows) -> Tensor:
        op = self._ops[0].op
        if isinstance(op, Function):
            return _by_function(op, x, rows.step, self._ledger)
        if self.key.alone is not None:
            y = _alone(op, {name: self._tensor(layer, name, x.device) for name in self._ops[0].tensors[layer]}, x)
        else:
            y = self._by_row(layer, x, rows)
        return kinds.capped(x, y) if self.key.cap_norm else y

    def _tensor(self, layer: int, name: str, device: torch.device) -> Tensor:
        return torch.as_tensor(np.array(self._ops[0].tensors[layer][name])).to(device)

    def _by_row(self, layer: int, x: Tensor, rows: _Rows) -> Tensor:
        """One call for ops of many requests: each row with the vector and the numbers of its own op."""
        table = self._table(layer, x.device)
        vector = table if len(table) == 1 else table[rows.entry]
        amount, above = (of if len(of) == 1 else of[rows.op] for of in self._amounts(x.device))
        kind = self.key.kind
        if kind == "add":
            y = (kinds.add_matched if self.key.norm_match else kinds.add)(x, vector, amount)
        elif kind == "replace":
            y = kinds.replace(x, vector, amount)
        elif kind == "clamp":
            y = kinds.clamp(x, vector, amount)
        else:
            y = kinds.ablate_one(x, vector, amount)
        if self.key.measure is None:
            return y
        unit = vector / kinds.norm(vector)
        return torch.where(kinds.aligned(x, unit, self.key.measure, above), y, x)

    def _table(self, layer: int, device: torch.device) -> Tensor:
        """The vectors of all ops at a layer, `[entries, width]`."""
        if (layer, device) not in self._tables:
            parts = [bound.tensors[layer][_TENSOR_OF[bound.op.kind]] for bound in self._ops]
            table = np.concatenate([np.atleast_2d(part) for part in parts])
            with torch.inference_mode(False):  # a caller's loop may want gradients through it
                self._tables[layer, device] = torch.tensor(table).to(device)
        return self._tables[layer, device]

    def _amounts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Strength (or a clamp's value), and the bound of only_aligned, of each op, `[ops, 1]`."""
        if device not in self._numbers:
            amounts = [_amount(bound.op) for bound in self._ops]
            above = [one.above if (one := getattr(bound.op, "only_aligned", None)) else 0.0 for bound in self._ops]
            self._numbers[device] = (
                torch.tensor(amounts, dtype=torch.float32, device=device)[:, None],
                torch.tensor(above, dtype=torch.float32, device=device)[:, None],
            )
        return self._numbers[device]


@dataclass(frozen=True)
class _Rows:
    """The rows of a pass that one Change acts on: which of its rows, table entry, op, and the ledger's first slot.

    first: 0 for rows that were counted when they were computed before; None: there is none.
    """

    step: StepBatch
    index: Tensor
    entry: Tensor
    op: Tensor
    slot: Tensor
    first: Tensor | None

    def on(self, device: torch.device) -> _Rows:
        """The same on another device: a model may lie on several."""
        return self if self.index.device == device else self._each(self.step, lambda one: one.to(device))

    def take(self, kept: NDArray[np.int64]) -> _Rows:
        """Some of the rows."""
        at = torch.as_tensor(kept).to(self.index.device)
        return self._each(self.step.take(kept), lambda one: one[at])

    def _each(self, step: StepBatch, of: Callable[[Tensor], Tensor]) -> _Rows:
        first = None if self.first is None else of(self.first)
        return _Rows(step, of(self.index), of(self.entry), of(self.op), of(self.slot), first)


def _by_function(op: Function, x: Tensor, step: StepBatch, ledger: Ledger) -> Tensor:
    """A user's function, called once per request."""
    y = x
    for request in np.unique(step.request):
        of = np.flatnonzero(step.request == request)
        at = torch.as_tensor(of).to(x.device)
        given = op.fn(x[at], ledger.labels(step.take(of)))
        if given is None:
            continue
        if not isinstance(given, Tensor) or given.shape != x[at].shape:
            got = f"{list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise CaptureError(f"the function returned {got} for rows {list(x[at].shape)}: return such rows, or None")
        y = y.index_copy(0, at, given.to(x.dtype))
    return y


def _amount(op: Op) -> float:
    """The strength of an op, or the value of a clamp."""
    assert isinstance(op, Add | Replace | Ablate | Clamp), op.kind
    return op.value if isinstance(op, Clamp) else op.strength


def _alone(op: Op, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """The call of a kind whose tensors all its rows share."""
    if isinstance(op, Ablate):
        return kinds.ablate(x, tensors["basis"], torch.tensor(op.strength, device=x.device))
    if isinstance(op, Rotate):
        return kinds.rotate(x, tensors["basis"], op.angle, op.mode)
    if isinstance(op, Affine):
        return kinds.affine(x, tensors["matrix"], tensors["bias"], torch.tensor(op.strength, device=x.device))
    if isinstance(op, LowRank):
        strength = torch.tensor(op.strength, device=x.device)
        return kinds.low_rank(x, tensors["P"], tensors["Q"], tensors["bias"], strength)
    assert isinstance(op, Router), op.kind
    return kinds.router(x, op.on, op.off, op.shift)


class _Scope:
    """What of an op decides which rows it may act on: equal for ops that ask for the same rows."""

    def __init__(self, op: Op) -> None:
        self.op = op
        reach = None if op.gate is None else (op.scope is None, op.layers[-1] > op.gate.deepest)
        self._same = (op.scope, _positions(op), reach)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Scope) and self._same == other._same

    def __hash__(self) -> int:
        return hash(self._same)
