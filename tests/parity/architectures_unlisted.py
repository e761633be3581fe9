"""Tiny random models of architectures that the library does not list: structural search has to find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from parity.tiny import base, build

WINDOW = 8


def granite() -> PreTrainedModel:
    """Multipliers on the embedding, on both branches, on the scores and on the logits."""
    config = hf.GraniteConfig(
        **base(
            intermediate_size=96,
            num_key_value_heads=2,
            residual_multiplier=0.6,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            logits_scaling=2.5,
        )
    )
    return build(lambda: hf.GraniteForCausalLM(config))


def _falcon(**changes: Any) -> PreTrainedModel:
    config = hf.FalconConfig(**base(bias=True, ffn_hidden_size=96, **changes))
    return build(lambda: hf.FalconForCausalLM(config))


def falcon_new() -> PreTrainedModel:
    """Parallel, a norm for each branch, grouped keys and values (the 40B layout)."""
    return _falcon(new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True, alibi=False)


def falcon_multi_query() -> PreTrainedModel:
    """Parallel, one norm for both branches, one key-value head (the 7B layout)."""
    return _falcon(new_decoder_architecture=False, multi_query=True, parallel_attn=True, alibi=False)


def falcon_alibi() -> PreTrainedModel:
    """Sequential with ALiBi (the RW layout)."""
    return _falcon(new_decoder_architecture=False, multi_query=False, parallel_attn=False, alibi=True)


def _bloom(post_norm_residual: bool) -> PreTrainedModel:
    config = hf.BloomConfig(
        vocab_size=160,
        hidden_size=64,
        n_layer=3,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        apply_residual_connection_post_layernorm=post_norm_residual,
    )
    return build(lambda: hf.BloomForCausalLM(config))


def bloom() -> PreTrainedModel:
    """Attention and MLP modules that add the residual inside; ALiBi; a norm on the embeddings."""
    return _bloom(False)


def bloom_norm_residual() -> PreTrainedModel:
    """The residual is the normed stream, so that the stream is no running sum."""
    return _bloom(True)


def cohere() -> PreTrainedModel:
    """Parallel, one norm, interleaved rotary, head norms, a logit scale."""
    config = hf.CohereConfig(**base(intermediate_size=96, num_key_value_heads=2, use_qk_norm=True, logit_scale=0.4))
    return build(lambda: hf.CohereForCausalLM(config))


def olmo2() -> PreTrainedModel:
    """Norms only after the sublayers; q and k normed over all heads at once."""
    config = hf.Olmo2Config(**base(intermediate_size=96, num_key_value_heads=2))
    return build(lambda: hf.Olmo2ForCausalLM(config))


def stablelm() -> PreTrainedModel:
    """Parallel, one norm, a norm for each head, a quarter of each head rotates."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    config = hf.StableLmConfig(
        **base(
            intermediate_size=96,
            num_key_value_heads=2,
            use_parallel_residual=True,
            qk_layernorm=True,
            use_qkv_bias=True,
            rope_parameters=rope,
        )
    )
    return build(lambda: hf.StableLmForCausalLM(config))


def phi() -> PreTrainedModel:
    """Parallel, one norm, output projection called `dense`, a bias on the output embedding."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = hf.PhiConfig(**base(intermediate_size=96, num_key_value_heads=2, rope_parameters=rope))
    return build(lambda: hf.PhiForCausalLM(config))


def starcoder2() -> PreTrainedModel:
    """LayerNorms and biases throughout; a window on every layer."""
    config = hf.Starcoder2Config(
        **base(intermediate_size=96, num_key_value_heads=2, sliding_window=WINDOW, use_bias=True)
    )
    return build(lambda: hf.Starcoder2ForCausalLM(config))


def glm4() -> PreTrainedModel:
    """Norms before and after both sublayers under names of its own; interleaved partial rotary."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = hf.Glm4Config(**base(intermediate_size=96, num_key_value_heads=2, head_dim=24, rope_parameters=rope))
    return build(lambda: hf.Glm4ForCausalLM(config))


def granitemoe() -> PreTrainedModel:
    """Experts in a module called `block_sparse_moe`, scaled by the residual multiplier."""
    config = hf.GraniteMoeConfig(
        **base(
            intermediate_size=48,
            num_key_value_heads=2,
            num_local_experts=6,
            num_experts_per_tok=2,
            residual_multiplier=0.6,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            logits_scaling=2.5,
        )
    )
    return build(lambda: hf.GraniteMoeForCausalLM(config))


def olmoe() -> PreTrainedModel:
    """Experts on every layer; q, k and v clipped in place after their norms."""
    config = hf.OlmoeConfig(
        **base(intermediate_size=48, num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, clip_qkv=0.9)
    )
    return build(lambda: hf.OlmoeForCausalLM(config))


def deepseek_v3() -> PreTrainedModel:
    """Latent attention; a dense layer, then experts with a shared one and a sigmoid gate."""
    config = hf.DeepseekV3Config(
        **base(
            intermediate_size=96,
            moe_intermediate_size=32,
            num_key_value_heads=4,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=24,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
        )
    )
    return build(lambda: hf.DeepseekV3ForCausalLM(config))


