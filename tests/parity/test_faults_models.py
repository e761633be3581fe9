"""Models that the caller owns: adopted, changed, shared, closed, and of unusual habits."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.backends.huggingface.backend import HuggingFaceBackend
from midstream.core.backend import BackendSpec
from midstream.core.capture import CaptureSpec
from parity.architectures import ARCHITECTURES, extra_inputs, prompt


def prompts_of(*lengths: int, seed: int = 71) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def right_or_refused(one: Any, make: Any, tools: Any, **settings: Any) -> None:
    """What `make` loads captures the oracle's rows, or one line says why it does not; nothing in between."""
    try:
        lm = make()
        cap = lm.capture(prompts_of(9, 3, 14), **settings)
    except ms.MidstreamError as error:
        tools.one_line(str(error))
        return
    one.assert_rows(cap)


# --- training


def test_a_model_in_training_mode_is_refused(fresh: Any, tools: Any) -> None:
    model = fresh("gpt2").model.train()
    with pytest.raises(ms.ModelLoadError) as caught:
        ms.load(model)
    tools.one_line(str(caught.value), "training", "eval()")
    assert model.training, "the caller's flag was touched"


def test_a_model_put_in_training_mode_later_is_refused(fresh: Any, tools: Any) -> None:
    one = fresh("gpt2")
    one.model.train()
    with tools.calls(one.model.transformer.h[0]) as seen, pytest.raises(ms.MidstreamError) as caught:
        one.lm.capture(prompts_of(4))
    tools.one_line(str(caught.value), "training", "eval()")
    assert seen == []
    assert one.model.training
    one.model.eval()
    one.assert_rows(one.lm.capture(prompts_of(4)))


def test_one_block_in_training_mode_gives_no_noisy_rows(fresh: Any, tools: Any) -> None:
    one = fresh("gpt2")
    assert one.model.config.resid_pdrop > 0
    one.model.transformer.h[1].train()
    right_or_refused(one, lambda: ms.load(one.model), tools)
    right_or_refused(one, lambda: one.lm, tools)


def test_gradients_and_flags_stay_as_they_are(fresh: Any) -> None:
    one = fresh("llama")
    flags = {name: (value.requires_grad, value.grad) for name, value in one.model.named_parameters()}
    with torch.enable_grad():
        cap = one.lm.capture(prompts_of(9, 3), max_tokens=3, ignore_eos=True)
    assert {name: (value.requires_grad, value.grad) for name, value in one.model.named_parameters()} == flags
    one.assert_rows(cap)
    one.model(torch.tensor(prompts_of(5))).logits.sum().backward()
    assert one.model.model.layers[0].mlp.up_proj.weight.grad is not None


# --- sessions


def test_sessions_are_exclusive_and_can_be_reopened(fresh: Any, tools: Any) -> None:
    model = fresh("llama").model
    backend = HuggingFaceBackend.adopt(BackendSpec("huggingface", "mine"), lambda: model, lambda: None)
    first = backend.open_session()
    with pytest.raises(ms.MidstreamError) as caught:
        backend.open_session()
    tools.one_line(str(caught.value), "close")
    assert first.model is model
    first.close()
    first.close()
    second = backend.open_session()
    assert second.layout.num_layers == 3
    for use in (lambda: first.model, lambda: first.layout, lambda: first.tokenizer):
        with pytest.raises(ms.SessionClosedError):
            use()
    backend.release()
    backend.release()
    with pytest.raises(ms.SessionClosedError):
        second.capture((), CaptureSpec())


def test_use_after_close_is_an_error_and_loads_nothing(fresh: Any, tools: Any, monkeypatch: Any, words: Any) -> None:
    one = fresh("llama", tokenizer=words)
    cap = one.lm.capture(prompts_of(4))
    one.lm.close()
    one.lm.close()

    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("a closed model was loaded again")

    monkeypatch.setattr("midstream.backends.huggingface.backend.load_pretrained", loaded)
    uses: list[Any] = [lambda: one.lm.capture([[1, 5]]), lambda: one.lm.capture("w010"), lambda: one.lm.facts]
    for use in [*uses, lambda: one.lm.capabilities]:
        with pytest.raises(ms.SessionClosedError) as caught:
            use()
        tools.one_line(str(caught.value), "load")
    one.assert_rows(cap)
    assert cap.tokens(0)[0].text == "<s>"
    with ms.load(one.model) as again:
        one.assert_rows(again.capture(prompts_of(4)))


