"""Architectures with experts that the library does not list, block by block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.oracle_listed import rope_theta
from parity.oracle_math import (
    Trace,
    angles,
    causal,
    embed,
    experts,
    gated,
    gelu_tanh,
    heads,
    linear,
    project,
    rms,
    rms_weight,
    rotate_halves,
    rotate_pairs,
    silu,
    wide,
)


def granitemoe(model: Any, ids: list[int], trace: Trace) -> None:
    """The softmax is over the chosen logits only; what is added is scaled."""
    body, config = model.model, model.config
    size = config.hidden_size // config.num_attention_heads
    angle, seen = angles(len(ids), size, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.embed_tokens) * config.embedding_multiplier
    for i, block in enumerate(body.layers):
        q, k, v = project(rms(x, block.input_layernorm), block.self_attn, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = trace.attend(i, q, k, v, config.attention_multiplier, seen)
        attn = linear(z, block.self_attn.o_proj) * config.residual_multiplier
        h, moe = rms(x + attn, block.post_attention_layernorm), block.block_sparse_moe
        logits = h @ wide(moe.router.weight).T
        top, chosen = logits.topk(config.num_experts_per_tok, dim=-1)
        trace.put(i, router_logits=logits)
        mlp = experts(h, moe.experts, chosen, top.softmax(-1), silu) * config.residual_multiplier
        x = trace.block(i, x, attn, mlp)
    trace.head(rms(x, body.norm), model.lm_head, scale=1 / config.logits_scaling)


def olmoe(model: Any, ids: list[int], trace: Trace) -> None:
    """q and k are normed over all heads, then clipped, then rotated; v is clipped."""
    body, config = model.model, model.config
    size, clip = config.hidden_size // config.num_attention_heads, config.clip_qkv
    angle, seen = angles(len(ids), size, rope_theta(config)), causal(len(ids))
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        h, a = rms(x, block.input_layernorm), block.self_attn
        q = heads(rms(linear(h, a.q_proj), a.q_norm).clamp(-clip, clip), size)
        k = heads(rms(linear(h, a.k_proj), a.k_norm).clamp(-clip, clip), size)
        v = heads(linear(h, a.v_proj).clamp(-clip, clip), size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), a.o_proj)
        h = rms(x + attn, block.post_attention_layernorm)
        logits = h @ wide(block.mlp.gate.weight).T
        trace.put(i, router_logits=logits)
        weights, chosen = logits.softmax(-1).topk(config.num_experts_per_tok, dim=-1)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        x = trace.block(i, x, attn, experts(h, block.mlp.experts, chosen, weights, silu))
    trace.head(rms(x, body.norm), model.lm_head)


def _grouped_choice(scores: Tensor, gate: Any, config: Any) -> Tensor:
    """Experts with the best biased scores within the groups whose two best sum highest."""
    biased = (scores + wide(gate.e_score_correction_bias)).view(len(scores), config.n_group, -1)
    groups = biased.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
    allowed = torch.zeros(biased.shape[:2], dtype=torch.bool).scatter(1, groups, True)
    return (
        biased.masked_fill(~allowed[..., None], -torch.inf).flatten(1).topk(config.num_experts_per_tok, dim=-1).indices
    )


def deepseek_v3(model: Any, ids: list[int], trace: Trace) -> None:
    """Keys and values expand from a latent; one rotated key is shared by all heads."""
    body, config = model.model, model.config
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    angle, seen, tokens = angles(len(ids), rope, rope_theta(config)), causal(len(ids)), len(ids)

    def turn(part: Tensor) -> Tensor:
        # Neighbours rotate together, and the result is stored as halves.
        return rotate_halves(torch.cat([part[..., 0::2], part[..., 1::2]], dim=-1), angle)

    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        h, a = rms(x, block.input_layernorm), block.self_attn
        q = heads(linear(rms(linear(h, a.q_a_proj), a.q_a_layernorm), a.q_b_proj), nope + rope)
        q = torch.cat([q[..., :nope], turn(q[..., nope:])], dim=-1)
        latent, shared = linear(h, a.kv_a_proj_with_mqa).split([config.kv_lora_rank, rope], dim=-1)
        kv = heads(linear(rms(latent, a.kv_a_layernorm), a.kv_b_proj), nope + value)
        shared = turn(shared[:, None]).expand(tokens, kv.shape[1], rope)
        k, v = torch.cat([kv[..., :nope], shared], dim=-1), kv[..., nope:]
        attn = linear(trace.attend(i, q, k, v, (nope + rope) ** -0.5, seen), a.o_proj)
        h = rms(x + attn, block.post_attention_layernorm)
        if i < config.first_k_dense_replace:
            mlp = gated(h, block.mlp, silu)
        else:
            logits = h @ wide(block.mlp.gate.weight).T
            trace.put(i, router_logits=logits)
            chosen = _grouped_choice(logits.sigmoid(), block.mlp.gate, config)
            weights = logits.sigmoid().gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
            mlp = experts(h, block.mlp.experts, chosen, weights, silu)
            mlp = mlp + gated(h, block.mlp.shared_experts, silu)
        x = trace.block(i, x, attn, mlp)
    trace.head(rms(x, body.norm), model.lm_head)


def _delta_net(h: Tensor, net: Any) -> Tensor:
    """Linear attention: a state for each head, decayed and corrected token by token."""
    tokens, groups, size, value = len(h), net.num_k_heads, net.head_k_dim, net.head_v_dim
    each = net.num_v_heads // groups
    fused = linear(h, net.in_proj_qkvz).view(tokens, groups, -1)
    q, k, v, z = fused.split([size, size, each * value, each * value], dim=-1)
    b, a = linear(h, net.in_proj_ba).view(tokens, groups, -1).split([each, each], dim=-1)
    mixed = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
    kernel = wide(net.conv1d.weight)[:, 0]
    padded = torch.cat([mixed.new_zeros(kernel.shape[1] - 1, mixed.shape[1]), mixed])
    taps = [padded[n : n + tokens] * kernel[:, n] for n in range(kernel.shape[1])]
    mixed = silu(torch.stack(taps).sum(0))
    q, k, v = mixed.split([groups * size, groups * size, net.num_v_heads * value], dim=-1)
    q, k = heads(q, size).repeat_interleave(each, dim=1), heads(k, size).repeat_interleave(each, dim=1)
    q = q / torch.sqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * size**-0.5
    k = k / torch.sqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
    v = heads(v, value)
    beta = torch.sigmoid(b.flatten(1))
    decay = torch.exp(-wide(net.A_log).exp() * torch.log1p(torch.exp(a.flatten(1) + wide(net.dt_bias))))
    state, out = h.new_zeros(net.num_v_heads, size, value), []
    for t in range(tokens):
        state = state * decay[t, :, None, None]
        error = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
        state = state + k[t, :, :, None] * error[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    normed = rms(torch.stack(out), net.norm) * silu(heads(z.flatten(1), value))
    return linear(normed.flatten(1), net.out_proj)


def qwen3_next(model: Any, ids: list[int], trace: Trace) -> None:
    """Full attention gates its heads before the output projection; the other layers have linear attention."""
    body, config = model.model, model.config
    size, seen = config.head_dim, causal(len(ids))
    angle = angles(len(ids), int(size * config.rope_parameters["partial_rotary_factor"]), rope_theta(config))
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        h = rms(x, block.input_layernorm, plus_one=True)
        if config.layer_types[i] == "linear_attention":
            attn = _delta_net(h, block.linear_attn)
        else:
            a = block.self_attn
            q, gate = heads(linear(h, a.q_proj), 2 * size).chunk(2, dim=-1)
            q, k = rms(q, a.q_norm, plus_one=True), heads(linear(h, a.k_proj), size)
            q, k = rotate_halves(q, angle), rotate_halves(rms(k, a.k_norm, plus_one=True), angle)
            v, open_ = heads(linear(h, a.v_proj), size), torch.sigmoid(gate).flatten(1)
            attn = linear(trace.attend(i, q, k, v, size**-0.5, seen, gate=open_), a.o_proj)
        h, mlp = rms(x + attn, block.post_attention_layernorm, plus_one=True), block.mlp
        if i in config.mlp_only_layers:
            added = gated(h, mlp, silu)
        else:
            logits = h @ wide(mlp.gate.weight).T
            trace.put(i, router_logits=logits)
            weights, chosen = logits.softmax(-1).topk(config.num_experts_per_tok, dim=-1)
            if config.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            added = experts(h, mlp.experts, chosen, weights, silu)
            shared = torch.sigmoid(linear(h, mlp.shared_expert_gate)) * gated(h, mlp.shared_expert, silu)
            added = added + shared
        x = trace.block(i, x, attn, added)
    trace.head(rms(x, body.norm, plus_one=True), model.lm_head)


def _gpt_oss_experts(h: Tensor, module: Any, chosen: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for row in range(len(h)):
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            both = h[row] @ wide(module.gate_up_proj[expert]) + wide(module.gate_up_proj_bias[expert])
            gate, up = both[::2].clamp(max=module.limit), both[1::2].clamp(-module.limit, module.limit)
            inner = (up + 1) * gate * torch.sigmoid(module.alpha * gate)
            out[row] += weight * (inner @ wide(module.down_proj[expert]) + wide(module.down_proj_bias[expert]))
    return out


def gpt_oss(model: Any, ids: list[int], trace: Trace) -> None:
    """Each head's softmax has one more column, which holds no value: patterns sum to less than one."""
    body, config = model.model, model.config
    size, angle = config.head_dim, angles(len(ids), config.head_dim, rope_theta(config))
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        a = block.self_attn
        window = config.sliding_window if config.layer_types[i] == "sliding_attention" else None
        q, k, v = project(rms(x, block.input_layernorm), a, size)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = trace.attend(i, q, k, v, size**-0.5, causal(len(ids), window), sinks=a.sinks)
        attn = linear(z, a.o_proj)
        h = rms(x + attn, block.post_attention_layernorm)
        logits = linear(h, block.mlp.router)
        trace.put(i, router_logits=logits)
        top, chosen = logits.topk(config.num_experts_per_tok, dim=-1)
        x = trace.block(i, x, attn, _gpt_oss_experts(h, block.mlp.experts, chosen, top.softmax(-1)))
    trace.head(rms(x, body.norm), model.lm_head)


