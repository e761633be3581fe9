"""Tiny random checkpoints that vLLM's CPU attention takes: heads of 32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from transformers import PreTrainedModel

from parity.tiny import base, build

WIDE: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4}
#: Shorter than the prompts, so that it acts.
WINDOW = 8


def wide(**changes: Any) -> dict[str, Any]:
    return base(**{**WIDE, **changes})


def llama() -> PreTrainedModel:
    config = hf.LlamaConfig(**wide(intermediate_size=96, num_key_value_heads=2))
    return build(lambda: hf.LlamaForCausalLM(config))


def mistral() -> PreTrainedModel:
    config = hf.MistralConfig(**wide(intermediate_size=96, num_key_value_heads=2, head_dim=64, sliding_window=WINDOW))
    return build(lambda: hf.MistralForCausalLM(config))


def qwen2() -> PreTrainedModel:
    config = hf.Qwen2Config(**wide(intermediate_size=96, num_key_value_heads=2))
    return build(lambda: hf.Qwen2ForCausalLM(config))


def qwen3() -> PreTrainedModel:
    config = hf.Qwen3Config(**wide(intermediate_size=96, num_key_value_heads=2, head_dim=64))
    return build(lambda: hf.Qwen3ForCausalLM(config))


def gemma2() -> PreTrainedModel:
    config = hf.Gemma2Config(
        **wide(
            num_hidden_layers=4,
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=32,
            query_pre_attn_scalar=40,
            sliding_window=WINDOW,
            hidden_activation="gelu_pytorch_tanh",
        )
    )
    config._attn_implementation = "eager"
    return build(lambda: hf.Gemma2ForCausalLM(config))


def gemma3_text() -> PreTrainedModel:
    config = hf.Gemma3TextConfig(
        **wide(
            num_hidden_layers=4,
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=32,
            query_pre_attn_scalar=40,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        )
    )
    return build(lambda: hf.Gemma3ForCausalLM(config))


def phi3() -> PreTrainedModel:
    config = hf.Phi3Config(**wide(intermediate_size=96, num_key_value_heads=2, original_max_position_embeddings=256))
    return build(lambda: hf.Phi3ForCausalLM(config))


def gpt2() -> PreTrainedModel:
    config = hf.GPT2Config(
        vocab_size=160, n_embd=128, n_layer=3, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    )
    return build(lambda: hf.GPT2LMHeadModel(config))


def opt() -> PreTrainedModel:
    config = hf.OPTConfig(**wide(ffn_dim=96, word_embed_proj_dim=128, dropout=0.0))
    return build(lambda: hf.OPTForCausalLM(config))


def gpt_neox_parallel() -> PreTrainedModel:
    config = hf.GPTNeoXConfig(
        **wide(
            intermediate_size=96,
            use_parallel_residual=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        )
    )
    return build(lambda: hf.GPTNeoXForCausalLM(config))


def mixtral() -> PreTrainedModel:
    config = hf.MixtralConfig(
        **wide(
            intermediate_size=96, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        )
    )
    return build(lambda: hf.MixtralForCausalLM(config))


def qwen3_moe() -> PreTrainedModel:
    config = hf.Qwen3MoeConfig(
        **wide(
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
        )
    )
    return build(lambda: hf.Qwen3MoeForCausalLM(config))


CHECKPOINTS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "phi3": phi3,
    "gpt2": gpt2,
    "opt": opt,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_neox_parallel": gpt_neox_parallel,  # through the Transformers backend
}


def saved(name: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """A checkpoint in a folder, and the model that it is of."""
    model = CHECKPOINTS[name]()
    model.save_pretrained(folder)
    return folder, model


def lora_adapter(folder: Path) -> tuple[Any, Path]:
    """A LoRA of rank 4 for the llama, written into a folder; and the llama with its product added."""
    generator = torch.Generator().manual_seed(1)
    merged = CHECKPOINTS["llama"]()
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer, block in enumerate(merged.model.layers):
            for name in ("q_proj", "v_proj"):
                weight = getattr(block.self_attn, name).weight
                a = torch.randn(4, weight.shape[1], generator=generator) * 0.1
                b = torch.randn(weight.shape[0], 4, generator=generator) * 0.1
                weight += 2.0 * b @ a
                path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none",
              "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "fan_in_fan_out": False, "use_dora": False}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged, folder