def test_the_short_form_of_a_sessions_capture(fresh: Any, tools: Any) -> None:
    one = fresh("gemma2")
    session, prepared = one.lm.session, one.lm.prepare(prompts_of(9, 1, 4))
    for location, site in (("layer_output", "resid_post"), ("layer_input", "resid_pre")):
        every = session.capture(prepared, layers=[0, 3], location=location)
        last = session.capture(prepared, layers=[3], mode="last_token", location=location)
        assert every.sites == last.sites == (site,)
        assert last.labels.position.tolist() == [8, 0, 3]
        one.assert_rows(every)
        one.assert_rows(last)
    for wrong in ({"mode": "mean"}, {"location": "attn"}, {"layers": [4]}):
        with pytest.raises(ms.SpecError) as caught:
            session.capture(prepared, **{"layers": [0], **wrong})
        tools.one_line(str(caught.value), str(next(iter(wrong.values()))).strip("[]"))


# --- adopted models


def test_providers_are_read_on_each_access(words: Any, tiny: Any) -> None:
    models = {"now": ARCHITECTURES["llama"]()}
    tokenizers = {"now": None}
    spec = BackendSpec("huggingface", "mine")
    lm = ms.LanguageModel(HuggingFaceBackend.adopt(spec, lambda: models["now"], lambda: tokenizers["now"]))
    tiny("llama").assert_rows(lm.capture(prompts_of(6)))
    tokenizers["now"] = words
    assert lm.tokenizer is words
    assert lm.capture("w010 w011").outputs[0].prompt_token_ids == (1, 10, 11)
    for name in ("gemma2", "gpt2", "qwen3_moe"):
        models["now"] = ARCHITECTURES[name]()
        assert lm.facts.model_type == models["now"].config.model_type
        sites = lm.capabilities.capture.sites
        assert set(sites) == set(tiny(name).sites)
        tiny(name).assert_rows(lm.capture(prompts_of(6, 13), sites=sites, max_tokens=3, ignore_eos=True))


def test_weights_and_blocks_that_the_caller_replaces(fresh: Any, tools: Any) -> None:
    one = fresh("llama")
    one.lm.capture(prompts_of(5))
    other = ARCHITECTURES["llama"]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    one.model.load_state_dict(other.state_dict())
    one.assert_rows(one.lm.capture(prompts_of(9, 3), sites=one.sites))
    replaced = fresh("llama")
    replaced.model.model.layers[1] = copy.deepcopy(other.model.layers[1])
    right_or_refused(replaced, lambda: replaced.lm, tools, sites=replaced.sites)
    right_or_refused(replaced, lambda: ms.load(replaced.model), tools, sites=replaced.sites)


def test_two_language_models_on_one_model_in_turn(fresh: Any, tools: Any) -> None:
    one = fresh("qwen3")
    with ms.load(one.model) as first, ms.load(one.model) as second:
        for lm in (first, second, first, second):
            one.assert_rows(lm.capture(prompts_of(9, 3), sites=one.sites, max_tokens=3, ignore_eos=True))
    assert tools.hook_count(one.model) == 0


def test_a_capture_inside_the_progress_of_another_is_right_or_refused(fresh: Any, tools: Any) -> None:
    one = fresh("qwen3")
    with ms.load(one.model) as second:
        outer = one.lm.capture(
            prompts_of(9, 3), layers=[0], progress=lambda *_: right_or_refused(one, lambda: second, tools, layers=[0])
        )
    one.assert_rows(outer)
    assert tools.hook_count(one.model) == 0


def test_a_model_without_a_tokenizer_says_so(fresh: Any, tools: Any) -> None:
    one = fresh("llama")
    for given in ("text", ["text"], [{"role": "user", "content": "hello"}]):
        with tools.calls(one.model.model.layers[0]) as seen, pytest.raises(ms.PromptError) as caught:
            one.lm.capture(given)
        tools.one_line(str(caught.value), "prompt 0", "tokenizer")
        assert seen == []
    cap = one.lm.capture(prompts_of(4), max_tokens=3, ignore_eos=True)
    assert cap.outputs[0].text is None
    assert cap.tokens(0)[0].text is None