def _llama4_moe(h: Tensor, moe: Any, logits: Tensor, top: int) -> Tensor:
    """Scores scale what an expert reads, not what it gives."""
    out = gated(h, moe.shared_expert, silu)
    best = logits.topk(top, dim=-1)
    for row in range(len(h)):
        for expert, logit in zip(best.indices[row].tolist(), best.values[row], strict=True):
            both = (h[row] * torch.sigmoid(logit)) @ wide(moe.experts.gate_up_proj[expert])
            gate, up = both.chunk(2)
            out[row] += (up * silu(gate)) @ wide(moe.experts.down_proj[expert])
    return out


def llama4(model: Any, ids: list[int], trace: Trace) -> None:
    """q and k are normed after they rotate; where nothing rotates, q grows with its position instead."""
    body, config = model.model, model.config
    size, tokens = config.head_dim, len(ids)
    angle = angles(tokens, size, rope_theta(config))
    grown = torch.floor((torch.arange(tokens, dtype=torch.double) + 1) / config.floor_scale)
    grown = torch.log1p(grown) * config.attn_scale + 1
    x = embed(ids, body.embed_tokens)
    for i, block in enumerate(body.layers):
        a = block.self_attn
        q, k, v = project(rms_weight(x, wide(block.input_layernorm.weight), config.rms_norm_eps), a, size)
        if config.no_rope_layers[i]:
            q = rms_weight(rotate_pairs(q, angle), 1.0, config.rms_norm_eps)
            k = rms_weight(rotate_pairs(k, angle), 1.0, config.rms_norm_eps)
            seen = causal(tokens, chunk=config.attention_chunk_size)
        else:
            q, seen = q * grown[:, None, None], causal(tokens)
        attn = linear(trace.attend(i, q, k, v, size**-0.5, seen), a.o_proj)
        h = rms_weight(x + attn, wide(block.post_attention_layernorm.weight), config.rms_norm_eps)
        if i in config.moe_layers:
            logits = linear(h, block.feed_forward.router)
            trace.put(i, router_logits=logits)
            mlp = _llama4_moe(h, block.feed_forward, logits, config.num_experts_per_tok)
        else:
            mlp = gated(h, block.feed_forward, silu)
        x = trace.block(i, x, attn, mlp)
    trace.head(rms_weight(x, wide(body.norm.weight), config.rms_norm_eps), model.lm_head)


