"""Texts through every entry: stop strings, BOS, structured output, streams; and an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.core.errors import SpecError
from on_vllm.checkpoints import lora_adapter
from on_vllm.kit import ENGINE, Checkpoint, Engines, relative


@pytest.fixture(scope="module", params=["vllm", "vllm-serve"])
def both(
    request: Any, bytes_llama: tuple[Path, ms.LanguageModel], engines: Engines
) -> tuple[ms.LanguageModel, ms.LanguageModel]:
    """A llama that reads bytes: on an engine, and in process."""
    folder, lm = bytes_llama
    return engines.at(request.param, folder), lm


Both = tuple[ms.LanguageModel, ms.LanguageModel]
CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("prompt", ["hello there", CHAT, [5, 6, 7], {"prompt_token_ids": [5, 6, 7]}])
def test_every_form_of_prompt_has_the_ids_and_rows_that_it_has_in_process(both: Both, prompt: Any) -> None:
    ours, theirs = (lm.capture(prompt, max_tokens=3, ignore_eos=True) for lm in both)
    assert ours.labels == theirs.labels
    assert ours.outputs[0].text == theirs.outputs[0].text
    for key, rows in theirs.tensors.items():
        assert relative(ours.tensors[key], rows) < 1e-4
    if prompt is CHAT:
        assert ours.outputs[0].prompt_token_ids.count(0) == 1, "BOS once"


def test_stop_strings_end_texts_where_they_do_in_process(both: Both) -> None:
    whole = both[1].generate(["hello"], max_tokens=24, ignore_eos=True)[0]
    assert whole.text
    stop = whole.text[6:8]
    ours, theirs = (lm.generate(["hello"], max_tokens=24, ignore_eos=True, stop=[stop])[0] for lm in both)
    assert (ours.text, ours.finish_reason, ours.token_ids) == (theirs.text, "stop", theirs.token_ids)
    captured = both[0].capture(["hello"], max_tokens=24, ignore_eos=True, stop=[stop])
    assert captured.outputs[0].token_ids == theirs.token_ids
    assert len(captured.labels) == len(theirs.prompt_token_ids) + len(theirs.token_ids) - 1
    chunks = list(both[0].stream("hello", max_tokens=24, ignore_eos=True, stop=[stop]))
    assert "".join(chunk.text for chunk in chunks) == theirs.text


def test_log_probabilities_are_those_in_process(both: Both) -> None:
    given: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2}
    ours, theirs = (lm.generate(["hello there"], **given)[0] for lm in both)
    for mine, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
        assert mine is not None
        assert other is not None
        for a, b in zip(mine, other, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.token_id, [token for token, _ in a.top]) == (b.token_id, [token for token, _ in b.top])
                assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_structured_output_is_compact(both: Both) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    for constraint in ({"json_schema": schema}, {"json_schema": json.dumps(schema)}):
        (one,) = both[0].generate(["hello"], max_tokens=20, constraint=constraint)
        assert one.text in ('{"a":1}', '{"a":2}')
        assert one.finish_reason == "eos"
    (one,) = both[0].generate(["hello"], max_tokens=20, constraint={"choice": ["yes", "no"]})
    assert one.text in ("yes", "no")
    (one,) = both[0].generate(["hello"], max_tokens=20, constraint={"regex": "[ab]{3}"})
    assert one.text is not None
    assert set(one.text) <= {"a", "b"}
    (one,) = both[0].generate(["hello"], max_tokens=20, constraint={"grammar": 'root ::= "x" "y"'})
    assert one.text == "xy"
    with pytest.raises((SpecError, ms.PromptError)) as raised:
        both[0].generate(["hello"], max_tokens=20, constraint={"regex": "[a"})
    assert "\n" not in str(raised.value)


def test_steering_through_every_entry_differs_or_is_refused(both: Both) -> None:
    lm = both[0]
    spec = ms.add(torch.randn(128, generator=torch.Generator().manual_seed(0)), layers=[1], strength=30.0)
    plain = lm.generate(["hello", "there"], max_tokens=6, ignore_eos=True)
    assert [one.text for one in lm.generate(["hello", "there"], max_tokens=6, ignore_eos=True, steering=spec)] != [
        one.text for one in plain
    ]
    *_, last = lm.stream("hello", max_tokens=6, ignore_eos=True, steering=spec)
    assert last.completion is not None
    assert last.completion.text != plain[0].text
    cap = lm.capture(["hello"], layers=[2], max_tokens=6, ignore_eos=True, steering=spec)
    assert cap.outputs[0].text == last.completion.text
    assert not torch.equal(lm.score(["hello"], [" yes"], steering=spec), lm.score(["hello"], [" yes"]))
    assert lm.generate([CHAT], max_tokens=6, ignore_eos=True, steering=spec)[0].text != (
        lm.generate([CHAT], max_tokens=6, ignore_eos=True)[0].text
    )


def test_an_adapter_is_merged_weights(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, engines: Engines
) -> None:
    """Captures through a LoRA of rank 4 equal those of the model with its product added."""
    engines.close()
    source = checkpoint("llama")
    merged, adapter = lora_adapter(tmp_path)
    given: dict[str, Any] = {"sites": ["resid_post", "head_out", "attn_out"], "max_tokens": 3, "ignore_eos": True}
    prompts = [[5, 6, 7], list(range(10, 30))]
    want = ms.load(merged).capture(prompts, **given)
    with ms.load(str(source.folder), backend="vllm", dtype="float32", engine_kwargs=ENGINE, lora=str(adapter)) as lm:
        got = lm.capture(prompts, **given)
    assert got.labels == want.labels
    for key, rows in want.tensors.items():
        assert relative(got.tensors[key], rows) < 1e-4, key
    plain = source.hf.capture(prompts, **given)
    assert relative(got.tensors["resid_post", 2], plain.tensors["resid_post", 2]) > 1e-2