def opt_post_norm() -> PreTrainedModel:
    """Norms after each addition (the 350M layout): what a block leaves is normed; projections outside."""
    config = hf.OPTConfig(**base(ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False))
    model = build(lambda: hf.OPTForCausalLM(config))
    with torch.no_grad():
        # No norm precedes the first attention: rows of the usual size would make its patterns uniform.
        model.get_parameter("model.decoder.embed_positions.weight").mul_(6)
    return model


def gpt_neo() -> PreTrainedModel:
    """Scores without a scale; global and local layers; attention nested in a wrapper of the same kind."""
    config = hf.GPTNeoConfig(
        vocab_size=160,
        max_position_embeddings=256,
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=WINDOW,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return build(lambda: hf.GPTNeoForCausalLM(config))


def mpt() -> PreTrainedModel:
    """ALiBi; an MLP that adds the residual inside while the attention does not."""
    config = hf.MptConfig(
        vocab_size=160, d_model=64, n_heads=4, n_layers=3, max_seq_len=256, bos_token_id=1, eos_token_id=2
    )
    return build(lambda: hf.MptForCausalLM(config))


def mamba() -> PreTrainedModel:
    """One mixer for a block: no attention, no MLP."""
    config = hf.MambaConfig(
        vocab_size=160,
        hidden_size=64,
        num_hidden_layers=3,
        state_size=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return build(lambda: hf.MambaForCausalLM(config))


def t5() -> PreTrainedModel:
    """Encoder and decoder; three sublayers in a decoder block, all adding the residual inside."""
    config = hf.T5Config(
        vocab_size=160,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=3,
        num_heads=4,
        eos_token_id=2,
        pad_token_id=0,
    )
    return build(lambda: hf.T5ForConditionalGeneration(config))


def qwen3_next() -> PreTrainedModel:
    """Linear and full attention in turn, a gate between the heads and the output projection, experts."""
    config = hf.Qwen3NextConfig(
        **base(
            num_hidden_layers=4,
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=24,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            # Linear attention's outputs are small, and its norm would make its rounding as large as 2e-5.
            rms_norm_eps=1e-3,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            mlp_only_layers=[3],
        )
    )
    return build(lambda: hf.Qwen3NextForCausalLM(config))


def gemma3n() -> PreTrainedModel:
    """Four streams at once, mixed before and after each block; keys shared between layers."""
    config = hf.Gemma3nTextConfig(
        **base(
            num_hidden_layers=4,
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size_per_layer_input=160,
            hidden_size_per_layer_input=16,
            num_kv_shared_layers=2,
            laurel_rank=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=WINDOW,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        )
    )
    return build(lambda: hf.Gemma3nForCausalLM(config))


def gpt_oss() -> PreTrainedModel:
    """A sink in each head's softmax; biased experts; an MLP that returns a tuple."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = hf.GptOssConfig(
        **base(
            num_hidden_layers=4,
            intermediate_size=32,
            num_key_value_heads=2,
            head_dim=24,
            num_local_experts=6,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            rope_parameters=rope,
        )
    )
    return build(lambda: hf.GptOssForCausalLM(config))


def llama4() -> PreTrainedModel:
    """Layers without rotary, chunked attention, norms after rotary, a flat MoE output in a tuple."""
    config = hf.Llama4TextConfig(
        **base(
            num_hidden_layers=4,
            intermediate_size=32,
            intermediate_size_mlp=96,
            num_key_value_heads=2,
            head_dim=24,
            num_local_experts=6,
            num_experts_per_tok=2,
            moe_layers=[1, 3],
            no_rope_layers=[1, 1, 1, 0],
            attention_chunk_size=WINDOW,
            floor_scale=4,
        )
    )
    return build(lambda: hf.Llama4ForCausalLM(config))


def gemma4_moe() -> PreTrainedModel:
    """An MLP and experts side by side, a router that returns probabilities, a factor on the whole stream."""
    config = hf.Gemma4TextConfig(
        **base(
            num_hidden_layers=4,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_key_value_heads=2,
            head_dim=16,
            global_head_dim=32,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
            final_logit_softcapping=4.0,
        )
    )
    return build(lambda: hf.Gemma4ForCausalLM(config))


UNLISTED: dict[str, Callable[[], PreTrainedModel]] = {
    "granite": granite,
    "falcon_new": falcon_new,
    "falcon_multi_query": falcon_multi_query,
    "falcon_alibi": falcon_alibi,
    "bloom": bloom,
    "bloom_norm_residual": bloom_norm_residual,
    "cohere": cohere,
    "olmo2": olmo2,
    "stablelm": stablelm,
    "phi": phi,
    "starcoder2": starcoder2,
    "glm4": glm4,
    "granitemoe": granitemoe,
    "olmoe": olmoe,
    "deepseek_v3": deepseek_v3,
    "opt_post_norm": opt_post_norm,
    "gpt_neo": gpt_neo,
    "mpt": mpt,
    "mamba": mamba,
    "t5": t5,
    "qwen3_next": qwen3_next,
    "gemma3n": gemma3n,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "gemma4_moe": gemma4_moe,
}
