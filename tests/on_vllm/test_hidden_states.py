"""EasySteer's entry points on an engine that somebody else made, beside the model in process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
import midstream.compat.hidden_states as hs
from midstream.core.errors import ModelLoadError, SpecError
from on_vllm.kit import relative

TEXTS = ["What is steering?", "Explain PCA.", "Hi"]


@pytest.fixture(scope="module")
def llm(bytes_llama: tuple[Path, ms.LanguageModel], users_llm: Callable[..., Any]) -> Iterator[Any]:
    with users_llm(bytes_llama[0]) as made:
        yield made


@pytest.fixture(scope="module")
def lm(bytes_llama: tuple[Path, ms.LanguageModel]) -> ms.LanguageModel:
    return bytes_llama[1]


def same(ours: hs.Captured, theirs: ms.CaptureResult) -> None:
    assert ours.layer_ids == list(theirs.layer_ids)
    for index in range(len(theirs.outputs)):
        assert ours.sample_positions(index) == list(theirs.sample_positions(index))
        assert ours.sample_token_ids(index) == list(theirs.sample_token_ids(index))
        for layer, rows in theirs.sample(index).items():
            assert relative(ours.sample(index)[layer].float(), rows.float()) < 1e-4


def test_the_documented_capture(llm: Any, lm: ms.LanguageModel) -> None:
    tokenizer = llm.get_tokenizer()
    prompts: list[Any] = [{"prompt_token_ids": tokenizer.encode(text)} for text in TEXTS]
    result = hs.capture(llm, prompts=prompts, max_tokens=1, layers=[0, 2], dtype="float64")
    same(result, lm.capture(prompts, layers=[0, 2], dtype="float64"))
    assert result.rows(0).dtype == torch.float64
    assert [type(one).__name__ for one in result.outputs] == ["RequestOutput"] * 3
    assert [one.prompt_token_ids for one in result.outputs] == [one["prompt_token_ids"] for one in prompts]
    assert len(result) == len(result.to_nested()) == 3
    assert result.labelled
    labels = result.meta(0)
    assert len(labels) == len(result.rows(0))
    assert labels.req_ids[0] == result.outputs[0].request_id
    assert torch.equal(result.token(1, 2, -1), result.sample_rows(1, 2)[-1])
    assert result.layouts == {0: {"width": 128}, 2: {"width": 128}}


def test_texts_selections_and_steering(llm: Any, lm: ms.LanguageModel) -> None:
    spec = ms.add(torch.ones(128), layers=[1], strength=3.0)
    select = ms.SelectSpec(prompt_positions=[-1])
    each = [None, ms.SelectSpec(generation="all"), {"prompt": "all"}]
    given: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "steering": [spec, None, spec]}
    ours = hs.capture(llm, TEXTS, select=select, per_prompt_selects=each, **given)
    same(ours, lm.capture(TEXTS, rows=select, per_prompt_rows=each, **given))
    plain = lm.generate(TEXTS, max_tokens=4, ignore_eos=True, steering=[spec, None, spec])
    assert [one.outputs[0].text for one in ours.outputs] == [one.text for one in plain]


def test_choices_are_one_output(llm: Any) -> None:
    ours = hs.capture(llm, TEXTS[:2], max_tokens=3, n=2, temperature=1.5, seed=3, ignore_eos=True)
    assert [[choice.index for choice in one.outputs] for one in ours.outputs] == [[0, 1], [0, 1]]
    tokens = ours.result.outputs[0].choices[1].token_ids
    assert tuple(ours.outputs[0].outputs[1].token_ids) == tokens


def test_streams_and_wrappers(llm: Any, lm: ms.LanguageModel) -> None:
    heads = hs.capture(llm, TEXTS, layers=[1], stream="attention_heads", select="prompt[-1]", steering=False)
    assert heads.layouts[1] == {"width": 128, "num_heads": 4, "head_size": 32}
    same(heads, lm.capture(TEXTS, layers=[1], site="head_out", rows="prompt[-1]"))
    nested, outputs = hs.get_all_hidden_states_generate(llm, TEXTS)
    assert [len(sample) for sample in nested] == [3, 3, 3]
    assert [len(sample[0]) for sample in nested] == [len(one.prompt_token_ids) for one in outputs]
    flat, _ = hs.get_all_hidden_states_generate(llm, TEXTS, split_by_samples=False)
    assert torch.equal(torch.cat([sample[2] for sample in nested]), flat[2])
    batches = list(hs.capture_batches(llm, TEXTS, batch_size=2, layers=[1], select="prompt[-1]"))
    assert [len(one) for one in batches] == [2, 1]
    assert relative(torch.cat([one.rows(1) for one in batches]), lm.capture(TEXTS, rows="prompt[-1]").rows(1)) < 1e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"positions": [-1]}, "E_UNKNOWN_FIELD at positions: name rows with select="),
        ({"reduce": "mean"}, "E_UNKNOWN_FIELD at reduce"),
        ({"stream": "attention"}, "E_SITE at stream"),
        ({"stream": "router_logits"}, "no router_logits: it has no experts"),
        ({"temperatur": 1}, "E_UNKNOWN_FIELD"),
        ({"layers": [9]}, "E_LAYER_RANGE"),
        ({"budget_bytes": 100}, "budget_bytes is 100"),
    ],
)
def test_refused(llm: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, ms.CaptureError)) as raised:
        hs.capture(llm, TEXTS, **given)
    assert message in str(raised.value)


def test_an_engine_of_the_callers_is_not_changed_by_options(llm: Any) -> None:
    with pytest.raises(SpecError, match="E_BAD_PARAM at dtype: the model is loaded already"):
        ms.load(llm, backend="vllm", dtype="float16")
    with pytest.raises(SpecError, match="E_BAD_PARAM at graph_sites"):
        ms.load(llm, backend="vllm", graph_sites=[])
    with pytest.raises(ModelLoadError, match="cannot be served"):
        ms.load(object(), backend="vllm")


# --- requests that others submit


def params(**given: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 4, **given})


def test_requests_of_others(llm: Any, lm: ms.LanguageModel) -> None:
    want = lm.capture(TEXTS, layers=[0, 2], max_tokens=4, ignore_eos=True)
    llm.generate(TEXTS, params(), use_tqdm=False)  # in the prefix cache from now on
    hs.start_capture(llm, "hidden_states", layers=[0, 2])
    outputs = llm.generate(TEXTS, params(), use_tqdm=False)
    kept = hs.fetch_captured(llm, clear=False)
    same(kept, want)
    assert [one.request_id for one in kept.outputs] == [one.request_id for one in outputs]
    one = hs.fetch_captured(llm, req_ids=[outputs[1].request_id])
    same(one, lm.capture(TEXTS[1:2], layers=[0, 2], max_tokens=4, ignore_eos=True))
    with pytest.raises(ms.CaptureError, match=f"request '{outputs[1].request_id}' is not known here"):
        hs.fetch_captured(llm, req_ids=[outputs[1].request_id])
    assert len(hs.fetch_captured(llm)) == 2
    assert len(hs.fetch_captured(llm)) == 0
    hs.stop_capture(llm)
    llm.generate(TEXTS, params(), use_tqdm=False)
    assert len(hs.fetch_captured(llm)) == 0


def test_several_choices_of_others(llm: Any, lm: ms.LanguageModel) -> None:
    hs.start_capture(llm, layers=[1])
    (output,) = llm.generate([TEXTS[0]], params(n=3, temperature=1.5, seed=1), use_tqdm=False)
    found = hs.fetch_captured(llm).result
    prompt = output.prompt_token_ids
    want = lm.capture([prompt], layers=[1]).rows(1)
    assert relative(found.rows(1)[found.labels.choice == -1], want) < 1e-4
    for choice in output.outputs:
        ids = [*prompt, *choice.token_ids[:-1]]
        mine = torch.from_numpy(found.labels.choice == choice.index)
        assert relative(found.rows(1)[mine], lm.capture([ids], layers=[1]).rows(1)[len(prompt) :]) < 1e-4
    hs.stop_capture(llm)


def test_an_incomplete_capture_raises_and_the_others_can_be_fetched(llm: Any, lm: ms.LanguageModel) -> None:
    engine = llm.llm_engine
    prompt = {"prompt_token_ids": [5, 6, 7]}
    engine.add_request("early", prompt, params(max_tokens=12))
    engine.step()
    hs.start_capture(llm, layers=[1], select={"prompt": "all"})
    engine.add_request("late", prompt, params())
    engine.add_request("late-2", {"prompt_token_ids": [5, 6, 7, 8]}, params(max_tokens=2))
    engine.add_request("gone", prompt, params(max_tokens=30))
    engine.step()
    engine.abort_request(["gone"])
    with pytest.raises(ms.CaptureError, match="request 'late' still runs"):
        hs.fetch_captured(llm, req_ids=["late"])
    while engine.has_unfinished_requests():
        engine.step()
    for one, why in (("early", "was running when the capture began"), ("gone", "was aborted")):
        with pytest.raises(ms.CaptureError, match=f"request '{one}' {why}: fetch the others with req_ids="):
            hs.fetch_captured(llm, req_ids=["late", one])
    found = hs.fetch_captured(llm, req_ids=["late-2", "late"])
    same(found, lm.capture([[5, 6, 7, 8], [5, 6, 7]], layers=[1]))
    with pytest.raises(ms.CaptureError, match="was running when the capture began"):
        hs.fetch_captured(llm)
    hs.clear_captured(llm)
    assert len(hs.fetch_captured(llm)) == 0
    llm.generate([prompt], params(), use_tqdm=False)
    assert len(hs.fetch_captured(llm)) == 1
    hs.stop_capture(llm)


def test_outputs_that_come_in_parts(llm: Any, lm: ms.LanguageModel) -> None:
    from vllm.sampling_params import RequestOutputKind

    engine, prompt = llm.llm_engine, [5, 6, 7]
    hs.start_capture(llm, layers=[1])
    for kind in RequestOutputKind:
        engine.add_request(kind.name, {"prompt_token_ids": prompt}, params(max_tokens=5, output_kind=kind))
    with pytest.raises(ms.BusyError, match="runs requests of others"):
        hs.capture(llm, TEXTS)
    while engine.has_unfinished_requests():
        engine.step()
    found = hs.fetch_captured(llm)
    want = lm.capture([prompt], layers=[1], max_tokens=5, ignore_eos=True)
    for index in range(len(RequestOutputKind)):
        assert relative(found.sample(index)[1], want.rows(1)) < 1e-4
        assert found.result.outputs[index].token_ids == want.outputs[0].token_ids
    hs.stop_capture(llm)


def test_a_request_that_vllm_refuses_is_none_of_the_captured(llm: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    hs.start_capture(llm, layers=[1])
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        llm.generate([{"prompt_token_ids": [5] * 300}], params(), use_tqdm=False)
    assert len(hs.fetch_captured(llm)) == 0
    with pytest.raises(SpecError, match=r"E_BAD_PARAM at extra_args\.midstream: is written by calls of an lm"):
        llm.llm_engine.add_request("x", {"prompt_token_ids": [5]}, params(extra_args={"midstream": '{"id":"y"}'}))
    hs.stop_capture(llm)


def test_one_stream_at_a_time(llm: Any) -> None:
    hs.start_capture(llm, "hidden_states")
    with pytest.raises(ms.BusyError, match="resid_post stands on this engine: stop it first"):
        hs.start_capture(llm, "attention_heads")
    with pytest.raises(SpecError, match="no capture of attention_heads was started"):
        hs.fetch_captured(llm, "attention_heads")
    hs.stop_capture(llm)
    hs.start_capture(llm, "attention_heads", layers=[1], dtype="float16")
    llm.generate([TEXTS[0]], params(), use_tqdm=False)
    assert hs.fetch_captured(llm, "attention_heads").rows(1).dtype == torch.float16
    hs.stop_capture(llm, "attention_heads")
    with pytest.raises(SpecError, match="E_LAYER_RANGE"):
        hs.start_capture(llm, layers=[3])
