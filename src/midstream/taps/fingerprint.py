"""The fingerprint that tells two models apart."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final

import torch
from torch import nn

_SAMPLED: Final = 32
_VOLATILE: Final = {"_name_or_path", "transformers_version", "_attn_implementation", "dtype", "torch_dtype"}


def plain_config(config: Any) -> dict[str, Any]:
    """What of a config is the model's own, wherever and however it was loaded."""
    return {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}


def fingerprint_of(config: Any, parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """`sha256:` over the config, parameter names, shapes and dtypes, and sampled weight bytes.

    A weight changed at a place that is not sampled goes unseen; the sample is 32 values spread over each tensor.
    """
    digest = sha256(json.dumps(plain_config(config), sort_keys=True, default=str).encode())
    sampled: dict[torch.device, list[torch.Tensor]] = {}
    for name, parameter in parameters:
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
