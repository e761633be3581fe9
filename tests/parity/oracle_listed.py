"""The listed architectures, block by block, from their modules' weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.oracle_math import (
    Trace,
    angles,
    causal,
    embed,
    experts,
    gated,
    gated_fused,
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


def rope_theta(config: Any) -> float:
    """The rotary base where one holds for all layers."""
    return config.rope_parameters["rope_theta"]


def _llama_blocks(body: Any, config: Any, x: Tensor, trace: Trace, window: int | None = None) -> Tensor:
    size = body.layers[0].self_attn.head_dim
    angle = angles(len(x), size, rope_theta(config))
    for i, block in enumerate(body.layers):
        q, k, v = project(rms(x, block.input_layernorm), block.self_attn, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = trace.attend(i, q, k, v, size**-0.5, causal(len(x), window))
        attn = linear(z, block.self_attn.o_proj)
        mlp = gated(rms(x + attn, block.post_attention_layernorm), block.mlp, silu)
        x = trace.block(i, x, attn, mlp)
    return rms(x, body.norm)


def llama(model: Any, ids: list[int], trace: Trace) -> None:
    """Pre-norm, everything separate."""
    final = _llama_blocks(model.model, model.config, embed(ids, model.model.embed_tokens), trace)
    trace.head(final, model.lm_head)


def mistral(model: Any, ids: list[int], trace: Trace) -> None:
    """Llama with one window for all layers."""
    x = embed(ids, model.model.embed_tokens)
    final = _llama_blocks(model.model, model.config, x, trace, model.config.sliding_window)
    trace.head(final, model.lm_head)


def llava(model: Any, ids: list[int], trace: Trace, pixel_values: Tensor | None = None) -> None:
    """A llama whose image tokens are replaced by projected patches; the tower's own layers are not layers."""
    text = model.model.language_model
    x = embed(ids, text.embed_tokens)
    if pixel_values is not None:
        with torch.no_grad():
            tower = model.model.vision_tower(pixel_values, output_hidden_states=True)
        patches = wide(tower.hidden_states[-1][0, 1:])
        projector = model.model.multi_modal_projector
        x[torch.tensor(ids) == model.config.image_token_index] = two_layer(
            patches, projector.linear_1, projector.linear_2, gelu
        )
    trace.head(_llama_blocks(text, model.config.text_config, x, trace), model.lm_head)


