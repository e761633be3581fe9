"""Tiny random models of the architectures that the library lists, and of some that it does not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from transformers import PreTrainedModel

from parity.architectures_unlisted import UNLISTED
from parity.tiny import base, build

#: Sliding windows are shorter than the prompts of `prompt`, so that they act.
WINDOW = 8
#: Token that stands for one image patch in the vision-language model.
IMAGE_TOKEN = 150
IMAGE_SIZE, PATCH_SIZE = 8, 4


def llama() -> PreTrainedModel:
    """The plain pre-norm block."""
    config = hf.LlamaConfig(**base(intermediate_size=96, num_key_value_heads=2))
    return build(lambda: hf.LlamaForCausalLM(config))


def mistral() -> PreTrainedModel:
    """A sliding window on every layer; heads that do not fill the hidden size."""
    config = hf.MistralConfig(**base(intermediate_size=96, num_key_value_heads=2, head_dim=24, sliding_window=WINDOW))
    return build(lambda: hf.MistralForCausalLM(config))


def qwen2() -> PreTrainedModel:
    """Biases on q, k and v; a sliding window on the upper layers only."""
    config = hf.Qwen2Config(
        **base(
            intermediate_size=96,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        )
    )
    return build(lambda: hf.Qwen2ForCausalLM(config))


def qwen3() -> PreTrainedModel:
    """Norms on the heads of q and k; query heads twice as wide together as the stream."""
    config = hf.Qwen3Config(**base(intermediate_size=96, num_key_value_heads=2, head_dim=32))
    return build(lambda: hf.Qwen3ForCausalLM(config))


def gemma2() -> PreTrainedModel:
    """Norms before and after both sublayers, alternating windows, soft caps on scores and logits."""
    config = hf.Gemma2Config(
        **base(
            num_hidden_layers=4,
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=24,
            query_pre_attn_scalar=20,
            sliding_window=WINDOW,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
        )
    )
    return build(lambda: hf.Gemma2ForCausalLM(config))


def gemma3_text() -> PreTrainedModel:
    """As gemma2 without caps, with head norms and another rotary base on windowed layers."""
    config = hf.Gemma3TextConfig(
        **base(
            num_hidden_layers=4,
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        )
    )
    return build(lambda: hf.Gemma3ForCausalLM(config))


def gpt2() -> PreTrainedModel:
    """Learned positions, fused qkv in a Conv1D."""
    config = hf.GPT2Config(
        vocab_size=160,
        n_positions=256,
        n_embd=64,
        n_layer=3,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return build(lambda: hf.GPT2LMHeadModel(config))


def _gpt_neox(parallel: bool) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = hf.GPTNeoXConfig(**base(intermediate_size=96, use_parallel_residual=parallel, rope_parameters=rope))
    return build(lambda: hf.GPTNeoXForCausalLM(config))


def gpt_neox_parallel() -> PreTrainedModel:
    """Attention and MLP both read the block's input, through a norm each; half of each head rotates."""
    return _gpt_neox(True)


def gpt_neox_sequential() -> PreTrainedModel:
    """The same modules one after the other."""
    return _gpt_neox(False)


def phi3() -> PreTrainedModel:
    """Fused qkv and fused gate/up, a window on every layer, partial rotation."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = hf.Phi3Config(
        **base(
            intermediate_size=96,
            num_key_value_heads=2,
            sliding_window=WINDOW,
            original_max_position_embeddings=256,
            rope_parameters=rope,
        )
    )
    return build(lambda: hf.Phi3ForCausalLM(config))


def opt() -> PreTrainedModel:
    """Learned positions with an offset; no module that is the MLP."""
    config = hf.OPTConfig(**base(ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=True))
    return build(lambda: hf.OPTForCausalLM(config))


def mixtral() -> PreTrainedModel:
    """A mixture of experts on every layer."""
    config = hf.MixtralConfig(
        **base(intermediate_size=48, num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2)
    )
    return build(lambda: hf.MixtralForCausalLM(config))


def qwen3_moe() -> PreTrainedModel:
    """Experts on all layers but layer 1, which is dense."""
    config = hf.Qwen3MoeConfig(
        **base(
            num_hidden_layers=4,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_key_value_heads=2,
            head_dim=24,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    )
    return build(lambda: hf.Qwen3MoeForCausalLM(config))


def llava() -> PreTrainedModel:
    """A CLIP tower of two layers before a llama of three: layer ids are the llama's."""
    text = hf.LlamaConfig(**base(intermediate_size=96, num_key_value_heads=2))
    vision = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    config = hf.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, vision_feature_layer=-1
    )
    return build(lambda: hf.LlavaForConditionalGeneration(config))


LISTED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gpt2": gpt2,
    "gpt_neox_parallel": gpt_neox_parallel,
    "gpt_neox_sequential": gpt_neox_sequential,
    "phi3": phi3,
    "opt": opt,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "llava": llava,
}

ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {**LISTED, **UNLISTED}


def prompt(name: str, length: int = 24, seed: int = 7) -> list[int]:
    """Token ids for one prompt of `name`; the vision-language model's holds its image tokens."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 140, (length,), generator=draw).tolist()
    if name == "llava":
        patches = (IMAGE_SIZE // PATCH_SIZE) ** 2
        ids[2 : 2 + patches] = [IMAGE_TOKEN] * patches
    return [1, *ids[1:]]


def extra_inputs(name: str, seed: int = 11) -> dict[str, torch.Tensor]:
    """What the forward of `name` takes beside token ids."""
    if name != "llava":
        return {}
    draw = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=draw)}
