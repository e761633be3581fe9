"""The true value of every site for the models of `architectures`, computed from their weights by hand.

Nothing is hooked: each family's block is written out in float64, so that the sites are what the arithmetic
says and not what some module happens to return. `test_oracle.py` shows that the arithmetic is the models'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from parity import oracle_listed as listed
from parity import oracle_moe as moe
from parity import oracle_unlisted as unlisted
from parity.oracle_math import Trace

#: Every site, in the order of the contract's table.
SITES = ("resid_pre", "resid_post", "attn_out", "mlp_out", "head_out", "router_logits", "q", "k")

FAMILIES: dict[str, Callable[..., None]] = {
    "llama": listed.llama,
    "mistral": listed.mistral,
    "qwen2": listed.qwen2,
    "qwen3": listed.qwen3,
    "gemma2": listed.gemma2,
    "gemma3_text": listed.gemma3_text,
    "gpt2": listed.gpt2,
    "gpt_neox_parallel": listed.gpt_neox,
    "gpt_neox_sequential": listed.gpt_neox,
    "phi3": listed.phi3,
    "opt": listed.opt,
    "mixtral": listed.mixtral,
    "qwen3_moe": listed.qwen3_moe,
    "llava": listed.llava,
    "granite": unlisted.granite,
    "falcon_new": unlisted.falcon_new,
    "falcon_multi_query": unlisted.falcon_multi_query,
    "falcon_alibi": unlisted.falcon_alibi,
    "bloom": unlisted.bloom,
    "bloom_norm_residual": unlisted.bloom,
    "cohere": unlisted.cohere,
    "olmo2": unlisted.olmo2,
    "stablelm": unlisted.stablelm,
    "phi": unlisted.phi,
    "starcoder2": unlisted.starcoder2,
    "glm4": unlisted.glm4,
    "opt_post_norm": unlisted.opt_post_norm,
    "gpt_neo": unlisted.gpt_neo,
    "mpt": unlisted.mpt,
    "mamba": unlisted.mamba,
    "granitemoe": moe.granitemoe,
    "olmoe": moe.olmoe,
    "deepseek_v3": moe.deepseek_v3,
    "qwen3_next": moe.qwen3_next,
    "gpt_oss": moe.gpt_oss,
    "llama4": moe.llama4,
    "gemma4_moe": moe.gemma4_moe,
}

_DENSE = "no layer has experts"
_NORMED_SUM = "the stream is normed after each addition: resid_pre + attn_out + mlp_out is not resid_post"
_LATENT = "latent attention: refused unless a check on the model at hand shows it right"
_NO_ATTENTION = "the block has one mixer, which is neither attention nor an MLP"
_CROSS = "cross attention adds to the stream as well: resid_pre + attn_out + mlp_out is not resid_post"
_ENCODER = "encoder and cross attention are in play: refused unless a check shows it right"
_STREAMS = "a block reads and leaves several streams, not rows of the hidden size"
_SCALED = "the whole stream is multiplied as the block ends: resid_pre + attn_out + mlp_out is not resid_post"

#: Sites that no layer of an architecture has, and why. Sites that some layers lack are in PARTIAL.
REFUSED: dict[str, dict[str, str]] = {
    **{name: {} for name in ("mixtral", "qwen3_moe", "granitemoe", "olmoe", "qwen3_next", "gpt_oss", "llama4")},
    **{
        name: {"router_logits": _DENSE}
        for name in (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma2",
            "gemma3_text",
            "gpt2",
            "gpt_neox_parallel",
            "gpt_neox_sequential",
            "phi3",
            "opt",
            "llava",
            "granite",
            "falcon_new",
            "falcon_multi_query",
            "falcon_alibi",
            "bloom",
            "cohere",
            "olmo2",
            "stablelm",
            "phi",
            "starcoder2",
            "glm4",
            "gpt_neo",
            "mpt",
        )
    },
    "opt_post_norm": {"attn_out": _NORMED_SUM, "mlp_out": _NORMED_SUM, "router_logits": _DENSE},
    "bloom_norm_residual": {"attn_out": _NORMED_SUM, "mlp_out": _NORMED_SUM, "router_logits": _DENSE},
    "deepseek_v3": dict.fromkeys(("head_out", "q", "k"), _LATENT),
    "gemma4_moe": {"attn_out": _SCALED, "mlp_out": _SCALED},
    "mamba": {
        **dict.fromkeys(("attn_out", "mlp_out", "head_out", "q", "k"), _NO_ATTENTION),
        "router_logits": _DENSE,
    },
    "t5": {
        "attn_out": _CROSS,
        "mlp_out": _CROSS,
        **dict.fromkeys(("head_out", "q", "k"), _ENCODER),
        "router_logits": _DENSE,
    },
    "gemma3n": {
        **dict.fromkeys(("resid_pre", "resid_post", "attn_out", "mlp_out"), _STREAMS),
        "router_logits": _DENSE,
    },
}

#: Sites that only some layers have, with those layers.
PARTIAL: dict[str, dict[str, list[int]]] = {
    "qwen3_moe": {"router_logits": [0, 2, 3]},
    "deepseek_v3": {"router_logits": [1, 2]},
    "llama4": {"router_logits": [1, 3]},
    "qwen3_next": {"router_logits": [0, 1, 2], "head_out": [1, 3], "q": [1, 3], "k": [1, 3]},
}


def trace(name: str, model: PreTrainedModel, input_ids: list[int], **extra_inputs: Any) -> Trace:
    """All that a model computes for one prompt, in float64, sites that are to be refused included."""
    record = Trace()
    FAMILIES[name](model, list(input_ids), record, **extra_inputs)
    _check(record)
    return record


def expected(
    name: str, model: PreTrainedModel, input_ids: list[int], **extra_inputs: Any
) -> dict[tuple[str, int], Tensor]:
    """The value of every site that is not refused, by (site, layer): float32, [tokens, width]."""
    sites = trace(name, model, input_ids, **extra_inputs).sites
    return {key: value.float() for key, value in sites.items() if key[0] not in REFUSED[name]}


def _check(record: Trace) -> None:
    """The sum rule, and the stream going from each block to the next as it is."""
    layers = sorted({layer for _, layer in record.sites})
    for layer in layers:
        pre, post = record.sites["resid_pre", layer], record.sites["resid_post", layer]
        if ("attn_out", layer) in record.sites:
            total = pre + record.sites["attn_out", layer] + record.sites["mlp_out", layer]
            assert (total - post).abs().max() < 1e-12, f"layer {layer} is not the sum of its parts"
        if layer + 1 in layers:
            assert (record.sites["resid_pre", layer + 1] == post).all(), f"layer {layer + 1} reads another stream"