# --- unusual habits


@pytest.mark.parametrize("tokens", [1, 4], ids=["prompt", "decode"])
@pytest.mark.parametrize("name", ["llama", "bloom", "falcon_new", "gpt_neo", "mpt"])
def test_models_that_return_tuples(name: str, tokens: int, fresh: Any) -> None:
    one = fresh(name)
    if name == "llama":  # transformers' own forward no longer runs there with return_dict=False
        plain = one.model.forward
        one.model.forward = functools.wraps(plain)(lambda *args, **kwargs: plain(*args, **kwargs).to_tuple())
    one.model.config.return_dict = name == "llama"
    assert isinstance(one.model(torch.tensor([[1, 5]])), tuple)
    for lm in (one.lm, ms.load(one.model)):
        one.assert_rows(lm.capture(prompts_of(9, 3), sites=one.sites, max_tokens=tokens, ignore_eos=True))


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions", "output_router_logits"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gpt_neo"])
def test_configs_that_ask_for_more_outputs(name: str, flag: str, fresh: Any, tools: Any) -> None:
    one = fresh(name)
    one.model.set_attn_implementation("eager")
    setattr(one.model.config, flag, True)
    lm = ms.load(one.model)
    before = tools.hook_count(one.model)
    # transformers' `generate` itself fails where router logits are asked for
    tokens = 1 if flag == "output_router_logits" else 3
    for settings in ({"layers": [0]}, {}, {"max_tokens": tokens, "ignore_eos": True}):
        one.assert_rows(lm.capture(prompts_of(9, 3), **settings))
    assert tools.hook_count(one.model) == before
    states = one.model(torch.tensor(prompts_of(9)), output_hidden_states=True).hidden_states
    assert len(states) == lm.facts.num_layers + 1


@pytest.mark.parametrize(
    "how", ["wrapped", *(pytest.param(how, marks=pytest.mark.slow) for how in ("one block", "in place"))]
)
def test_compiled_models_have_their_rows_or_are_refused(how: str, fresh: Any, tools: Any) -> None:
    one = fresh("llama")
    model = one.model
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model.model.layers[1].compile(backend="eager")
    try:
        lm = ms.load(model)
    except ms.ModelLoadError as error:
        tools.one_line(str(error))
        return
    finally:
        torch.compiler.reset()
    one.assert_rows(lm.capture(prompts_of(9, 3), sites=["resid_post", "mlp_out", "q"]))
    right_or_refused(one, lambda: lm, tools, layers=[1], site="attn_out", max_tokens=3, ignore_eos=True)


@pytest.mark.slow
def test_a_model_compiled_after_it_was_loaded_and_run(fresh: Any, tools: Any) -> None:
    one = fresh("llama")
    one.model.model.layers[1].compile(backend="eager")
    with torch.no_grad():
        one.model(torch.tensor(prompts_of(9)))
    right_or_refused(one, lambda: one.lm, tools, sites=one.sites)
    torch.compiler.reset()


def test_a_default_dtype_and_an_inference_mode_of_the_callers(fresh: Any) -> None:
    one = fresh("llama")
    torch.set_default_dtype(torch.float64)
    try:
        lm = ms.load(one.model)
        cap = lm.capture(prompts_of(9, 3), sites=one.sites)
        with torch.inference_mode():
            inside = lm.capture(prompts_of(9, 3), max_tokens=3, ignore_eos=True, temperature=1.0, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {rows.dtype for rows in cap.tensors.values()} == {torch.float32}
    one.assert_rows(cap)
    one.assert_rows(inside)


def test_the_image_wrapper_keeps_nothing_of_an_earlier_image(fresh: Any) -> None:
    one, image = fresh("llava"), extra_inputs("llava")
    given = {"prompt_token_ids": prompt("llava"), "multi_modal_data": image}
    text = prompts_of(9, 3)
    for prompts, inputs in (([given], {0: image}), (text, {}), ([*text, given], {2: image}), (text, {})):
        one.assert_rows(one.lm.capture(prompts, max_tokens=3, ignore_eos=True), inputs)
