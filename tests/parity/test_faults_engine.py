"""Faults that users of other tools reported: hooks that stay, and work that nobody asked for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import midstream as ms
from parity.architectures import LISTED
from parity.tiny import base, build


def prompts_of(*lengths: int, seed: int = 61) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def registry() -> tuple[dict[str, Any], dict[str, Any]]:
    """transformers' table of attention functions, as it stands."""
    return dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)


@pytest.fixture
def table() -> Iterator[Any]:
    """transformers' table of attention functions before the test; put back after it, whatever the test did."""
    before = registry()
    yield before
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    ALL_ATTENTION_FUNCTIONS._local_mapping.update(before[0])


class Trouble(RuntimeError):
    """Raised on purpose by hooks of these tests."""


# --- 19


def test_19_captured_tensors_stay_when_the_engine_goes_on(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(9, 30)
    first = one.lm.capture(prompts, sites=one.sites, max_tokens=4, ignore_eos=True)
    copies = {key: rows.clone() for key, rows in first.tensors.items()}
    for place in range(5):
        one.lm.capture(prompts_of(30, 9, seed=place), sites=one.sites, max_tokens=4, ignore_eos=True)
    assert all(torch.equal(rows, copies[key]) for key, rows in first.tensors.items())
    places = [rows.untyped_storage().data_ptr() for rows in first.tensors.values()]
    assert len(set(places)) == len(places), "two tensors in one buffer"
    weights = {parameter.untyped_storage().data_ptr() for parameter in one.model.parameters()}
    assert not weights & set(places)


# --- 22


@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt, SystemExit, StopIteration])
@pytest.mark.parametrize("tokens", [1, 5], ids=["prompt", "decode"])
def test_22_an_error_inside_a_forward_leaves_nothing_behind(
    tokens: int, error: type[BaseException], fresh: Any, tools: Any, table: Any
) -> None:
    one, prompts = fresh("qwen3_moe"), prompts_of(9, 3, 14)
    before = tools.hook_count(one.model)
    passes = Counter[str]()

    def fail(*_: Any) -> None:
        passes["all"] += 1
        if passes["all"] == (2 if tokens > 1 else 1):
            raise error("on purpose")

    handle = one.model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(error):
        one.lm.capture(prompts, sites=one.sites, max_tokens=tokens, ignore_eos=True)
    handle.remove()
    assert tools.hook_count(one.model) == before
    assert registry() == table
    one.assert_rows(one.lm.capture(prompts, sites=one.sites, max_tokens=tokens, ignore_eos=True))


def test_22_a_progress_callback_that_raises(fresh: Any, tools: Any, table: Any) -> None:
    one, prompts = fresh("llama"), prompts_of(9, 3)

    def fail(*_: int) -> None:
        raise Trouble

    with pytest.raises(Trouble):
        one.lm.capture(prompts, sites=one.sites, progress=fail)
    assert tools.hook_count(one.model) == 0
    assert registry() == table
    one.assert_rows(one.lm.capture(prompts, sites=one.sites))


def test_22_a_users_hooks_survive_and_fire(fresh: Any, tools: Any) -> None:
    one, prompts, fired = fresh("llama"), prompts_of(9, 3), Counter[str]()
    block = one.model.model.layers[1]
    kinds = {
        "pre": (block.register_forward_pre_hook, {}),
        "pre kwargs": (block.register_forward_pre_hook, {"with_kwargs": True, "prepend": True}),
        "post": (block.register_forward_hook, {}),
        "always": (block.register_forward_hook, {"always_call": True}),
        "deep": (block.self_attn.q_proj.register_forward_hook, {}),
    }
    for kind, (register, settings) in kinds.items():
        register(lambda *_, kind=kind: fired.update([kind]), **settings)
    before = tools.hook_count(one.model)
    one.lm.capture(prompts, layers=[1], sites=one.sites)
    assert fired == Counter(dict.fromkeys(kinds, 1))
    one.lm.capture(prompts, layers=[0, 2], max_tokens=3, ignore_eos=True)
    assert fired == Counter(dict.fromkeys(kinds, 4))
    assert tools.hook_count(one.model) == before
    one.model(torch.tensor(prompts[:1]))
    assert fired == Counter(dict.fromkeys(kinds, 5))


