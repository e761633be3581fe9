"""Bad input is refused before the model runs, in one line: what was asked, what exists, what to type."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from parity.architectures import ARCHITECTURES, extra_inputs, prompt

GOOD: Any = [[1, 5, 9], [1, 7]]
SELECTION, PROMPT = "E_SELECTION", ms.PromptError

#: Name → (arguments of `capture`, the error's class or code, what its line holds).
CAPTURES: dict[str, tuple[dict[str, Any], Any, tuple[str, ...]]] = {
    # layers
    "layer beyond": ({"layers": [0, 3]}, "E_LAYER_RANGE", ("layers[1]", "3", "0 to 2")),
    "layer negative": ({"layers": [-1]}, "E_LAYER_RANGE", ("-1", "0 to 2")),
    "layer boolean": ({"layers": [True]}, "E_LAYER_RANGE", ("True", "0 to 2")),
    "layer text": ({"layers": ["one"]}, "E_LAYER_RANGE", ("one", "0 to 2")),
    "layer fraction": ({"layers": [1.5]}, "E_LAYER_RANGE", ("1.5", "0 to 2")),
    "no layers": ({"layers": []}, "E_LAYER_RANGE", ("empty", "0 to 2")),
    # sites
    "site typo": ({"site": "resid_pst"}, "E_SITE", ("resid_pst", "resid_post", "attn_out")),
    "site of TransformerLens": ({"site": "blocks.0.hook_resid_post"}, "E_SITE", ("hook_resid_post", "resid_post")),
    "site layer_input": ({"site": "layer_input"}, "E_SITE", ("layer_input", "'resid_pre'")),
    "site layer_output": ({"site": "layer_output"}, "E_SITE", ("layer_output", "'resid_post'")),
    "site hidden_states": ({"site": "hidden_states"}, "E_SITE", ("hidden_states", "'resid_post'")),
    "site residual": ({"sites": ["q", "residual"]}, "E_SITE", ("sites[1]", "residual", "'resid_post'")),
    "site attn": ({"site": "attn"}, "E_SITE", ("attn", "'attn_out'")),
    "site mlp": ({"site": "mlp"}, "E_SITE", ("mlp", "'mlp_out'")),
    "site attention_heads": ({"site": "attention_heads"}, "E_SITE", ("attention_heads", "'head_out'")),
    "site that it has not": ({"site": "router_logits"}, "E_SITE", ("router_logits", "experts", "resid_post")),
    "no sites": ({"sites": []}, "E_SITE", ("sites", "resid_post")),
    "site number": ({"sites": [3]}, "E_SITE", ("3", "resid_post")),
    # storage
    "dtype typo": ({"dtype": "flaot16"}, "E_BAD_PARAM", ("dtype", "flaot16", "float16", "bfloat16")),
    "dtype unknown": ({"dtype": torch.int8}, "E_BAD_PARAM", ("int8", "int32")),
    # rows
    "rows typo": ({"rows": "promt[-1]"}, SELECTION, ("rows", "promt", "prompt[-1]")),
    "rows open": ({"rows": "prompt[-1"}, SELECTION, ("prompt[-1",)),
    "rows empty": ({"rows": ""}, SELECTION, ("rows",)),
    "rows trailing comma": ({"rows": "prompt,"}, SELECTION, ("prompt",)),
    "rows word": ({"rows": "prompt[last]"}, SELECTION, ("last",)),
    "rows backwards": ({"rows": "prompt[5:2]"}, SELECTION, ("[5, 2]",)),
    "rows negative generated": ({"rows": "generated[-1]"}, SELECTION, ("-1", "prompt")),
    "rows negative sequence": ({"rows": "sequence[-1]"}, SELECTION, ("-1", "prompt")),
    "rows exclude alone": ({"rows": "!prompt[0]"}, SELECTION, ("rows",)),
    "rows exclude of another phase": ({"rows": "prompt, !generated[0]"}, SELECTION, ("generation",)),
    "rows unknown field": ({"rows": {"promt": "all"}}, "E_UNKNOWN_FIELD", ("rows.promt", "prompt_positions")),
    "rows no field": ({"rows": {}}, SELECTION, ("rows", "prompt")),
    "rows empty list": ({"rows": {"prompt_positions": []}}, SELECTION, ("prompt_positions", "empty")),
    "rows number": ({"rows": 3}, SELECTION, ("rows", "int")),
    "rows per prompt, too few": ({"per_prompt_rows": ["prompt"]}, SELECTION, ("per_prompt_rows", "1", "2")),
    "rows per prompt, typo": ({"per_prompt_rows": [None, "promt"]}, SELECTION, ("per_prompt_rows[1]", "promt")),
    # prompts
    "no prompts": ({"prompts": []}, "E_BAD_PARAM", ("prompts",)),
    "prompt of no tokens": ({"prompts": [[1, 5], []]}, PROMPT, ("prompt 1", "no tokens")),
    "prompt masked away": (
        {"prompts": {"input_ids": [[1, 5], [1, 5]], "attention_mask": [[1, 1], [0, 0]]}},
        PROMPT,
        ("prompt 1", "no tokens"),
    ),
    "prompt beyond the context": ({"prompts": [[1], [1] * 257]}, PROMPT, ("prompt 1", "257", "256")),
    "tokens beyond the context": ({"prompts": [[1], [1] * 250], "max_tokens": 8}, PROMPT, ("prompt 1", "257", "256")),
    "token beyond the vocabulary": ({"prompts": [[1, 5], [1, 160, 5]]}, PROMPT, ("prompt 1", "160", "159")),
    "token negative": ({"prompts": [[1, 5], [1, -2]]}, PROMPT, ("prompt 1", "-2")),
    "token boolean": ({"prompts": [[1, 5], [1, True]]}, PROMPT, ("prompt 1",)),
    "token fraction": ({"prompts": torch.tensor([[1.0, 5.0]])}, PROMPT, ("prompt 0", "1.0")),
    "prompt too deep": ({"prompts": [[[1, 5]]]}, PROMPT, ("prompt 0",)),
    "prompt None": ({"prompts": [[1], None]}, PROMPT, ("prompt 1", "None", "token ids")),
    "prompts None": ({"prompts": None}, (ms.MidstreamError, "E_BAD_PARAM"), ("prompt",)),
    "prompts number": ({"prompts": 5}, (ms.MidstreamError, "E_BAD_PARAM"), ("prompt", "5")),
    "prompt bytes": ({"prompts": [b"text"]}, PROMPT, ("prompt 0", "bytes", "text")),
    "prompt text": ({"prompts": ["text"]}, PROMPT, ("prompt 0", "tokenizer", "token ids")),
    "prompt embeddings": (
        {"prompts": [[1], {"prompt_embeds": torch.zeros(2, 64)}]},
        PROMPT,
        ("prompt 1", "embeddings"),
    ),
    "input embeddings": ({"prompts": {"inputs_embeds": torch.zeros(1, 2, 64)}}, PROMPT, ("prompt 0", "embeddings")),
    "embeddings as data": (
        {"prompts": {"prompt_token_ids": [1, 5], "multi_modal_data": {"inputs_embeds": torch.zeros(1, 2, 64)}}},
        PROMPT,
        ("prompt 0", "inputs_embeds"),
    ),
    "image for a text model": (
        {"prompts": [[1], {"prompt_token_ids": [1, 5], "multi_modal_data": {"pixel_values": torch.zeros(1, 3, 8, 8)}}]},
        PROMPT,
        ("prompt 1", "pixel_values", "text alone"),
    ),
    "prompt key": ({"prompts": [{"prompt_tokens": [1, 5]}]}, PROMPT, ("prompt_tokens", "prompt_token_ids")),
    "two prompts in one": ({"prompts": {"messages": [], "input_ids": [1, 5]}}, PROMPT, ("messages", "input_ids")),
    "mask of another length": ({"prompts": {"input_ids": [1, 5], "attention_mask": [1]}}, PROMPT, ("2", "1", "mask")),
    # generation
    "option typo": ({"temperatur": 1.0}, "E_UNKNOWN_FIELD", ("temperatur", "temperature")),
    "no tokens": ({"max_tokens": 0}, "E_BAD_PARAM", ("max_tokens", "0")),
    "tokens as text": ({"max_tokens": "5"}, "E_BAD_PARAM", ("max_tokens",)),
    "tokens boolean": ({"max_tokens": True}, "E_BAD_PARAM", ("max_tokens", "bool")),
    "more min than max": ({"max_tokens": 4, "min_tokens": 5}, "E_BAD_PARAM", ("min_tokens", "5", "4")),
    "temperature negative": ({"max_tokens": 4, "temperature": -1.0}, "E_BAD_PARAM", ("temperature", "-1")),
    "temperature NaN": ({"max_tokens": 4, "temperature": float("nan")}, "E_BAD_PARAM", ("temperature", "nan")),
    "greedy and warm": ({"max_tokens": 4, "temperature": 0.5, "greedy": True}, "E_BAD_PARAM", ("greedy", "0.5")),
    "top_p zero": ({"max_tokens": 4, "top_p": 0.0}, "E_BAD_PARAM", ("top_p",)),
    "top_k zero": ({"max_tokens": 4, "top_k": 0}, "E_BAD_PARAM", ("top_k",)),
    "no choices": ({"max_tokens": 4, "n": 0}, "E_BAD_PARAM", ("n",)),
    "seed scope": ({"max_tokens": 4, "seed_scope": "call"}, "E_BAD_PARAM", ("seed_scope", "call", "dispatch")),
    "stop without a tokenizer": (
        {"max_tokens": 4, "stop": ["."]},
        "E_BAD_PARAM",
        ("stop", "tokenizer", "stop_token_ids"),
    ),
    "stop empty": ({"max_tokens": 4, "stop": [""]}, "E_BAD_PARAM", ("stop[0]",)),
    "extra": ({"max_tokens": 4, "extra": {"num_beams": 2}}, "E_UNKNOWN_KIND", ("extra", "lm.generate")),
    "constraint": ({"max_tokens": 4, "constraint": {"regex": "a"}}, "E_CONSTRAINT", ("constraint",)),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captures_are_refused_before_the_model_runs(name: str, tiny: Any, tools: Any) -> None:
    given, error, parts = CAPTURES[name]
    one = tiny("llama")
    with tools.calls(one.model.model.layers[0]) as seen, pytest.raises(ms.MidstreamError) as caught:
        one.lm.capture(**{"prompts": GOOD, **given})
    assert seen == []
    if isinstance(error, str):
        assert isinstance(caught.value, ms.SpecError)
        codes = {error, "E_UNKNOWN_KIND"} if error == "E_CONSTRAINT" else {error}
        assert caught.value.code in codes
        unsupported = caught.value.code in ("E_UNKNOWN_KIND", "E_SITE", "E_CONSTRAINT")
        assert isinstance(caught.value, ms.UnsupportedOperationError) == unsupported
        assert str(caught.value).startswith(f"{caught.value.code} at ")
        assert caught.value.path
    elif isinstance(error, type):
        assert isinstance(caught.value, error)
        assert str(caught.value).startswith("prompt ")
    tools.one_line(str(caught.value), *parts)
    assert len(str(caught.value)) < 600
    assert tools.hook_count(one.model) == 0


def test_a_capture_may_follow_one_that_was_refused(tiny: Any) -> None:
    one = tiny("llama")
    for name in ("layer beyond", "site typo", "token beyond the vocabulary", "stop without a tokenizer"):
        with pytest.raises(ms.MidstreamError):
            one.lm.capture(**{"prompts": GOOD, **CAPTURES[name][0]})
    one.assert_rows(one.lm.capture(GOOD, sites=one.sites))


def test_text_without_tokens_names_its_place(fresh: Any, words: Any, tools: Any) -> None:
    one = fresh("llama", tokenizer=words)
    with tools.calls(one.model.model.layers[0]) as seen, pytest.raises(ms.PromptError) as caught:
        one.lm.capture(["w010", "w011", ""], add_special_tokens=False)
    tools.one_line(str(caught.value), "prompt 2", "no tokens")
    assert seen == []


def test_multimodal_data_cannot_say_where_rows_are_or_what_comes_back(tiny: Any, tools: Any) -> None:
    """Positions, masks and caches are the engine's: rows would contradict their labels."""
    one, zeros = tiny("llava"), torch.zeros(1, 24, dtype=torch.long)
    data: list[Any] = [{name: zeros} for name in ("position_ids", "attention_mask", "labels")]
    data += [{"use_cache": True}, {"cache": None}, {"logits_to_keep": 1}, {"image": "cat.png"}]
    for given in data:
        with tools.calls(one.model.model.language_model.layers[0]) as seen, pytest.raises(ms.MidstreamError) as caught:
            one.lm.capture([[1, 5], {"prompt_token_ids": prompt("llava"), "multi_modal_data": given}], max_tokens=2)
        tools.one_line(str(caught.value), "prompt 1", "pixel_values")
        assert seen == []
    with pytest.raises(ms.PromptError) as caught:
        one.lm.capture([[1, 5], {"prompt_token_ids": prompt("llava"), "multi_modal_data": ["cat.png"]}])
    tools.one_line(str(caught.value), "prompt 1", "tensors by name")