def qwen2(model: Any, ids: list[int], trace: Trace) -> None:
    """Biases come with the projections; the config names the layers that have a window."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    x, angle = embed(ids, body.embed_tokens), angles(len(ids), size, rope_theta(config))
    for i, block in enumerate(body.layers):
        window = config.sliding_window if config.layer_types[i] == "sliding_attention" else None
        q, k, v = project(rms(x, block.input_layernorm), block.self_attn, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = trace.attend(i, q, k, v, size**-0.5, causal(len(ids), window))
        attn = linear(z, block.self_attn.o_proj)
        mlp = gated(rms(x + attn, block.post_attention_layernorm), block.mlp, silu)
        x = trace.block(i, x, attn, mlp)
    trace.head(rms(x, body.norm), model.lm_head)


def _top_softmax(x: Tensor, weight: Tensor, top: int, renormalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits = x @ wide(weight).T
    weights, chosen = torch.softmax(logits, dim=-1).topk(top, dim=-1)
    return logits, chosen, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def _qwen3(model: Any, ids: list[int], trace: Trace) -> None:
    body, config = model.model, model.config
    size = config.head_dim
    x, angle = embed(ids, body.embed_tokens), angles(len(ids), size, rope_theta(config))
    for i, block in enumerate(body.layers):
        a = block.self_attn
        q, k, v = project(rms(x, block.input_layernorm), a, size)
        q, k = rotate_halves(rms(q, a.q_norm), angle), rotate_halves(rms(k, a.k_norm), angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, causal(len(ids))), a.o_proj)
        h = rms(x + attn, block.post_attention_layernorm)
        if hasattr(block.mlp, "experts"):
            logits, chosen, weights = _top_softmax(
                h, block.mlp.gate.weight, config.num_experts_per_tok, config.norm_topk_prob
            )
            trace.put(i, router_logits=logits)
            mlp = experts(h, block.mlp.experts, chosen, weights, silu)
        else:
            mlp = gated(h, block.mlp, silu)
        x = trace.block(i, x, attn, mlp)
    trace.head(rms(x, body.norm), model.lm_head)


def qwen3(model: Any, ids: list[int], trace: Trace) -> None:
    """Heads normed before they rotate."""
    _qwen3(model, ids, trace)


def qwen3_moe(model: Any, ids: list[int], trace: Trace) -> None:
    """The same with experts on the layers that are not in `mlp_only_layers`."""
    _qwen3(model, ids, trace)


def mixtral(model: Any, ids: list[int], trace: Trace) -> None:
    """The weights of the chosen experts are renormalised; the logits are not touched by that."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    x, angle = embed(ids, body.embed_tokens), angles(len(ids), size, rope_theta(config))
    for i, block in enumerate(body.layers):
        q, k, v = project(rms(x, block.input_layernorm), block.self_attn, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = trace.attend(i, q, k, v, size**-0.5, causal(len(ids), config.sliding_window))
        attn = linear(z, block.self_attn.o_proj)
        h = rms(x + attn, block.post_attention_layernorm)
        logits, chosen, weights = _top_softmax(h, block.mlp.gate.weight, config.num_experts_per_tok, True)
        trace.put(i, router_logits=logits)
        x = trace.block(i, x, attn, experts(h, block.mlp.experts, chosen, weights, silu))
    trace.head(rms(x, body.norm), model.lm_head)


def _gemma(model: Any, ids: list[int], trace: Trace, head_norms: bool) -> None:
    body, config = model.model, model.config
    size, tokens = config.head_dim, len(ids)
    x = embed(ids, body.embed_tokens) * config.hidden_size**0.5
    for i, block in enumerate(body.layers):
        a, kind = block.self_attn, config.layer_types[i]
        window = config.sliding_window if kind == "sliding_attention" else None
        theta = config.rope_parameters[kind]["rope_theta"] if head_norms else rope_theta(config)
        q, k, v = project(rms(x, block.input_layernorm, plus_one=True), a, size)
        if head_norms:
            q, k = rms(q, a.q_norm, plus_one=True), rms(k, a.k_norm, plus_one=True)
        angle = angles(tokens, size, theta)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        # gemma3's config has a cap too, and its attention never reads it.
        cap = None if head_norms else config.attn_logit_softcapping
        z = trace.attend(i, q, k, v, config.query_pre_attn_scalar**-0.5, causal(tokens, window), cap=cap)
        attn = rms(linear(z, a.o_proj), block.post_attention_layernorm, plus_one=True)
        h = rms(x + attn, block.pre_feedforward_layernorm, plus_one=True)
        mlp = rms(gated(h, block.mlp, gelu_tanh), block.post_feedforward_layernorm, plus_one=True)
        x = trace.block(i, x, attn, mlp)
    trace.head(rms(x, body.norm, plus_one=True), model.lm_head, cap=config.final_logit_softcapping)


def gemma2(model: Any, ids: list[int], trace: Trace) -> None:
    """What is added is the post-norm's output, not the module's."""
    _gemma(model, ids, trace, head_norms=False)


def gemma3_text(model: Any, ids: list[int], trace: Trace) -> None:
    """Likewise, with normed heads and a rotary base per kind of layer."""
    _gemma(model, ids, trace, head_norms=True)


def gpt2(model: Any, ids: list[int], trace: Trace) -> None:
    """The fused projection is q, then k, then v, each with all heads; nothing rotates."""
    body, config = model.transformer, model.config
    size, tokens = config.n_embd // config.n_head, len(ids)
    x = embed(ids, body.wte) + embed(range(tokens), body.wpe)
    for i, block in enumerate(body.h):
        q, k, v = (heads(p, size) for p in linear(layer_norm(x, block.ln_1), block.attn.c_attn).chunk(3, -1))
        attn = linear(trace.attend(i, q, k, v, size**-0.5, causal(tokens)), block.attn.c_proj)
        mlp = two_layer(layer_norm(x + attn, block.ln_2), block.mlp.c_fc, block.mlp.c_proj, gelu_tanh)
        x = trace.block(i, x, attn, mlp)
    trace.head(layer_norm(x, body.ln_f), model.lm_head)


def gpt_neox(model: Any, ids: list[int], trace: Trace) -> None:
    """The fused projection is by head: each head's q, k and v lie together."""
    body, config = model.gpt_neox, model.config
    size, tokens = config.hidden_size // config.num_attention_heads, len(ids)
    angle = angles(tokens, int(size * config.rope_parameters["partial_rotary_factor"]), rope_theta(config))
    x = embed(ids, body.embed_in)
    for i, block in enumerate(body.layers):
        qkv = heads(linear(layer_norm(x, block.input_layernorm), block.attention.query_key_value), 3 * size)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, causal(tokens)), block.attention.dense)
        reads = x if config.use_parallel_residual else x + attn
        h = layer_norm(reads, block.post_attention_layernorm)
        mlp = two_layer(h, block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h, gelu)
        x = trace.block(i, x, attn, mlp)
    trace.head(layer_norm(x, body.final_layer_norm), model.lm_head)


def phi3(model: Any, ids: list[int], trace: Trace) -> None:
    """The fused projection is all query heads, then the key heads, then the value heads."""
    body, config = model.model, model.config
    size, tokens = config.hidden_size // config.num_attention_heads, len(ids)
    n, m = config.num_attention_heads, config.num_key_value_heads
    angle = angles(tokens, int(size * config.rope_parameters["partial_rotary_factor"]), rope_theta(config))
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        qkv = heads(linear(rms(x, block.input_layernorm), block.self_attn.qkv_proj), size)
        q, k, v = qkv[:, :n], qkv[:, n : n + m], qkv[:, n + m :]
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = trace.attend(i, q, k, v, size**-0.5, causal(tokens, config.sliding_window))
        attn = linear(z, block.self_attn.o_proj)
        mlp = gated_fused(rms(x + attn, block.post_attention_layernorm), block.mlp, silu)
        x = trace.block(i, x, attn, mlp)
    trace.head(rms(x, body.norm), model.lm_head)


def opt(model: Any, ids: list[int], trace: Trace) -> None:
    """The model scales q before its attention; the site is the projection's output, unscaled."""
    body, config = model.model.decoder, model.config
    size, tokens = config.hidden_size // config.num_attention_heads, len(ids)
    # The position table has two unused rows before position 0.
    x = embed(ids, body.embed_tokens) + embed(range(2, 2 + tokens), body.embed_positions)
    for i, block in enumerate(body.layers):
        q, k, v = project(layer_norm(x, block.self_attn_layer_norm), block.self_attn, size)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, causal(tokens)), block.self_attn.out_proj)
        mlp = two_layer(layer_norm(x + attn, block.final_layer_norm), block.fc1, block.fc2, torch.relu)
        x = trace.block(i, x, attn, mlp)
    trace.head(layer_norm(x, body.final_layer_norm), model.lm_head)