def test_22_hooks_that_come_and_go_during_a_capture(fresh: Any, tools: Any) -> None:
    """Out of order: one registered before a capture and removed inside it, one the other way round."""
    one, prompts = fresh("llama"), prompts_of(9, 3)
    blocks, late = one.model.model.layers, []

    def swap(*_: Any) -> None:
        early.remove()
        late.append(blocks[2].register_forward_hook(lambda *_: None))

    early = blocks[0].register_forward_hook(swap)
    one.assert_rows(one.lm.capture(prompts, sites=one.sites))
    assert tools.hook_count(one.model) == len(late) == 1


def test_22_what_a_users_hooks_change_is_what_is_captured(fresh: Any, tools: Any) -> None:
    one, prompts, seen = fresh("llama"), prompts_of(9), {}
    blocks = one.model.model.layers

    def shift(_: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] + 3.0, *args[1:]), kwargs

    blocks[1].register_forward_pre_hook(shift, with_kwargs=True)
    blocks[1].mlp.register_forward_hook(lambda _, __, output: output * 2)
    blocks[2].register_forward_hook(lambda _, __, output: output - 1)
    for layer, block in enumerate(blocks):
        block.register_forward_hook(lambda _, args, output, layer=layer: seen.update({layer: (args[0], output)}))
    cap = one.lm.capture(prompts, sites=["resid_pre", "resid_post", "mlp_out"])
    for layer, (read, left) in seen.items():
        assert torch.equal(cap.rows(layer, "resid_pre"), read[0])
        assert torch.equal(cap.rows(layer, "resid_post"), left[0])
    want = one.oracle(prompts[0])
    assert tools.worst(cap.rows(0, "resid_post"), want["resid_post", 0]) <= 1
    assert tools.worst(cap.rows(1, "resid_pre"), want["resid_pre", 1] + 3) <= 1
    assert not torch.isclose(cap.rows(1, "mlp_out"), want["mlp_out", 1]).all()


def test_22_captures_in_two_threads_that_end_in_the_order_in_which_they_began(fresh: Any, table: Any) -> None:
    """Two models of one family share transformers' table of attention functions."""
    first, second = fresh("llama"), fresh("llama")
    first_began, second_began, first_ended = threading.Event(), threading.Event(), threading.Event()
    prompts, got = prompts_of(9, 3), {}

    def run(name: str, one: Any, progress: Any, then: Any) -> None:
        try:
            got[name] = one.lm.capture(prompts, sites=["q", "k", "resid_post"], progress=progress)
        except BaseException as error:
            got[name] = error
        then()

    threads = [
        threading.Thread(
            target=run,
            args=("first", first, lambda *_: (first_began.set(), second_began.wait(5)), first_ended.set),
        ),
        threading.Thread(
            target=run,
            args=("second", second, lambda *_: (second_began.set(), first_ended.wait(5)), lambda: None),
        ),
    ]
    threads[0].start()
    assert first_began.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    for name, one in (("first", first), ("second", second)):
        assert isinstance(got[name], ms.CaptureResult), got[name]
        one.assert_rows(got[name])
    assert registry() == table, "an attention function stays wrapped"
    with torch.no_grad():
        first.model(torch.tensor(prompts[:1]))
        second.model(torch.tensor(prompts[:1]))


def test_22_two_threads_on_one_model_are_right_or_refused(fresh: Any, tools: Any, table: Any) -> None:
    one = fresh("llama")
    got: list[Any] = []

    def run(seed: int) -> None:
        for place in range(15):
            try:
                got.append(one.lm.capture(prompts_of(12, 12, seed=seed + place), sites=one.sites))
            except ms.MidstreamError as error:
                got.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 30
    for cap in got:
        if not isinstance(cap, ms.MidstreamError):
            one.assert_rows(cap)
    assert tools.hook_count(one.model) == 0
    assert registry() == table


