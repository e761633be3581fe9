"""A steered forward of one sequence, written out in float64 from a model's weights, with no cache and no hooks.

Each block names its sites where they arise, and what the next step reads is what the ops left there. The library is
not used: `intervention_oracle` says what an op does to rows, `oracle_math` what a norm or an attention is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.intervention_oracle import Array, Op, gate_opens, site_of, steered_rows
from parity.oracle_math import (
    Trace,
    angles,
    causal,
    embed,
    experts,
    gated,
    gelu,
    gelu_tanh,
    heads,
    layer_norm,
    linear,
    project,
    rms,
    rotate_halves,
    silu,
    two_layer,
    wide,
)

#: The sites at which ops act.
STEERABLE = ("resid_pre", "resid_post", "attn_out", "mlp_out", "head_out", "router_logits")


@dataclass
class Steered:
    """What a steered sequence gives: rows of tokens consumed, the logits after each, and the gates' decisions."""

    token_ids: list[int]
    prompt_len: int
    sites: dict[tuple[str, int], Array] = field(default_factory=dict)
    logits: Array = field(default_factory=lambda: np.zeros((0, 0)))
    gates: dict[int, bool] = field(default_factory=dict)
    generated: list[int] = field(default_factory=list)


class Stream:
    """The ops, applied to the rows of each site as the forward comes to it."""

    def __init__(self, ids: Sequence[int], prompt_len: int, ops: Sequence[Op], gates: Mapping[int, bool]):
        self.ids, self.prompt_len, self.ops = list(ids), prompt_len, list(ops)
        self.gates = dict(gates)
        self.evidence: dict[int, dict[int, Array]] = {i: {} for i, op in enumerate(self.ops) if op.get("gate")}
        self.sites: dict[tuple[str, int], Array] = {}
        self.attention = Trace()

    def at(self, site: str, layer: int, value: Tensor) -> Tensor:
        """The rows of a site after the ops that act there; they are also what the site's capture holds."""
        rows = value.numpy().copy()
        for i, op in enumerate(self.ops):
            if i in self.evidence:
                self._read(i, op["gate"], site, layer, rows)
            if site_of(op) == site:
                opened = i not in self.evidence or self.gates.get(i, False)
                rows = steered_rows(op, rows, range(len(rows)), self.ids, self.prompt_len, layer, opened)
        self.sites[site, layer] = rows
        return torch.from_numpy(rows.copy())

    def _read(self, i: int, gate: Mapping[str, Any], site: str, layer: int, rows: Array) -> None:
        """Take evidence for a gate, after the ops before its own; decide once there is some from each layer."""
        layers = gate["layers"]
        if i in self.gates or site != (gate.get("site") or "resid_post") or not (layers is None or layer in layers):
            return
        self.evidence[i][layer] = rows[: self.prompt_len].copy()
        if layers is not None and set(self.evidence[i]) == set(layers):
            self.gates[i] = gate_opens(gate, self.evidence[i])

    def finish(self) -> None:
        """Decide the gates that read all layers, which no prompt row could have waited for."""
        for i, evidence in self.evidence.items():
            if i not in self.gates:
                self.gates[i] = gate_opens(self.ops[i]["gate"], evidence)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, **options: Any) -> Tensor:
        """The heads' values, steered, as the output projection reads them."""
        return self.at("head_out", layer, self.attention.attend(layer, q, k, v, scale, seen, **options))


def steered_forward(
    name: str, model: Any, prompt: Sequence[int], generated: Sequence[int] = (), ops: Sequence[Op] = ()
) -> Steered:
    """All rows of a prompt and of the generated (or reference) tokens after it, consumed in one pass."""
    gates: Mapping[int, bool] = {}
    if generated and any(op.get("gate") for op in ops):
        # A gate acts on generated rows in layers before its evidence too; the prompt decides it and sees none of them.
        gates = steered_forward(name, model, prompt, (), ops).gates
    ids = [*prompt, *generated]
    stream = Stream(ids, len(prompt), ops, gates)
    with torch.no_grad():
        logits = FAMILIES[name](model, ids, stream)
    stream.finish()
    sites = dict(stream.sites)
    sites |= {key: value.numpy() for key, value in stream.attention.sites.items() if key[0] in ("q", "k")}
    return Steered(ids, len(prompt), sites, logits.numpy(), stream.gates)


def steered_greedy(
    name: str,
    model: Any,
    prompt: Sequence[int],
    max_tokens: int,
    ops: Sequence[Op] = (),
    stop_ids: Sequence[int] = (),
) -> Steered:
    """At least one greedy token, each from a forward of all before it; the rows are what the last forward consumed."""
    assert max_tokens > 0
    generated: list[int] = []
    while True:
        step = steered_forward(name, model, prompt, generated, ops)
        generated.append(int(step.logits[-1].argmax()))
        if len(generated) == max_tokens or generated[-1] in stop_ids:
            step.generated = generated
            return step


