"""The twin of kinds.py: every kind row by row in float64, as the formulas of docs/semantics.md are written.

x is one row `[width]`; d, v, b are as the user gave them, neither unit nor orthonormal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, pi, sin, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.core.errors import SpecError
from midstream.core.gates import Gate
from midstream.core.interventions import InterventionSpec, acts_on
from midstream.core.op import Op
from midstream.core.ops import Ablate, Add, Affine, Clamp, LowRank, Replace, Rotate, Router
from midstream.core.sites import Site, SiteLayout

from .step import StepBatch

Row = NDArray[np.float64]


def add(x: Row, v: Row, s: float) -> Row:
    """x + s·v."""
    return x + s * v


def add_matched(x: Row, v: Row, s: float) -> Row:
    """x + s·‖x‖·v/‖v‖."""
    return x + s * length(x) * v / length(v)


def replace(x: Row, v: Row, s: float) -> Row:
    """(1−s)·x + s·v."""
    return (1 - s) * x + s * v


def ablate(x: Row, d: NDArray[np.float64], s: float) -> Row:
    """x − s·Σᵢ(x·dᵢ)dᵢ over the directions orthonormalised by Gram and Schmidt, dependent ones left out."""
    basis: list[Row] = []
    for direction in d:
        rest = direction / length(direction)
        for _ in range(2):  # twice is enough, as Kahan says
            for have in basis:
                rest = rest - (rest @ have) * have
        if length(rest) > 1e-6:
            basis.append(rest / length(rest))
    return x - s * sum((x @ one) * one for one in basis)


def clamp(x: Row, d: Row, c: float) -> Row:
    """x + (c − x·d̂)d̂."""
    unit = d / length(d)
    return x + (c - x @ unit) * unit


def rotate(x: Row, b: NDArray[np.float64], angle: float, mode: str) -> Row:
    """In the plane of b: ‖c‖(cos θ, sin θ) (`to`), or c turned by θ (`by`)."""
    e1 = b[0] / length(b[0])
    e2 = b[1] - (b[1] @ e1) * e1
    e2 = e2 / length(e2)
    c1, c2 = float(x @ e1), float(x @ e2)
    size = sqrt(c1 * c1 + c2 * c2)
    theta = angle if mode == "to" else angle + (np.arctan2(c2, c1) if size else pi)
    return x - c1 * e1 - c2 * e2 + size * cos(theta) * e1 + size * sin(theta) * e2


def affine(x: Row, a: NDArray[np.float64], b: Row, s: float) -> Row:
    """x + s·(xAᵀ + b − x)."""
    return x + s * (a @ x + b - x)


def low_rank(x: Row, p: NDArray[np.float64], q: NDArray[np.float64], b: Row, s: float) -> Row:
    """x + s·(xPᵀ + b)Qᵀ."""
    return x + s * (q @ (p @ x + b))


def router(x: Row, on: Sequence[int], off: Sequence[int], shift: Sequence[tuple[int, float]]) -> Row:
    """Off at the smallest − 0.01, else on at the largest + 0.01, else shifted by s·std."""
    mean = sum(x) / len(x)
    std = sqrt(sum((value - mean) ** 2 for value in x) / len(x))
    by = dict(shift)
    out = [max(x) + 0.01 if expert in on else value + by.get(expert, 0.0) * std for expert, value in enumerate(x)]
    return np.array([min(x) - 0.01 if expert in off else value for expert, value in enumerate(out)])


def length(x: Row) -> float:
    """‖x‖."""
    return sqrt(float(x @ x))


# --- one op on one row


def changed(op: Op, layer: int, position: int, x: Row) -> Row:
    """One row after one op, its modifiers included."""
    out = _by_kind(op, layer, position, x)
    aligned = getattr(op, "only_aligned", None)
    if aligned is not None:
        d = _direction(op, layer, position)
        projection = float(x @ d) / length(d)
        measured = projection if aligned.measure == "projection" else projection / length(x)
        if not measured > aligned.above:
            return x
    if getattr(op, "cap_norm", False) and length(out) > length(x):
        out = out * (length(x) / length(out))
    return out


def _by_kind(op: Op, layer: int, position: int, x: Row) -> Row:
    given = {name: op.of_layer(name, layer).astype(np.float64) for name in op.tensors()}
    if isinstance(op, Add):
        return (add_matched if op.norm_match else add)(x, _direction(op, layer, position), op.strength)
    if isinstance(op, Replace):
        return replace(x, _direction(op, layer, position), op.strength)
    if isinstance(op, Ablate):
        return ablate(x, given["directions"], op.strength)
    if isinstance(op, Clamp):
        return clamp(x, given["direction"], op.value)
    if isinstance(op, Rotate):
        return rotate(x, given["basis"], op.angle, op.mode)
    if isinstance(op, Affine):
        return affine(x, given["matrix"], given.get("bias", np.zeros(len(x))), op.strength)
    if isinstance(op, LowRank):
        return low_rank(x, given["P"], given["Q"], given.get("bias", np.zeros(len(given["P"]))), op.strength)
    if isinstance(op, Router):
        return router(x, op.on, op.off, op.shift)
    raise SpecError("E_UNKNOWN_KIND", "kind", f"the reference has no {op.kind}")


def _direction(op: Op, layer: int, position: int) -> Row:
    name = next(iter(op.ranks))
    array = op.of_layer(name, layer).astype(np.float64)
    if isinstance(op, Add | Replace) and op.positions is not None:
        return array[op.positions.index(position)]
    return array[0] if isinstance(op, Ablate) else array


# --- all ops on all rows of one sequence


class ReferenceSteering:
    """A spec on one sequence, in one pass over all of it: what the gates decided is known beforehand.

    decisions: op's place → whether its gate is open. evidence: filled in as the pass goes, `(op, layer)` → rows.
    """

    def __init__(self, spec: InterventionSpec, rows: StepBatch, decisions: dict[int, bool]) -> None:
        self.spec, self.rows, self.decisions = spec, rows, decisions
        self.evidence: dict[tuple[int, int], NDArray[np.float64]] = {}

    @property
    def places(self) -> set[tuple[Site, int]]:
        """Every site and layer at which something is changed or read."""
        at: list[Op | Gate] = [*self.spec.ops, *(op.gate for op in self.spec.ops if op.gate)]
        return {(one.site, layer) for one in at for layer in one.layers}

    def steer(self, site: Site, layer: int, values: NDArray[np.float64], layout: SiteLayout) -> NDArray[np.float64]:
        """The rows `[tokens, width]` of one site and layer after every op, in order."""
        out = values.copy()
        for place, op in enumerate(self.spec.ops):
            if op.gate and op.gate.site == site and layer in op.gate.layers:
                self.evidence[place, layer] = out[self.rows.position < self.rows.prompt_len].copy()
            if op.site != site or layer not in op.layers or op.silent:
                continue
            if op.gate and not self.decisions.get(place):
                continue
            for row in np.flatnonzero(acts_on(op, self.rows, layer)):
                columns = _columns(op, layout)
                out[row, columns] = changed(op, layer, int(self.rows.position[row]), out[row, columns])
        return out

    def decide(self) -> dict[int, bool]:
        """What each gate decides of the evidence that a pass over the prompt has left."""
        return {
            place: decided(op.gate, {layer: self.evidence[place, layer] for layer in op.gate.layers})
            for place, op in enumerate(self.spec.ops)
            if op.gate
        }


def decided(gate: Gate, evidence: dict[int, NDArray[np.float64]]) -> bool:
    """A gate's decision of its evidence, layer → the prompt's rows `[prompt tokens, width]`."""
    pool: Callable[[Any], Any] = (lambda rows: rows[-1]) if gate.pooling == "last" else (lambda rows: rows.mean(0))
    read = gate.readout.tensor.array
    assert read is not None, "the reference takes tensors, not ids"
    readouts: list[float] = []
    for place, layer in enumerate(gate.layers):
        x, w = pool(evidence[layer]), (read[place] if read.ndim == 2 else read).astype(np.float64)
        if gate.readout.kind == "affine":
            readouts.append(float(x @ w) + gate.readout.b)
        else:
            readouts.append(float(x @ w) / (length(x) * length(w)) if x.any() else 0.0)
    return gate.rule.decide(readouts)


def _columns(op: Op, layout: SiteLayout) -> list[int]:
    heads = getattr(op, "heads", None)
    if heads is None:
        return list(range(layout.width))
    size = layout.head_size or 0
    return [head * size + place for head in heads for place in range(size)]