# --- 30 and shared prefixes


@pytest.mark.parametrize("name", LISTED)
def test_30_layers_past_the_deepest_and_the_output_embedding_do_not_run(name: str, tiny: Any, tools: Any) -> None:
    one, prompts = tiny(name), prompts_of(9, 3)
    blocks = _blocks(one)
    head = one.model.get_output_embeddings()
    for site in one.sites:
        deepest = max(layer for layer in one.lm.capture([[1, 5]], site=site).layer_ids if layer < len(blocks) - 1)
        with tools.calls(head) as logits, tools.calls(blocks[deepest + 1]) as beyond:
            one.lm.capture(prompts, site=site, layers=[deepest])
        assert (logits, beyond) == ([], []), site
    with tools.calls(head) as logits, tools.calls(blocks[1]) as inside, tools.calls(blocks[0]) as first:
        one.lm.capture(prompts, site="resid_pre", layers=[1])
    assert logits == []
    assert len(first) == 1
    assert len(inside) <= 1  # called, and ended before it computes
    with tools.calls(blocks[1].get_submodule(_norm(name))) as computed:
        one.lm.capture(prompts, site="resid_pre", layers=[1])
    assert computed == [], "the block that only has to be entered was computed"


def _blocks(one: Any) -> Any:
    lists = [module for module in one.model.modules() if isinstance(module, torch.nn.ModuleList)]
    return next(found for found in lists if len(found) == one.lm.facts.num_layers and "Layer" in repr(found))


def _norm(name: str) -> str:
    return {"gpt2": "ln_1", "opt": "self_attn_layer_norm"}.get(name, "input_layernorm")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_30_what_prompts_share_is_computed_once(name: str, tiny: Any, tools: Any) -> None:
    one, prefix = tiny(name), prompts_of(130, seed=62)[0]
    tails = [ids[1:] for ids in prompts_of(*range(2, 26), seed=63)]
    prompts = [[*prefix, *tail] for tail in tails] + prompts_of(5, 40, seed=64)
    with tools.calls(_blocks(one)[0]) as seen:
        cap = one.lm.capture(prompts, sites=one.sites)
    computed = sum(shape[0] * shape[1] for shape in seen)
    assert computed < sum(map(len, prompts)) / 3
    assert cap.receipt.selected == cap.receipt.computed + cap.receipt.reused == sum(map(len, prompts))
    one.assert_rows(cap)


def test_30_a_prompt_that_comes_many_times_is_computed_once(tiny: Any, tools: Any) -> None:
    one, ids = tiny("llama"), prompts_of(150, seed=65)[0]
    with tools.calls(_blocks(one)[0]) as seen:
        cap = one.lm.capture([ids] * 12, sites=one.sites)
    assert sum(shape[0] * shape[1] for shape in seen) <= 2 * len(ids)
    one.assert_rows(cap)
    for sample in range(1, 12):
        assert torch.equal(cap.sample(sample, "resid_post")[2], cap.sample(0, "resid_post")[2])


def test_30_a_cache_that_contradicts_the_models_mask_is_not_used(tools: Any) -> None:
    """Moshi's config has a window, which its cache obeys and its mask does not."""
    config = hf.MoshiConfig(**base(num_key_value_heads=2, ffn_dim=96, head_dim=16, sliding_window=8))
    model = build(lambda: hf.MoshiForCausalLM(config))
    lm, prefix = ms.load(model), prompts_of(130, seed=62)[0]
    prompts = [[*prefix, *ids[1:]] for ids in prompts_of(*range(4, 12), seed=63)]
    cap = lm.capture(prompts, site="resid_pre")
    for sample in (0, 7):
        with torch.no_grad():
            states = model(torch.tensor([prompts[sample]]), output_hidden_states=True, use_cache=False).hidden_states
        for layer in cap.layer_ids:
            assert tools.worst(cap.sample(sample)[layer], states[layer][0]) <= 1, layer


