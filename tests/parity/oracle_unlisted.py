"""Architectures without experts that the library does not list, block by block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.oracle_listed import rope_theta
from parity.oracle_math import (
    Trace,
    alibi,
    angles,
    causal,
    embed,
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
    rotate_pairs,
    silu,
    two_layer,
    wide,
)


def granite(model: Any, ids: list[int], trace: Trace) -> None:
    """What is added is the module's output times the residual multiplier."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    angle, seen = angles(len(ids), size, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.embed_tokens) * config.embedding_multiplier
    for i, block in enumerate(body.layers):
        q, k, v = project(rms(x, block.input_layernorm), block.self_attn, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = trace.attend(i, q, k, v, config.attention_multiplier, seen)
        attn = linear(z, block.self_attn.o_proj) * config.residual_multiplier
        mlp = gated(rms(x + attn, block.post_attention_layernorm), block.mlp, silu)
        x = trace.block(i, x, attn, mlp * config.residual_multiplier)
    trace.head(rms(x, body.norm), model.lm_head, scale=1 / config.logits_scaling)


def _falcon_mlp(h: Tensor, block: Any) -> Tensor:
    return two_layer(h, block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h, gelu)


def falcon_new(model: Any, ids: list[int], trace: Trace) -> None:
    """The fused projection is by key-value head: its query heads, its key, its value."""
    body, config = model.transformer, model.config
    size, groups = config.hidden_size // config.num_attention_heads, config.num_kv_heads
    angle, seen = angles(len(ids), size, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.word_embeddings)
    for i, block in enumerate(body.h):
        qkv = linear(layer_norm(x, block.ln_attn), block.self_attention.query_key_value)
        qkv = qkv.view(len(ids), groups, -1, size)
        q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), block.self_attention.dense)
        x = trace.block(i, x, attn, _falcon_mlp(layer_norm(x, block.ln_mlp), block))
    trace.head(layer_norm(x, body.ln_f), model.lm_head)


def falcon_multi_query(model: Any, ids: list[int], trace: Trace) -> None:
    """The fused projection is all query heads, one key, one value."""
    body, config = model.transformer, model.config
    size = config.hidden_size // config.num_attention_heads
    angle, seen = angles(len(ids), size, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.word_embeddings)
    for i, block in enumerate(body.h):
        h = layer_norm(x, block.input_layernorm)
        qkv = heads(linear(h, block.self_attention.query_key_value), size)
        q, k, v = qkv[:, :-2], qkv[:, -2:-1], qkv[:, -1:]
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), block.self_attention.dense)
        x = trace.block(i, x, attn, _falcon_mlp(h, block))
    trace.head(layer_norm(x, body.ln_f), model.lm_head)


def _slopes(n_heads: int) -> Tensor:
    # Powers of two heads only, as in the models here.
    return torch.pow(2.0, -8 * torch.arange(1, n_heads + 1) / n_heads)


def falcon_alibi(model: Any, ids: list[int], trace: Trace) -> None:
    """The bias is scaled with the scores; by head, as in GPT-NeoX, the fused projection holds q, k, v.

    This is what the model's default attention computes. Its eager path adds the bias twice: once to the
    scores and once through the mask.
    """
    body, config = model.transformer, model.config
    size = config.hidden_size // config.num_attention_heads
    bias, seen = alibi(len(ids), _slopes(config.num_attention_heads)) * size**-0.5, causal(len(ids))
    x = embed(ids, body.word_embeddings)
    for i, block in enumerate(body.h):
        qkv = linear(layer_norm(x, block.input_layernorm), block.self_attention.query_key_value)
        q, k, v = heads(qkv, 3 * size).chunk(3, dim=-1)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen, bias=bias), block.self_attention.dense)
        x = trace.block(i, x, attn, _falcon_mlp(layer_norm(x + attn, block.post_attention_layernorm), block))
    trace.head(layer_norm(x, body.ln_f), model.lm_head)


