"""When two ways to compute the same rows agree, up to the rounding of their dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from .kinds import norm


def close(a: Tensor, b: Tensor, *parts: Tensor) -> bool:
    """Equal, element by element, up to the rounding of a sum of `parts` (default: of `b` alone) in b's dtype."""
    magnitude = torch.stack([part.double().abs() for part in parts or (b,)]).sum(0)
    # elements that cancelled keep the rounding of what they were computed from: a thousandth of the row's own scale
    bound = 2 * torch.finfo(b.dtype).eps * (magnitude + 1e-3 * magnitude.amax(-1, keepdim=True))
    return a.shape == b.shape and bool(((a.double() - b.double()).abs() <= bound).all())


def close_products(rows: Tensor, logits: Tensor) -> bool:
    """Equal up to the rounding of one matrix product, which a gate may do in another dtype than its weight's."""
    error, scale = norm(rows.double() - logits.double()), norm(logits.double())
    return rows.shape == logits.shape and bool((error <= 16 * torch.finfo(logits.dtype).eps * scale).all())