def test_30_prompts_of_many_lengths_are_padded_little(tiny: Any, tools: Any) -> None:
    one = tiny("llama")
    prompts = prompts_of(*(1 + 37 * place % 200 for place in range(150)), seed=66)
    with tools.calls(_blocks(one)[0]) as seen:
        one.lm.capture(prompts, layers=[0])
    assert sum(shape[0] * shape[1] for shape in seen) < 1.15 * sum(map(len, prompts))
    assert max(shape[0] * shape[1] for shape in seen) <= 4096


def test_progress_counts_up_to_all_tokens(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(150, 7, 150, 30) + [prompts_of(150)[0]] * 6
    for tokens in (1, 4):
        told: list[tuple[int, int]] = []
        one.lm.capture(prompts, max_tokens=tokens, layers=[0], progress=lambda *given, told=told: told.append(given))
        assert told[-1][0] == told[-1][1]
        assert told == sorted(told)
        assert len({total for _, total in told}) == 1


# --- numbers of a real model


@pytest.mark.real_model
@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_the_plain_model(
    smollm2: ms.LanguageModel, smollm2_float32: ms.LanguageModel
) -> None:
    text = "In the beginning there was a long and winding road, and nobody knew where it would lead them. "
    prompts = [text * 6, "Yes.", text + "Then came the rain.", "One two three four", text[:40], text * 2, "A", text]
    sites = ["resid_pre", "resid_post", "attn_out", "mlp_out", "head_out", "q", "k"]
    ids = [list(one.token_ids) for one in smollm2.prepare(prompts)]
    true, batch = smollm2_float32, smollm2.capture(ids, sites=sites)
    errors: dict[str, dict[str, list[torch.Tensor]]] = {site: {"batch": [], "plain": []} for site in sites}
    for sample, one in enumerate(ids):
        reference = true.capture([one], sites=sites)
        plain = _plain_rows(smollm2.session.model, one)  # pyright: ignore[reportAttributeAccessIssue]
        for (site, layer), want in reference.tensors.items():
            if (site, layer) in plain:
                for kind, rows in (("batch", batch.sample(sample, site)[layer]), ("plain", plain[site, layer])):
                    errors[site][kind].append((rows.float() - want).norm(dim=1) / want.norm(dim=1))
    for site, kinds in errors.items():
        if not kinds["plain"]:
            continue
        got, bound = torch.cat(kinds["batch"]), torch.cat(kinds["plain"])
        for quantile in (0.5, 0.99):
            assert got.quantile(quantile) <= 1.25 * bound.quantile(quantile) + 1e-3, (site, quantile)


@torch.no_grad()
def _plain_rows(model: Any, ids: list[int]) -> dict[tuple[str, int], torch.Tensor]:
    """The plain model's rows of one prompt, by hooks on its own modules."""
    rows: dict[tuple[str, int], torch.Tensor] = {}
    handles = []
    for layer, block in enumerate(model.model.layers):
        for site, module, side in (
            ("resid_pre", block, "input"),
            ("resid_post", block, "output"),
            ("attn_out", block.self_attn, "output"),
            ("mlp_out", block.mlp, "output"),
            ("head_out", block.self_attn.o_proj, "input"),
        ):

            def keep(_: Any, args: Any, kwargs: Any, output: Any, at: Any = (site, layer), side: str = side) -> None:
                value = (args[0] if args else kwargs["hidden_states"]) if side == "input" else output
                value = value[0] if isinstance(value, tuple) else value
                rows[at] = value.reshape(-1, value.shape[-1]).clone()

            handles.append(module.register_forward_hook(keep, with_kwargs=True))
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return rows