def test_multimodal_data_that_does_not_fit_names_its_prompt(tiny: Any, tools: Any) -> None:
    one, image = tiny("llava"), extra_inputs("llava")
    one.model(input_ids=torch.tensor([prompt("llava")]), **image)  # transformers puts hooks of its own on the tower
    before = tools.hook_count(one.model)
    for max_tokens in (1, 3):
        for ids in ([1, 5, 6], [1, 150, 6]):
            given = {"prompt_token_ids": ids, "multi_modal_data": image}
            cap = one.lm.capture([[1, 5], given, [7, 8, 9]], max_tokens=max_tokens)
            tools.one_line(str(cap.errors[1]), "prompt 1")
            with pytest.raises(ms.PromptError):
                cap.sample(1)
            assert set(cap.labels.sample.tolist()) == {0, 2}  # the others stay
            assert len(cap.sample(2)[0]) == 2 + max_tokens
            assert tools.hook_count(one.model) == before
    with pytest.raises(ms.PromptError) as caught:
        one.lm.capture([[1, 5], {"prompt_token_ids": prompt("llava"), "multi_modal_data": {"pixel_values": [1, 2]}}])
    tools.one_line(str(caught.value), "prompt 1", "pixel_values", "tensor")


def test_results_are_asked_for_what_they_have(tiny: Any, tools: Any) -> None:
    cap = tiny("llama").lm.capture(GOOD, layers=[0, 2], sites=["q", "k"])
    asks: list[tuple[Any, tuple[str, ...]]] = [
        (lambda: cap.rows(1, "q"), ("1", "0", "2")),
        (lambda: cap.rows(0), ("site", "q", "k")),
        (lambda: cap.rows(0, "resid_post"), ("resid_post", "q", "k")),
        (lambda: cap.sample(2, "q"), ("2",)),
        (lambda: cap.meta(1), ("1", "0", "2")),
    ]
    for ask, parts in asks:
        with pytest.raises((ms.SpecError, IndexError)) as caught:
            ask()
        tools.one_line(str(caught.value), *parts)


