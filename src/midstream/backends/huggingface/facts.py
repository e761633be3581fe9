"""ModelFacts of a transformers model, and the fingerprint that tells two models apart."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import torch

from midstream.core.backend import ModelFacts
from midstream.taps.locate import text_config

_SAMPLED = 32
_VOLATILE = {"_name_or_path", "transformers_version", "_attn_implementation", "dtype", "torch_dtype"}


def model_facts(model: Any, model_ref: str) -> ModelFacts:
    """The facts of `model`, from its text config; a multimodal wrapper keeps its own model_type."""
    config = text_config(model)
    heads = config.num_attention_heads if hasattr(config, "num_attention_heads") else 1
    head_dim = vars(config).get("head_dim") or config.hidden_size // heads  # a config may refuse per-layer reads
    return ModelFacts(
        model_ref=model_ref,
        model_type=model.config.model_type,
        model_fingerprint=fingerprint(model),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        head_dim=head_dim,
        dtype=compute_dtype(model),
        context_length=context_length(model),
    )


def compute_dtype(model: Any) -> str:
    """The dtype that the model computes in: of its first floating parameter, else its config's.

    A quantised model's first parameter may hold packed integers.
    """
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return str(floating or text_config(model).dtype or torch.float32).removeprefix("torch.")


def context_length(model: Any) -> int | None:
    """How many positions the model has; None where its config sets no bound."""
    length = getattr(text_config(model), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def fingerprint(model: Any) -> str:
    """`sha256:` over the config, parameter names, shapes and dtypes, and sampled weight bytes.

    A weight changed at a place that is not sampled goes unseen; the sample is 32 values spread over each tensor.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    digest = sha256(json.dumps(config, sort_keys=True, default=str).encode())
    sampled: dict[torch.device, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        if flat.device.type == "meta" or not flat.numel():
            continue
        places = torch.linspace(0, flat.numel() - 1, min(_SAMPLED, flat.numel()), dtype=torch.float64).long()
        picked = flat[places.to(flat.device)].contiguous()
        sampled.setdefault(flat.device, []).append(picked.view(torch.uint8))
    for parts in sampled.values():  # one copy per device
        digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"
