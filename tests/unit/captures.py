"""Small captures made by hand, for tests of files; no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream.core.capture import CaptureReceipt, CaptureSpec, Labels
from midstream.core.generation import Completion
from midstream.core.result import CaptureResult
from midstream.core.sites import SiteLayout

PROMPTS = ((11, 12, 13), (11,), (21, 22))
GENERATED = ((31, 32, 33), (34,), ())


def decode(ids: Sequence[int]) -> list[str]:
    return [f"<{token}>" for token in ids]


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Type, shape and every bit, so that NaN equals itself and −0 does not equal 0."""
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.dtype, tuple(tensor.shape), tensor.view(same_size).numpy().tobytes()


def whole_labels() -> Labels:
    """Every row of PROMPTS and GENERATED: all tokens but the last generated one."""
    rows: list[tuple[int, int, int, int, bool]] = []
    for sample, (prompt, tail) in enumerate(zip(PROMPTS, GENERATED, strict=True)):
        for position, token in enumerate([*prompt, *tail[:-1]]):
            later = position >= len(prompt)
            rows.append((sample, 0 if later else -1, position, token, later))
    sample, choice, position, token, later = zip(*rows, strict=True)
    ints = [np.array(column, dtype=np.int64) for column in (sample, choice, position, token)]
    return Labels(*ints, np.array(later, dtype=np.bool_))


def made(
    sites: Sequence[str] = ("resid_post",),
    layers: Sequence[int] = (0, 2),
    dtype: torch.dtype = torch.float32,
    width: int = 4,
    **changes: Any,
) -> CaptureResult:
    """A capture of three prompts (8 rows) with random bits, all kinds of NaN among them."""
    labels = changes.pop("labels") if "labels" in changes else whole_labels()
    generator = torch.Generator().manual_seed(len(sites) * 100 + len(layers))
    size = len(labels) * width * dtype.itemsize
    tensors: dict[Any, Tensor] = {
        (site, layer): torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .reshape(len(labels), width)
        for site in sites
        for layer in layers
    }
    receipt = CaptureReceipt(selected=len(labels), computed=len(labels), overflowed=2)
    fields: dict[str, Any] = {
        "labels": labels,
        "tensors": tensors,
        "layouts": {site: {layer: SiteLayout(width, 2, width // 2) for layer in layers} for site in sites},
        "outputs": tuple(
            Completion(prompt, tail, "text " + "é" * len(tail), "length" if tail else None, receipt)
            for prompt, tail in zip(PROMPTS, GENERATED, strict=True)
        ),
        "receipt": receipt,
        "spec": CaptureSpec(sites=tuple(sites), layers=tuple(layers), select="prompt, generated"),  # pyright: ignore
        "model_ref": "models/tiny",
        "model_fingerprint": "f0f0",
        "decode": decode,
    }
    return CaptureResult(**(fields | changes))


def same(one: CaptureResult, other: CaptureResult) -> bool:
    """Whether two captures agree in everything, bit for bit (errors by their text)."""
    assert list(one.tensors) == list(other.tensors)
    for key, tensor in one.tensors.items():
        assert bits(tensor) == bits(other.tensors[key]), key
    for name in ("labels", "layouts", "receipt", "spec", "model_ref", "model_fingerprint"):
        assert getattr(one, name) == getattr(other, name), name
    assert list(one.layouts) == list(other.layouts)
    assert tuple(one.outputs) == tuple(other.outputs)
    assert {k: str(v) for k, v in one.errors.items()} == {k: str(v) for k, v in other.errors.items()}
    return True