# --- loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama, saved."""
    path = tmp_path_factory.mktemp("models") / "llama"
    ARCHITECTURES["llama"]().save_pretrained(path)
    return path


def _truncate(path: Path) -> None:
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size // 2)


def _lack_a_layer(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}
    save_file(kept, path / "model.safetensors", {"format": "pt"})


def _configure(**changes: Any) -> Any:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return change


#: Name → (what is done to a good folder, arguments of `load`, what the line holds).
LOADS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "unknown name": (None, {"model": "smolm2"}, ("'smolm2'", "folder", "'smollm2'")),
    "unknown hub id": (None, {"model": "nobody/no-such-model"}, ("'nobody/no-such-model'", "folder", "'smollm2'")),
    "no such folder": (None, {"model": "./no-such-folder"}, ("'./no-such-folder'", "folder")),
    "no config": (lambda path: (path / "config.json").unlink(), {}, ("config.json", "folder", "'smollm2'")),
    "config of another kind": (_configure(model_type="no_such_kind"), {}, ("no_such_kind",)),
    "config that is no JSON": (lambda path: (path / "config.json").write_text("{"), {}, ("JSON",)),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), {}, ("model.safetensors",)),
    "weights cut short": (_truncate, {}, ("cannot load",)),
    "weights of another shape": (_configure(intermediate_size=128), {}, ("cannot load",)),
    "weights without a layer": (_lack_a_layer, {}, ("model.layers.1",)),
    "backend typo": (None, {"backend": "vlm"}, ("vlm", "huggingface")),
    "dtype typo": (None, {"dtype": "flaot32"}, ("dtype", "flaot32", "float32", "bfloat16")),
    "dtype of integers": (None, {"dtype": "int8"}, ("int8", "float32")),
    "dtype of eight bits": (None, {"dtype": "float8_e4m3fn"}, ("float8_e4m3fn", "float32")),
    "dtype twice": (
        None,
        {"dtype": "float32", "hf_model_kwargs": {"dtype": "bfloat16"}},
        ("float32", "bfloat16", "hf_model_kwargs", "one"),
    ),
    "device typo": (None, {"device": "cpuu"}, ("cpuu", "cpu")),
    "option typo": (None, {"trust_remote": True}, ("trust_remote", "trust_remote_code")),
    "model option typo": (None, {"hf_model_kwargs": {"atn_implementation": "eager"}}, ("atn_implementation",)),
    "no such tokenizer": (None, {"tokenizer_name_or_path": "/no/such/folder"}, ("tokenizer", "/no/such/folder")),
}


