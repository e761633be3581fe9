"""A prompt in a batch, after a shared prefix, beside others and after others, has the rows that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Phi3Config, Qwen2VLConfig

import midstream as ms
from midstream.backends.huggingface import batching
from parity.architectures import LISTED, prompt


def _shown(model: Any) -> Any:
    """The model in eval mode, with weights large enough that a wrong position shows."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model.eval()


def _alone(lm: ms.LanguageModel, prompts: list[list[int]], **asked: Any) -> list[dict[int, torch.Tensor]]:
    return [lm.capture([ids], **asked).sample(0) for ids in prompts]


def _assert_same(cap: ms.CaptureResult, alone: list[dict[int, torch.Tensor]]) -> None:
    for index, wanted in enumerate(alone):
        for layer, rows in cap.sample(index).items():
            error = (rows - wanted[layer]).norm(dim=-1) / wanted[layer].norm(dim=-1)
            assert error.max() < 1e-4, (index, layer, float(error.max()))


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "mistral", "gemma2", "gemma3_text", "gpt_neox_parallel"])
@pytest.mark.parametrize(("site", "layer"), [("resid_pre", 0), ("resid_post", 0), ("resid_pre", 1), ("attn_out", 1)])
def test_a_shared_prefix_wherever_the_pass_stops(name: str, site: str, layer: int, tools: Any) -> None:
    """Also where it stops before the first block, which would leave no cache to go on from."""
    model = LISTED[name]()
    shared = prompt(name, 60, seed=1)
    prompts = [[*shared, *prompt(name, 3 + size, seed=size)] for size in range(13)]
    assert batching.shared_prefixes(dict(enumerate(map(tuple, prompts)))), "these prompts share enough to be grouped"
    with ms.load(model) as lm:
        cap = lm.capture(prompts, site=site, layers=[layer])
        _assert_same(cap, _alone(lm, prompts, site=site, layers=[layer]))


def test_shared_rows_are_reused_and_the_receipt_says_so() -> None:
    model = LISTED["llama"]()
    shared = prompt("llama", 100, seed=1)
    prompts = [[*shared, 5 + size] for size in range(8)]
    with ms.load(model) as lm:
        receipt = lm.capture(prompts, layers=[0]).receipt
    assert (receipt.selected, receipt.computed, receipt.reused) == (8 * 101, 100 + 8, 7 * 100)
    assert receipt.complete


def _longrope() -> Any:
    config = Phi3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=32, pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 8, "long_factor": [8.0 + step for step in range(8)],
        },
    )  # fmt: skip
    torch.manual_seed(3)
    return _shown(AutoModelForCausalLM.from_config(config))


def test_prompts_on_both_sides_of_a_longrope_boundary() -> None:
    """The model turns every row of a longer prompt by other frequencies: a pass must never hold both kinds."""
    shared = [7 + place % 90 for place in range(28)]
    prompts = [[*shared, *range(3, 3 + size)] for size in (2, 60, 4, 30, 3, *range(40, 66))]
    with ms.load(_longrope()) as lm:
        cap = lm.capture(prompts, layers=[2])
        _assert_same(cap, _alone(lm, prompts, layers=[2]))
        both = lm.capture([prompts[0], prompts[1]], layers=[2], max_tokens=3)
        assert torch.allclose(both.sample(1)[2][: len(prompts[1])], cap.sample(1)[2], atol=1e-4)


def test_a_decode_that_crosses_a_longrope_boundary_is_refused() -> None:
    with ms.load(_longrope()) as lm, pytest.raises(ms.PromptError, match=r"prompt 1 .*past 32 positions.*fewer"):
        lm.capture([[5] * 4, [5] * 30], max_tokens=8)


def test_an_image_prompt_leaves_nothing_to_the_next() -> None:
    """Qwen2-VL keeps the last image's position deltas on the model; a text prompt after it must not have them."""
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
              "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3}  # fmt: skip
    text = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=120, video_token_id=121, vision_start_token_id=122,
        vision_end_token_id=123,
    )  # fmt: skip
    torch.manual_seed(4)
    model = _shown(AutoModelForImageTextToText.from_config(config))
    grid = torch.tensor([[1, 4, 4]])
    image = {"pixel_values": torch.randn(16, 3 * 1 * 4 * 4), "image_grid_thw": grid}
    seen = {"prompt_token_ids": [5, 122, 120, 120, 120, 120, 123, 9], "multi_modal_data": image}
    with ms.load(model) as lm:
        plain = lm.capture([[5, 6, 7, 8]], layers=[1], max_tokens=6)
        lm.capture([seen], layers=[1], max_tokens=6)
        again = lm.capture([[5, 6, 7, 8]], layers=[1], max_tokens=6)
    assert again.outputs[0].token_ids == plain.outputs[0].token_ids
    assert torch.equal(again.rows(1), plain.rows(1))
    assert all(module.rope_deltas is None for module in model.modules() if "rope_deltas" in vars(module))


def test_a_module_that_an_adapter_wraps_after_load_is_found_again() -> None:
    class Adapter(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * self.inner(*args, **kwargs)

    model = LISTED["opt"]()
    with ms.load(model) as lm:
        for block in model.model.decoder.layers:
            block.fc2 = Adapter(block.fc2).eval()
        cap = lm.capture([prompt("opt", 9)], sites=["resid_pre", "attn_out", "mlp_out", "resid_post"])
    for layer in cap.layer_ids:
        total = sum(cap.rows(layer, site) for site in ("resid_pre", "attn_out", "mlp_out"))
        assert torch.allclose(total, cap.rows(layer, "resid_post"), atol=1e-5)


def test_a_capture_inside_another_is_refused() -> None:
    with ms.load(LISTED["llama"]()) as lm:

        def nested(done: int, total: int) -> None:
            lm.capture([[5, 6]], layers=[0])

        with pytest.raises(ms.BusyError, match="busy"):
            lm.capture([[5, 6, 7]], layers=[0], progress=nested)
        assert len(lm.capture([[5, 6, 7]], layers=[0]).labels) == 3