def gemma4_moe(model: Any, ids: list[int], trace: Trace) -> None:
    """An MLP and experts read the same stream; the whole stream is scaled as a block ends.

    The router reads the stream without the block's norms. Its module gives probabilities; the site is the
    scores before them.
    """
    body, config = model.model, model.config
    x = embed(ids, body.embed_tokens) * config.hidden_size**0.5
    for i, block in enumerate(body.layers):
        a, kind = block.self_attn, config.layer_types[i]
        rope, eps = config.rope_parameters[kind], config.rms_norm_eps
        window = config.sliding_window if kind == "sliding_attention" else None
        angle = angles(len(ids), a.head_dim, rope["rope_theta"])
        if "partial_rotary_factor" in rope:
            # "Proportional": the frequencies are those of the whole head, and the slow ones are stopped.
            angle[:, int(rope["partial_rotary_factor"] * a.head_dim) // 2 :] = 0
        q, k, v = project(rms(x, block.input_layernorm), a, a.head_dim)
        q, k, v = rms(q, a.q_norm), rms(k, a.k_norm), rms_weight(v, 1.0, eps)
        q, k = rotate_halves(q, angle), rotate_halves(k, angle)
        z = trace.attend(i, q, k, v, 1.0, causal(len(ids), window))
        middle = x + rms(linear(z, a.o_proj), block.post_attention_layernorm)
        dense = gated(rms(middle, block.pre_feedforward_layernorm), block.mlp, gelu_tanh)
        scaled = rms_weight(middle, wide(block.router.scale), eps) * config.hidden_size**-0.5
        logits = linear(scaled, block.router.proj)
        weights, chosen = logits.softmax(-1).topk(config.top_k_experts, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True) * wide(block.router.per_expert_scale)[chosen]
        h = rms(middle, block.pre_feedforward_layernorm_2)
        sparse = experts(h, block.experts, chosen, weights, gelu_tanh)
        both = rms(dense, block.post_feedforward_layernorm_1) + rms(sparse, block.post_feedforward_layernorm_2)
        post = (middle + rms(both, block.post_feedforward_layernorm)) * wide(block.layer_scalar)
        trace.put(i, resid_pre=x, resid_post=post, router_logits=logits)
        x = post
    trace.head(rms(x, body.norm), model.lm_head, cap=config.final_logit_softcapping)
