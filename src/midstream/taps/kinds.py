"""Steering on rows: one pure function per kind, each with its twin in reference.py.

x is `[rows, width]` in float32. A vector or a number is one for all rows, or one per row: `[rows, width]`, `[rows, 1]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, sin

import torch
from torch import Tensor


def add(x: Tensor, vector: Tensor, strength: Tensor) -> Tensor:
    """x + s·v."""
    return x + strength * vector


def add_matched(x: Tensor, vector: Tensor, strength: Tensor) -> Tensor:
    """x + s·‖x‖·v/‖v‖."""
    return x + strength * norm(x) * vector / norm(vector)


def replace(x: Tensor, vector: Tensor, strength: Tensor) -> Tensor:
    """(1−s)·x + s·v; at strength 1 exactly v."""
    return torch.where(strength == 1, vector, (1 - strength) * x + strength * vector)


def ablate(x: Tensor, basis: Tensor, strength: Tensor) -> Tensor:
    """x − s·Σ(x·dᵢ)dᵢ over an orthonormal basis `[K, width]`."""
    return x - strength * (x @ basis.T) @ basis


def ablate_one(x: Tensor, unit: Tensor, strength: Tensor) -> Tensor:
    """x − s·(x·d)d: one unit vector, which may differ from row to row."""
    return x - strength * (x * unit).sum(-1, keepdim=True) * unit


def clamp(x: Tensor, unit: Tensor, value: Tensor) -> Tensor:
    """x + (c − x·d̂)d̂."""
    return x + (value - (x * unit).sum(-1, keepdim=True)) * unit


def rotate(x: Tensor, basis: Tensor, angle: float, mode: str) -> Tensor:
    """The part of x in the plane of the orthonormal basis `[2, width]` turned to `angle`, or by it."""
    c = x @ basis.T
    if mode == "to":
        turn = torch.tensor([cos(angle), sin(angle)], dtype=x.dtype, device=x.device)
        turned = norm(c) * turn
    else:
        by = [[cos(angle), sin(angle)], [-sin(angle), cos(angle)]]
        turned = c @ torch.tensor(by, dtype=x.dtype, device=x.device)
    return x + (turned - c) @ basis


def affine(x: Tensor, matrix: Tensor, bias: Tensor, strength: Tensor) -> Tensor:
    """x + s·(xAᵀ + b − x)."""
    return x + strength * (x @ matrix.T + bias - x)


def low_rank(x: Tensor, P: Tensor, Q: Tensor, bias: Tensor, strength: Tensor) -> Tensor:
    """x + s·(xPᵀ + b)Qᵀ."""
    return x + strength * (x @ P.T + bias) @ Q.T


def router(x: Tensor, on: Sequence[int], off: Sequence[int], shift: Sequence[tuple[int, float]]) -> Tensor:
    """Experts' logits: shifted by s·std of the row, on at its largest + 0.01, off at its smallest − 0.01.

    Logits differ from log-probabilities by one number per row, so the same is done to both.
    """
    out = x.clone()
    for expert, by in shift:
        out[:, expert] = x[:, expert] + by * x.std(-1, correction=0)
    out[:, list(on)] = x.amax(-1, keepdim=True) + 0.01
    out[:, list(off)] = x.amin(-1, keepdim=True) - 0.01
    return out


# --- modifiers


def capped(before: Tensor, after: Tensor) -> Tensor:
    """Rows whose norm grew, scaled back to the norm that they had."""
    was, now = norm(before), norm(after)
    return torch.where(now > was, after * (was / now), after)


def aligned(x: Tensor, unit: Tensor, measure: str, above: Tensor) -> Tensor:
    """Which rows have a cosine with, or a projection on, the unit vector above a number, `[rows, 1]`."""
    found = (x * unit).sum(-1, keepdim=True)
    return (found / norm(x) if measure == "cosine" else found) > above


def norm(x: Tensor) -> Tensor:
    """‖x‖ of each row, `[rows, 1]`."""
    return (x * x).sum(-1, keepdim=True).sqrt()