def steered_scores(
    name: str, model: Any, prompt: Sequence[int], reference: Sequence[int], ops: Sequence[Op] = ()
) -> Array:
    """Log-probability of each reference token after the prompt and the reference tokens before it."""
    if not reference:
        return np.zeros(0)
    logits = steered_forward(name, model, prompt, reference[:-1], ops).logits[len(prompt) - 1 :]
    largest = logits.max(axis=1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    return logprobs[range(len(reference)), list(reference)]


# --- the families


def _window(config: Any, layer: int) -> int | None:
    """How many rows attention sees at a layer, itself counted; None is all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _mixture(h: Tensor, layer: int, mlp: Any, config: Any, renormalise: bool, stream: Stream) -> Tensor:
    """Experts chosen from the steered logits."""
    logits = stream.at("router_logits", layer, h @ wide(mlp.gate.weight).T)
    weights, chosen = torch.softmax(logits, dim=-1).topk(config.num_experts_per_tok, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts(h, mlp.experts, chosen, weights, silu)


def _llama_like(model: Any, ids: list[int], stream: Stream) -> Tensor:
    """Pre-norm, one sublayer after the other; head norms, a residual multiplier and experts where there are any."""
    body, config = model.model, model.config
    size = body.layers[0].self_attn.head_dim
    angle = angles(len(ids), size, config.rope_parameters["rope_theta"])
    scale, added = getattr(config, "attention_multiplier", size**-0.5), getattr(config, "residual_multiplier", 1.0)
    renormalise = getattr(config, "norm_topk_prob", True)
    x = embed(ids, body.embed_tokens) * getattr(config, "embedding_multiplier", 1.0)
    for i, block in enumerate(body.layers):
        x = stream.at("resid_pre", i, x)
        q, k, v = project(rms(x, block.input_layernorm), block.self_attn, size)
        if hasattr(block.self_attn, "q_norm"):
            q, k = rms(q, block.self_attn.q_norm), rms(k, block.self_attn.k_norm)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = stream.attend(i, q, k, v, scale, causal(len(ids), _window(config, i)))
        x = x + stream.at("attn_out", i, linear(z, block.self_attn.o_proj) * added)
        h = rms(x, block.post_attention_layernorm)
        if hasattr(block.mlp, "experts"):
            mlp = _mixture(h, i, block.mlp, config, renormalise, stream)
        else:
            mlp = gated(h, block.mlp, silu)
        x = stream.at("resid_post", i, x + stream.at("mlp_out", i, mlp * added))
    return linear(rms(x, body.norm), model.lm_head) / getattr(config, "logits_scaling", 1.0)


def _gemma2(model: Any, ids: list[int], stream: Stream) -> Tensor:
    """A norm before each sublayer and one after it: what is added is the second norm's output."""
    body, config = model.model, model.config
    size, cap = config.head_dim, config.final_logit_softcapping
    angle = angles(len(ids), size, config.rope_parameters["rope_theta"])
    x = embed(ids, body.embed_tokens) * config.hidden_size**0.5
    for i, block in enumerate(body.layers):
        x = stream.at("resid_pre", i, x)
        q, k, v = project(rms(x, block.input_layernorm, plus_one=True), block.self_attn, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        seen, scale = causal(len(ids), _window(config, i)), config.query_pre_attn_scalar**-0.5
        z = stream.attend(i, q, k, v, scale, seen, cap=config.attn_logit_softcapping)
        attn = rms(linear(z, block.self_attn.o_proj), block.post_attention_layernorm, plus_one=True)
        x = x + stream.at("attn_out", i, attn)
        inner = gated(rms(x, block.pre_feedforward_layernorm, plus_one=True), block.mlp, gelu_tanh)
        mlp = rms(inner, block.post_feedforward_layernorm, plus_one=True)
        x = stream.at("resid_post", i, x + stream.at("mlp_out", i, mlp))
    return cap * torch.tanh(linear(rms(x, body.norm, plus_one=True), model.lm_head) / cap)


def _gpt2(model: Any, ids: list[int], stream: Stream) -> Tensor:
    """Learned positions; one matrix gives q, k and v."""
    body, config = model.transformer, model.config
    size = config.n_embd // config.n_head
    x = embed(ids, body.wte) + embed(range(len(ids)), body.wpe)
    for i, block in enumerate(body.h):
        x = stream.at("resid_pre", i, x)
        q, k, v = (heads(part, size) for part in linear(layer_norm(x, block.ln_1), block.attn.c_attn).chunk(3, -1))
        z = stream.attend(i, q, k, v, size**-0.5, causal(len(ids)))
        x = x + stream.at("attn_out", i, linear(z, block.attn.c_proj))
        mlp = two_layer(layer_norm(x, block.ln_2), block.mlp.c_fc, block.mlp.c_proj, gelu_tanh)
        x = stream.at("resid_post", i, x + stream.at("mlp_out", i, mlp))
    return linear(layer_norm(x, body.ln_f), model.lm_head)


def _gpt_neox(model: Any, ids: list[int], stream: Stream) -> Tensor:
    """With the parallel residual the MLP reads the block's input, and so nothing that is done to attn_out."""
    body, config = model.gpt_neox, model.config
    size = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    angle = angles(len(ids), int(size * rope["partial_rotary_factor"]), rope["rope_theta"])
    x = embed(ids, body.embed_in)
    for i, block in enumerate(body.layers):
        x = stream.at("resid_pre", i, x)
        qkv = heads(linear(layer_norm(x, block.input_layernorm), block.attention.query_key_value), 3 * size)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = stream.attend(i, q, k, v, size**-0.5, causal(len(ids)))
        attn = stream.at("attn_out", i, linear(z, block.attention.dense))
        h = layer_norm(x if config.use_parallel_residual else x + attn, block.post_attention_layernorm)
        mlp = stream.at("mlp_out", i, two_layer(h, block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h, gelu))
        x = stream.at("resid_post", i, x + attn + mlp)
    return linear(layer_norm(x, body.final_layer_norm), model.lm_head)


#: The models of `architectures` that can be steered here.
FAMILIES: dict[str, Callable[[Any, list[int], Stream], Tensor]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "mixtral", "qwen3_moe"), _llama_like),
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neox_parallel": _gpt_neox,
    "gpt_neox_sequential": _gpt_neox,
}