def bloom(model: Any, ids: list[int], trace: Trace) -> None:
    """What is added is the dense layers' output; the modules return the stream with it.

    With the residual taken from the norms the stream is no running sum, and neither branch is a site.
    """
    body, config = model.transformer, model.config
    size = config.hidden_size // config.n_head
    bias, seen = alibi(len(ids), _slopes(config.n_head)), causal(len(ids))
    x = layer_norm(embed(ids, body.word_embeddings), body.word_embeddings_layernorm)
    for i, block in enumerate(body.h):
        h = layer_norm(x, block.input_layernorm)
        q, k, v = heads(linear(h, block.self_attention.query_key_value), 3 * size).chunk(3, dim=-1)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen, bias=bias), block.self_attention.dense)
        normed = config.apply_residual_connection_post_layernorm
        middle = attn + (h if normed else x)
        h = layer_norm(middle, block.post_attention_layernorm)
        mlp = two_layer(h, block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h, gelu_tanh)
        if normed:
            trace.put(i, resid_pre=x, resid_post=h + mlp)
            x = h + mlp
        else:
            x = trace.block(i, x, attn, mlp)
    trace.head(layer_norm(x, body.ln_f), model.lm_head)


def cohere(model: Any, ids: list[int], trace: Trace) -> None:
    """One norm feeds both branches; neighbouring dimensions rotate together."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    angle, seen = angles(len(ids), size, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        h, a = layer_norm(x, block.input_layernorm), block.self_attn
        q, k, v = project(h, a, size)
        q, k = rotate_pairs(layer_norm(q, a.q_norm), angle), rotate_pairs(layer_norm(k, a.k_norm), angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), a.o_proj)
        x = trace.block(i, x, attn, gated(h, block.mlp, silu))
    trace.head(layer_norm(x, body.norm), model.lm_head, scale=config.logit_scale)


def olmo2(model: Any, ids: list[int], trace: Trace) -> None:
    """The sublayers read the stream itself; what they add is normed."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    angle, seen = angles(len(ids), size, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        a = block.self_attn
        q, k = rms(linear(x, a.q_proj), a.q_norm), rms(linear(x, a.k_proj), a.k_norm)
        q, k = rotate_halves(heads(q, size), angle), rotate_halves(heads(k, size), angle)
        z = trace.attend(i, q, k, heads(linear(x, a.v_proj), size), size**-0.5, seen)
        attn = rms(linear(z, a.o_proj), block.post_attention_layernorm)
        mlp = rms(gated(x + attn, block.mlp, silu), block.post_feedforward_layernorm)
        x = trace.block(i, x, attn, mlp)
    trace.head(rms(x, body.norm), model.lm_head)


def stablelm(model: Any, ids: list[int], trace: Trace) -> None:
    """A layer norm of its own for each head."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    dims = int(size * config.rope_parameters["partial_rotary_factor"])
    angle, seen = angles(len(ids), dims, rope_theta(config)), causal(len(ids))

    def by_head(x: Tensor, norms: Any) -> Tensor:
        return torch.stack([layer_norm(x[:, n], norm) for n, norm in enumerate(norms)], dim=1)

    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        h, a = layer_norm(x, block.input_layernorm), block.self_attn
        q, k, v = project(h, a, size)
        q = rotate_halves(by_head(q, a.q_layernorm.norms), angle)
        k = rotate_halves(by_head(k, a.k_layernorm.norms), angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), a.o_proj)
        x = trace.block(i, x, attn, gated(h, block.mlp, silu))
    trace.head(layer_norm(x, body.norm), model.lm_head)


def phi(model: Any, ids: list[int], trace: Trace) -> None:
    """One norm feeds both branches."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    dims = int(size * config.rope_parameters["partial_rotary_factor"])
    angle, seen = angles(len(ids), dims, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        h = layer_norm(x, block.input_layernorm)
        q, k, v = project(h, block.self_attn, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), block.self_attn.dense)
        x = trace.block(i, x, attn, two_layer(h, block.mlp.fc1, block.mlp.fc2, gelu_tanh))
    trace.head(layer_norm(x, body.final_layernorm), model.lm_head)


