"""Helpers to make tiny random models whose errors show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

#: Keyword arguments that nearly every decoder config takes.
BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

#: Standard deviation that weight matrices are scaled up to. With transformers' 0.02 the attention of a model
#: of width 64 is uniform and its branches vanish beside the stream, so that a wrong rotary embedding, a wrong
#: mask or a dropped multiplier would pass unseen.
MATRIX_STD = 0.15
#: Noise put on what starts constant (norm weights of one, biases of zero, scalars of one).
CONSTANT_NOISE = 0.2


def base(**changes: Any) -> dict[str, Any]:
    """The common config arguments with some of them changed; a value of None drops the argument."""
    merged = {**BASE, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def build(make: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """The model of `make` in float32 and eval mode, with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().float().eval()
        _settle(model)
    return model


@torch.no_grad()
def _settle(model: PreTrainedModel) -> None:
    """Perturb every constant parameter and scale up the weight matrices, in place (ties are kept)."""
    saved = set(model.state_dict())
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    for _, tensor in [*model.named_parameters(), *buffers]:
        if not tensor.is_floating_point():
            continue
        if bool(tensor.min() == tensor.max()):
            tensor.add_(CONSTANT_NOISE * torch.randn_like(tensor))
        elif tensor.ndim >= 2 and tensor.std() < MATRIX_STD:
            tensor.mul_(MATRIX_STD / tensor.std())
