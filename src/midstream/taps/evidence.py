"""What gates read: the rows of each prompt, pooled as they pass, and one decision at its last row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.core.binding import BoundOp
from midstream.core.gates import Gate
from midstream.core.sites import Site

from .groups import round_of
from .kinds import norm
from .ledger import Ledger
from .step import StepBatch
from .stream import Stream


@dataclass
class _Pool:
    """One request's evidence for one gated op: per layer, the sum of the prompt's rows and the last of them."""

    bound: BoundOp
    sums: dict[int, Tensor]
    counts: dict[int, int]
    last: dict[int, Tensor]


def evidence_of(requests: Sequence[Sequence[BoundOp]], ledger: Ledger) -> list[Evidence]:
    """A reader for each gate of each request whose own prompt rows will pass."""
    found: list[Evidence] = []
    for request, ops in enumerate(requests):
        if int(ledger.leaders[request]) == request:
            found += evidence_for(request, ops, ops, ledger)
    return found


def evidence_for(request: int, gated: Sequence[BoundOp], ops: Sequence[BoundOp], ledger: Ledger) -> list[Evidence]:
    """A reader for each gate of some of one request's ops."""
    return [
        Evidence(request, bound, gate, round_of(ops, bound, gate.site), ledger)
        for bound in gated
        if (gate := bound.op.gate) is not None and not bound.op.silent
    ]


class Evidence:
    """Reads one gate's evidence of one request, after the ops that come before it in the request's list."""

    def __init__(self, request: int, bound: BoundOp, gate: Gate, round_: int, ledger: Ledger) -> None:
        self.site: Site = gate.site
        self.layers = gate.layers
        self.order = (round_, 0)
        self.request, self._bound, self._gate, self._ledger = request, bound, gate, ledger
        self._pool = _Pool(bound, {}, dict.fromkeys(gate.layers, 0), {})
        self._decided = False

    def begin(self, step: StepBatch, device: torch.device, masks: dict[Any, NDArray[np.bool_]]) -> None:
        """Find this prompt's rows in a pass."""
        of_prompt = (step.request == self.request) & (step.position < step.prompt_len)
        mine = np.flatnonzero(of_prompt if step.again is None else of_prompt & ~step.again)
        self._index = torch.as_tensor(step.row[mine]).to(device)
        self._count = len(mine)
        ends = step.position[mine] == step.prompt_len[mine] - 1
        self._ends = bool(ends.any())
        self._prompt_len = int(step.prompt_len[mine[0]]) if len(mine) else 0
        self._last_place = int(np.flatnonzero(ends)[0]) if self._ends else -1

    def read(self, layer: int, stream: Stream) -> None:
        """Add the rows of this pass that stand in `stream` at a layer; decide when the prompt has ended."""
        if not self._count or self._decided:  # decided once, also when a loop without a cache comes by again
            return
        x = stream.take(self._index.to(stream.device)).double()
        pool = self._pool
        pool.sums[layer] = x.sum(0) + pool.sums[layer] if layer in pool.sums else x.sum(0)
        pool.counts[layer] += self._count
        if self._ends:
            pool.last[layer] = x[self._last_place]
            if layer == self._gate.deepest:
                self._decide()

    def _decide(self) -> None:
        gate, pool = self._gate, self._pool
        if any(count != self._prompt_len for count in pool.counts.values()):
            message = f"saw {pool.counts} of the prompt's {self._prompt_len} rows"
            self._ledger.failures[self.request] = f"the gate of op {self._bound.place} {message}"
            decision = False
        else:
            decision = gate.rule.decide([self._readout(layer) for layer in gate.layers])
        self._ledger.decide(self.request, self._bound.place, decision)
        self._decided = True

    def _readout(self, layer: int) -> float:
        """w·x + b, or the cosine of x and d (0 for a row of zeros)."""
        pool, readout = self._pool, self._gate.readout
        x = pool.last[layer] if self._gate.pooling == "last" else pool.sums[layer] / pool.counts[layer]
        read = torch.as_tensor(self._bound.evidence[layer].copy()).to(x.device).double()
        found = x @ read
        if readout.kind == "affine":
            return float(found) + readout.b
        return float(found / (norm(x) * norm(read)).clamp(min=1e-300))