def starcoder2(model: Any, ids: list[int], trace: Trace) -> None:
    """Layer norms, an MLP of two layers."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    angle, seen = angles(len(ids), size, rope_theta(config)), causal(len(ids), config.sliding_window)
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        q, k, v = project(layer_norm(x, block.input_layernorm), block.self_attn, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), block.self_attn.o_proj)
        h = layer_norm(x + attn, block.post_attention_layernorm)
        x = trace.block(i, x, attn, two_layer(h, block.mlp.c_fc, block.mlp.c_proj, gelu_tanh))
    trace.head(layer_norm(x, body.norm), model.lm_head)


def glm4(model: Any, ids: list[int], trace: Trace) -> None:
    """`post_attention_layernorm` is the MLP's pre-norm here; the post-norms have other names."""
    body, config = model.model, model.config
    size = config.head_dim
    dims = int(size * config.rope_parameters["partial_rotary_factor"])
    angle, seen = angles(len(ids), dims, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        q, k, v = project(rms(x, block.input_layernorm), block.self_attn, size)
        q, k = rotate_pairs(q, angle), rotate_pairs(k, angle)
        z = trace.attend(i, q, k, v, size**-0.5, seen)
        attn = rms(linear(z, block.self_attn.o_proj), block.post_self_attn_layernorm)
        h = rms(x + attn, block.post_attention_layernorm)
        x = trace.block(i, x, attn, rms(gated_fused(h, block.mlp, silu), block.post_mlp_layernorm))
    trace.head(rms(x, body.norm), model.lm_head)


def opt_post_norm(model: Any, ids: list[int], trace: Trace) -> None:
    """Each addition is normed, and the next block reads the norm's output: no branch is a site."""
    body, config = model.model.decoder, model.config
    size, seen = config.hidden_size // config.num_attention_heads, causal(len(ids))
    x = linear(embed(ids, body.embed_tokens), body.project_in)
    x = x + embed(range(2, 2 + len(ids)), body.embed_positions)
    for i, block in enumerate(body.layers):
        q, k, v = project(x, block.self_attn, size)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), block.self_attn.out_proj)
        h = layer_norm(x + attn, block.self_attn_layer_norm)
        post = layer_norm(h + two_layer(h, block.fc1, block.fc2, torch.relu), block.final_layer_norm)
        trace.put(i, resid_pre=x, resid_post=post)
        x = post
    trace.head(linear(x, body.project_out), model.lm_head)


def gpt_neo(model: Any, ids: list[int], trace: Trace) -> None:
    """Scores are not scaled."""
    body, config = model.transformer, model.config
    size = config.hidden_size // config.num_heads
    x = embed(ids, body.wte) + embed(range(len(ids)), body.wpe)
    for i, block in enumerate(body.h):
        a = block.attn.attention
        window = config.window_size if config.attention_layers[i] == "local" else None
        q, k, v = project(layer_norm(x, block.ln_1), a, size)
        attn = linear(trace.attend(i, q, k, v, 1.0, causal(len(ids), window)), a.out_proj)
        mlp = two_layer(layer_norm(x + attn, block.ln_2), block.mlp.c_fc, block.mlp.c_proj, gelu_tanh)
        x = trace.block(i, x, attn, mlp)
    trace.head(layer_norm(x, body.ln_f), model.lm_head)


def mpt(model: Any, ids: list[int], trace: Trace) -> None:
    """The MLP's module returns the stream with what it adds; the attention's does not."""
    body, config = model.transformer, model.config
    size = config.d_model // config.n_heads
    bias, seen = alibi(len(ids), _slopes(config.n_heads)), causal(len(ids))
    x = embed(ids, body.wte)
    for i, block in enumerate(body.blocks):
        q, k, v = (heads(p, size) for p in linear(layer_norm(x, block.norm_1), block.attn.Wqkv).chunk(3, -1))
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen, bias=bias), block.attn.out_proj)
        mlp = two_layer(layer_norm(x + attn, block.norm_2), block.ffn.up_proj, block.ffn.down_proj, gelu)
        x = trace.block(i, x, attn, mlp)
    trace.head(layer_norm(x, body.norm_f), model.lm_head)


def mamba(model: Any, ids: list[int], trace: Trace) -> None:
    """The mixer itself is run as it is: what is at issue is only the stream around it."""
    body = model.backbone
    x = embed(ids, body.embeddings)
    for i, block in enumerate(body.layers):
        with torch.no_grad():
            post = x + wide(block.mixer(rms(x, block.norm).float()[None])[0])
        trace.put(i, resid_pre=x, resid_post=post)
        x = post
    trace.head(rms(x, body.norm_f), model.lm_head)