@pytest.mark.parametrize("name", LOADS)
def test_loads_are_refused_in_one_line(name: str, folder: Path, tmp_path: Path, tools: Any) -> None:
    spoil, given, parts = LOADS[name]
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    if spoil is not None:
        spoil(path)
    with pytest.raises(ms.MidstreamError) as caught:
        ms.load(**{"model": str(path), **given})
    tools.one_line(str(caught.value), *parts)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("model", [None, 5, torch.nn.Linear(2, 2), ["smollm2"]], ids=["None", "5", "Linear", "list"])
def test_what_is_no_model_is_refused(model: Any, tools: Any) -> None:
    with pytest.raises(ms.MidstreamError) as caught:
        ms.load(model)
    tools.one_line(str(caught.value))


def test_options_that_a_loaded_model_cannot_take(fresh: Any, tools: Any) -> None:
    model = fresh("llama").model
    for given in ({"dtype": "float32"}, {"device": "cpu"}, {"trust_remote_code": True}):
        with pytest.raises(ms.SpecError) as caught:
            ms.load(model, **given)
        tools.one_line(str(caught.value), *given, "loaded already")


def test_a_tokenizer_given_to_load_serves_for_all(folder: Path, words: Any) -> None:
    with ms.load(folder, tokenizer=words) as lm:
        assert lm.tokenizer is words
        cap = lm.capture("w010 w011", max_tokens=6, ignore_eos=True)
        assert [row.text for row in cap.tokens(0)][:3] == ["<s>", "w010", "w011"]
        text = cap.outputs[0].text
        assert text == words.decode(list(cap.outputs[0].token_ids), skip_special_tokens=True)
        stop = text.split()[2]
        cut = lm.capture("w010 w011", max_tokens=6, ignore_eos=True, stop=stop).outputs[0]
        assert (cut.text, cut.finish_reason) == (text.split(stop)[0], "stop")


def test_a_saved_model_loads_with_the_same_dtype_said_twice(folder: Path, tiny: Any) -> None:
    with ms.load(folder, dtype="auto", hf_model_kwargs={"dtype": "float32"}) as lm:
        tiny("llama").assert_rows(lm.capture(GOOD, sites=tiny("llama").sites))
    with ms.load(str(folder), dtype=torch.float32, hf_model_kwargs={"dtype": "float32"}) as lm:
        assert lm.facts.dtype == "float32"
        tiny("llama").assert_rows(lm.capture(GOOD, max_tokens=3))
