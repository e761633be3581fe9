"""A tiny vision-language model on the engine: rows of an image are labelled by position, and are those in process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstream as ms
from midstream.core.errors import PromptError
from on_vllm.checkpoints import wide
from on_vllm.kit import Engines, relative
from parity.tiny import build
from unit.tiny_checkpoint import byte_tokenizer

SIZE, PATCH, SCALE = 32, 8, 2
PATCHES = (SIZE // PATCH // SCALE) ** 2
Both = tuple[ms.LanguageModel, ms.LanguageModel, Any]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Both:
    """On an engine, in process, and the processor that makes tensors of images."""
    import transformers as hf
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    folder: Path = tmp_path_factory.mktemp("idefics3")
    processor = hf.Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": SIZE}, max_image_size={"longest_edge": SIZE}, do_image_splitting=False
        ),
        tokenizer=byte_tokenizer(),
        image_seq_len=PATCHES,
    )
    tokenizer = processor.tokenizer
    text = hf.LlamaConfig(
        **wide(vocab_size=len(tokenizer), intermediate_size=96, num_key_value_heads=2, bos_token_id=0, eos_token_id=1)
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": text.num_hidden_layers,  # as deep as the text decoder, and not it
        "num_attention_heads": 2,
        "image_size": SIZE,
        "patch_size": PATCH,
    }
    config = hf.Idefics3Config(
        vision_config=vision,
        text_config=text,
        image_token_id=processor.image_token_id,
        scale_factor=SCALE,
        pad_token_id=0,
    )
    model = build(lambda: hf.Idefics3ForConditionalGeneration(config))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    options = {"limit_mm_per_prompt": {"image": 2}}
    return engines.get(folder, engine_kwargs=options), ms.load(model, tokenizer=tokenizer), processor


def picture(seed: int) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8))


def in_process(processor: Any, text: str, images: list[Any]) -> dict[str, Any]:
    """The same prompt for the model in process: its processor's ids and tensors."""
    made = processor(text=text, images=images, return_tensors="pt")
    return {
        "prompt_token_ids": made["input_ids"][0].tolist(),
        "multi_modal_data": {name: made[name] for name in ("pixel_values", "pixel_attention_mask")},
    }


def test_rows_of_images_are_those_in_process(both: Both) -> None:
    lm, hf, processor = both
    texts = ["see <image> here", "<image>", "first <image> then <image>!"]
    images = [[picture(1)], [picture(2)], [picture(3), picture(1)]]
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": of if len(of) > 1 else of[0]}}
        for text, of in zip(texts, images, strict=True)
    ]
    given: dict[str, Any] = {"sites": ["resid_pre", "resid_post", "attn_out"], "max_tokens": 4, "ignore_eos": True}
    for _ in range(2):  # again, from what is kept
        ours = lm.capture([*prompts, "no picture"], **given)
        theirs = hf.capture([*map(in_process, [processor] * 3, texts, images), "no picture"], **given)
        assert ours.labels == theirs.labels
        for key, rows in theirs.tensors.items():
            assert relative(ours.tensors[key], rows) < 1e-4, key
    placeholder = processor.tokenizer.convert_tokens_to_ids("<image>")
    counts = [(ours.sample_token_ids(sample) == placeholder).sum() for sample in range(4)]
    assert counts == [PATCHES, PATCHES, 2 * PATCHES, 0]


def test_the_same_ids_with_another_image_are_other_rows(both: Both) -> None:
    lm, hf, processor = both
    text = "<image>" + "x" * 40  # whole blocks of rows, which are kept
    found = []
    for seed in (5, 6, 5):
        ours = lm.capture([{"prompt": text, "multi_modal_data": {"image": picture(seed)}}], layers=[2])
        theirs = hf.capture([in_process(processor, text, [picture(seed)])], layers=[2])
        assert relative(ours.rows(2), theirs.rows(2)) < 1e-4
        found.append(ours)
    assert [one.receipt.reused for one in found] == [0, 0, 32]


def test_images_are_steered_and_scored(both: Both) -> None:
    lm, hf, processor = both
    text, image = "see <image> here", picture(7)
    spec = ms.add(
        torch.randn(128, generator=torch.Generator().manual_seed(0)), layers=[0], strength=3.0, rows="prompt[4:6]"
    )
    mine: Any = {"prompt": text, "multi_modal_data": {"image": image}}
    ours = lm.capture([mine], layers=[0, 2], steering=spec)
    theirs = hf.capture([in_process(processor, text, [image])], layers=[0, 2], steering=spec)
    for key, rows in theirs.tensors.items():
        assert relative(ours.tensors[key], rows) < 1e-4
    scores = lm.score([mine], [[5, 6, 7]], steering=spec)
    want = hf.score([in_process(processor, text, [image])], [[5, 6, 7]], steering=spec)
    torch.testing.assert_close(scores, want, atol=5e-4, rtol=1e-4)


def test_images_that_do_not_fit_are_refused(both: Both) -> None:
    lm, *_ = both
    for prompt in (
        {"prompt": "no place for it", "multi_modal_data": {"image": picture(1)}},
        {"prompt": "<image>", "multi_modal_data": {"video": picture(1)}},
        {"prompt": "<image><image><image>", "multi_modal_data": {"image": [picture(1)] * 3}},
    ):
        with pytest.raises(PromptError, match="prompt 0: vLLM refuses its multi_modal_data: ") as raised:
            lm.capture([prompt])
        assert "\n" not in str(raised.value)
    assert lm.capture(["still alive"]).receipt.complete
