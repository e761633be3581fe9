"""Hooks and entries: what a caller's own are given, what ours leave behind, and loops that are the caller's."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import midstream as ms
from midstream.core.prompts import PreparedPrompt

pytestmark = pytest.mark.filterwarnings("ignore:no row was selected")

PLAIN: dict[str, Any] = {"ignore_eos": True}


class Trouble(RuntimeError):
    """Raised on purpose by code of these tests."""


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prompts_of(*lengths: int, seed: int = 101) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def item(ids: list[int], *entries: Any, output: Any = (), seed: int | None = None) -> ms.GenerationItem:
    return ms.GenerationItem(PreparedPrompt(tuple(ids)), entries, output, seed)


def steer(spec: ms.InterventionSpec) -> ms.InterventionEntry:
    return ms.InterventionEntry(spec)


def tokens_of(made: Any) -> list[tuple[int, ...]]:
    return [done.token_ids for done in made]


@pytest.fixture(autouse=True)
def _modes() -> Iterator[None]:
    """A mode that a test finds left behind is not left to the next."""
    before = len(_get_current_function_mode_stack())
    yield
    while len(_get_current_function_mode_stack()) > before:
        _pop_mode()


def state(one: Any, tools: Any) -> Any:
    """Hooks, modes and tables that a call may have left behind."""
    return tools.hook_count(one.model), len(_get_current_function_mode_stack()), dict(ALL_ATTENTION_FUNCTIONS)


# --- 22: errors


def failing(at: int, error: type[BaseException]) -> Any:
    """Something to call that raises at its `at`-th call."""
    calls = Counter[str]()

    def fail(*_: Any, **__: Any) -> None:
        calls["all"] += 1
        if calls["all"] == at:
            raise error("on purpose")

    return fail


class Processor:
    """A logits processor that may fail."""

    def __init__(self, fail: Any) -> None:
        self.fail = fail

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.fail()
        return scores


def troubled(where: str, fail: Any) -> dict[str, Any]:
    """The entries of an item whose own code calls `fail`."""
    if where in ("function", "router"):
        site = "router_logits" if where == "router" else "resid_post"
        return {"state_entries": [steer(ms.function(fail, site=site, layers=[1]))]}
    if where in ("pre", "forward"):
        return {"state_entries": [ms.HookEntry({where: [{"module": "model.layers.1", "hook_func": fail}]})]}
    if where == "processor":
        return {"output_entries": [ms.StackEntry(logits_processors=[Processor(fail)])]}
    return {"output_entries": [ms.StackEntry(stopping_criteria=[lambda *_: bool(fail())])]}


PLACES = ["function", "router", "pre", "forward", "processor", "criterion"]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *((where, error) for where in PLACES for error in (Trouble, KeyboardInterrupt) if where != "router"),
        ("router", Trouble),
        # a hook that is always called is not called after what is no Exception
        ("router", KeyboardInterrupt),
    ],
)
def test_22_an_error_in_a_callers_code_leaves_nothing_behind(
    where: str, error: type[BaseException], fresh: Any, tools: Any
) -> None:
    one, prompts = fresh("mixtral"), prompts_of(9, 3, 6)
    session, params = one.lm.session, ms.GenerationParams(max_tokens=4, **PLAIN)
    also = ms.add(drawn(64), layers=[0, 2], strength=2.0) + ms.router(layers=[1], off=[0])
    want = tokens_of(one.lm.generate(prompts, max_tokens=4, steering=also, **PLAIN))
    before = state(one, tools)
    for at in (1, 3):
        for entry in ("generate", "stream"):
            bad = replace(item(prompts[1]), **troubled(where, failing(at, error)))
            items = [item(prompts[0], steer(also)), bad, item(prompts[2])]
            with pytest.raises(error):
                session.generate(items, params) if entry == "generate" else list(session.stream(bad, params))
            assert state(one, tools) == before, (at, entry)
    assert tokens_of(one.lm.generate(prompts, max_tokens=4, steering=also, **PLAIN)) == want


def applied(one: Any, spec: ms.InterventionSpec, ids: list[int]) -> None:
    with one.lm.session.entries_applied([steer(spec)]):
        one.model(torch.tensor([ids]))


#: Name → the call, of a model's LanguageModel and others, prompts and a spec.
ENTRIES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "capture": lambda one, prompts, spec: one.lm.capture(prompts, sites=one.sites, steering=spec),
    "capture of decoding": lambda one, prompts, spec: one.lm.capture(prompts, steering=spec, max_tokens=3),
    "score": lambda one, prompts, spec: one.lm.score(prompts, [5, 6], steering=spec),
    "stream": lambda one, prompts, spec: list(one.lm.stream(prompts[0], max_tokens=3, steering=spec, layers=[1])),
    "extra": lambda one, prompts, spec: one.lm.generate(prompts, max_tokens=3, steering=spec, extra={"num_beams": 2}),
    "entries_applied": lambda one, prompts, spec: applied(one, spec, prompts[0]),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_22_an_error_in_a_function_ends_every_entry_cleanly(entry: str, fresh: Any, tools: Any) -> None:
    one, prompts = fresh("qwen3_moe"), prompts_of(9, 3)
    spec = ms.function(failing(2, Trouble), site="router_logits", layers=[0, 2])
    before, want = state(one, tools), one.lm.capture(prompts)
    with pytest.raises(Trouble):
        ENTRIES[entry](one, prompts, spec)
    assert state(one, tools) == before
    again = one.lm.capture(prompts)
    assert all(torch.equal(rows, want.tensors[key]) for key, rows in again.tensors.items())


def test_22_a_loop_goes_on_after_an_error_in_it(fresh: Any, tools: Any) -> None:
    """Inside entries_applied a pass that failed is over: the next one is steered."""
    one, (ids,) = fresh("llama"), prompts_of(6)
    vector, given = drawn(64), torch.tensor([ids])
    block = one.model.model.layers[2]
    with one.lm.session.entries_applied([steer(ms.add(vector, layers=[1], strength=5.0))]), torch.no_grad():
        want = one.model(given).logits
        handle = block.register_forward_hook(failing(1, Trouble))
        with pytest.raises(Trouble):
            one.model(given)
        handle.remove()
        assert torch.equal(one.model(given).logits, want)
    assert tools.hook_count(one.model) == 0
    assert not torch.equal(one.model(given).logits, want)


def test_22_a_users_hooks_fire_and_stay(fresh: Any, tools: Any) -> None:
    one, prompts, fired = fresh("llama"), prompts_of(9, 3), Counter[str]()
    block, spec = one.model.model.layers[1], ms.add(drawn(64), layers=[1], strength=2.0)
    one.lm.generate(prompts, max_tokens=1, steering=spec)  # shows that the tap is read, once
    kinds: dict[str, Any] = {
        "pre": (block.register_forward_pre_hook, {}),
        "pre kwargs": (block.register_forward_pre_hook, {"with_kwargs": True, "prepend": True}),
        "post": (block.register_forward_hook, {}),
        "always": (block.register_forward_hook, {"always_call": True}),
        "deep": (block.self_attn.q_proj.register_forward_hook, {}),
    }
    for kind, (register, settings) in kinds.items():
        register(lambda *_, kind=kind: fired.update([kind]), **settings)
    before = tools.hook_count(one.model)
    one.lm.generate(prompts, max_tokens=3, steering=[spec, None], **PLAIN)
    assert fired == Counter(dict.fromkeys(kinds, 3))
    one.lm.score(prompts, [5, 6], steering=spec)
    one.lm.capture(prompts, layers=[1], steering=spec)
    assert fired == Counter(dict.fromkeys(kinds, 5))
    assert tools.hook_count(one.model) == before


def test_22_what_a_users_hook_leaves_is_what_is_steered(fresh: Any, tools: Any) -> None:
    """Before ours or inside a loop of the caller's, in and out of order."""
    one, (ids,), vector = fresh("llama"), prompts_of(6), drawn(64)
    spec, given, blocks = ms.clamp(vector, layers=[1], value=7.0), torch.tensor([ids]), one.model.model.layers
    first = blocks[1].register_forward_hook(lambda *args: args[2] * 2)
    rows = one.lm.capture(ids, layers=[1], steering=spec).rows(1)
    unit = torch.from_numpy(vector / np.linalg.norm(vector))
    assert torch.allclose(rows @ unit, torch.full((6,), 7.0), atol=1e-4)
    applied, seen = one.lm.session.entries_applied([steer(spec)]), []
    with torch.no_grad():
        applied.__enter__()
        late = blocks[1].register_forward_hook(lambda *args: seen.append(args[2][0].clone()))
        one.model(given)
        first.remove()  # ours are still there
        one.model(given)
        applied.__exit__(None, None, None)
        one.model(given)
    assert tools.worst(seen[0], rows) <= 1
    assert torch.allclose(seen[1] @ unit, torch.full((6,), 7.0), atol=1e-4)
    assert not torch.allclose(seen[2] @ unit, torch.full((6,), 7.0), atol=1e-1)
    assert tools.hook_count(one.model) == 1
    late.remove()


def test_22_streams_of_two_models_may_end_in_any_order(fresh: Any, tools: Any) -> None:
    two, prompts = [fresh("mixtral"), fresh("qwen3_moe")], prompts_of(5, 8)
    specs = [ms.router(layers=[0, 2], on=[seed]) + ms.add(drawn(64, seed=seed), layers=[1]) for seed in (1, 2)]
    want = [
        one.lm.generate(ids, max_tokens=4, steering=spec, **PLAIN)[0].token_ids
        for one, ids, spec in zip(two, prompts, specs, strict=True)
    ]
    streams = [
        one.lm.stream(ids, max_tokens=4, steering=spec, **PLAIN)
        for one, ids, spec in zip(two, prompts, specs, strict=True)
    ]
    found: list[list[int]] = [[], []]
    for _ in range(4):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += next(stream).token_ids
    for which in (0, 1):
        with pytest.raises(ms.BusyError):
            two[which].lm.generate(prompts, max_tokens=1)
    streams[0].close()
    two[0].lm.generate(prompts, max_tokens=1)
    assert next(streams[1]).completion.token_ids == want[1]
    assert list(streams[1]) == []
    assert [tuple(tokens) for tokens in found] == want
    assert [tools.hook_count(one.model) for one in two] == [0, 0]
    two[1].lm.generate(prompts, max_tokens=1)


def test_a_call_leaves_the_callers_state_alone(fresh: Any, tools: Any) -> None:
    one, prompts = fresh("mixtral"), prompts_of(9, 4)
    spec = ms.add(drawn(64), layers=[1], strength=4.0) + ms.router(layers=[0], off=[1])
    handle = one.model.model.layers[0].register_forward_hook(lambda *_: None)
    config, own = one.model.generation_config, copy.deepcopy(one.model.generation_config.to_dict())
    weights, text = {key: value.clone() for key, value in one.model.state_dict().items()}, one.model.config.to_dict()
    grads = [parameter.requires_grad for parameter in one.model.parameters()]
    before = state(one, tools)
    seeds = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one.lm.generate(prompts, max_tokens=4, steering=spec)
    one.lm.generate(prompts, max_tokens=4, steering=spec, seed=3, n=2)
    one.lm.generate(prompts, max_tokens=4, steering=spec, seed=3, extra={"num_beams": 2})
    one.lm.capture(prompts, steering=spec, max_tokens=2)
    one.lm.score(prompts, [5, 6], steering=spec)
    list(one.lm.stream(prompts[0], max_tokens=3, steering=spec, seed=3))
    assert torch.equal(torch.random.get_rng_state(), seeds[0])
    assert (np.random.get_state()[1] == seeds[1]).all()
    assert random.getstate() == seeds[2]
    assert one.model.generation_config is config
    assert config.to_dict() == own
    assert one.model.config.to_dict() == text
    assert not any(module.training for module in one.model.modules())
    assert [parameter.requires_grad for parameter in one.model.parameters()] == grads
    assert all(torch.equal(value, weights[key]) for key, value in one.model.state_dict().items())
    assert state(one, tools) == before
    assert torch.is_grad_enabled()
    handle.remove()


# --- entries that are hooks


def test_hooks_of_an_item_act_on_it_alone(tiny: Any, tools: Any) -> None:
    one, prompts, vector = tiny("llama"), prompts_of(7, 3, 9, 5), drawn(64)
    session, params = one.lm.session, ms.GenerationParams(max_tokens=4, **PLAIN)
    push, seen = torch.from_numpy(6.0 * vector), []

    def after(_: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        assert isinstance(kwargs, dict)
        assert "position_embeddings" in kwargs
        return output + push

    def before(_: Any, args: Any, kwargs: Any) -> Any:
        seen.append((len(args), sorted(kwargs)))
        return (
            ((args[0] + push, *args[1:]), kwargs)
            if args
            else (args, kwargs | {"hidden_states": kwargs["hidden_states"] + push})
        )

    forward = ms.HookEntry({"forward": [{"module": "model.layers.1", "hook_func": after}]})
    pre = ms.HookEntry({
        "pre": [{"module": one.model.model.layers[2], "hook_func": before}],
        "backward": [{"module": one.model.model.layers[0], "hook_func": lambda *_: None}],
    })  # fmt: skip
    spec, other = ms.add(vector, layers=[1], strength=6.0), ms.add(vector, layers=[0], strength=-3.0)
    items = [item(prompts[0], forward), item(prompts[1], steer(other)), item(prompts[2], pre), item(prompts[3])]
    want = one.lm.generate(prompts, max_tokens=4, steering=[spec, other, spec, None], **PLAIN)
    made = session.generate(items, params)
    assert tokens_of(made) == tokens_of(want)
    assert len(seen) == 4
    both = session.generate([item(prompts[0], forward, steer(other))], params)
    assert tokens_of(both) == tokens_of(one.lm.generate(prompts[0], max_tokens=4, steering=spec + other, **PLAIN))
    scored = [ms.ScoringItem(one.prompt, (5, 6, 7), one.state_entries) for one in items]
    scores = one.lm.score(prompts, [5, 6, 7], steering=[spec, other, spec, None])
    assert tools.worst(session.score(scored), scores) <= 2
    *_, last = session.stream(items[0], params)
    assert last.completion.token_ids == want[0].token_ids
    assert tools.hook_count(one.model) == 0


def bad_hooks() -> dict[str, tuple[Any, str]]:
    good = {"module": "model.layers.1", "hook_func": lambda *_: None}
    return {
        "module": ({"forward": [good, {**good, "module": "model.layer.1"}]}, "model.layer.1"),
        "foreign module": ({"pre": [good], "forward": [{**good, "module": torch.nn.Linear(1, 1)}]}, "Linear"),
        "kind": ({"pre": [good], "forwards": [good]}, "forwards"),
        "no function": ({"forward": [good, {**good, "hook_func": 3}]}, "hook_func"),
        "no module": ({"forward": [good, {"hook_func": print}]}, "module"),
    }


@pytest.mark.parametrize("name", bad_hooks())
def test_no_hook_stays_where_one_cannot_be_registered(name: str, tiny: Any, tools: Any) -> None:
    one, (hooks, part) = tiny("llama"), bad_hooks()[name]
    bad, params = item([1, 5, 9], ms.HookEntry(hooks)), ms.GenerationParams(max_tokens=2)
    with tools.calls(one.model.model.embed_tokens) as seen:
        for call in (
            lambda: one.lm.session.generate([bad], params),
            lambda: one.lm.session.score([ms.ScoringItem(bad.prompt, (5,), bad.state_entries)]),
            lambda: list(one.lm.session.stream(bad, params)),
            lambda: one.lm.session.entries_applied(bad.state_entries).__enter__(),
        ):
            with pytest.raises(ms.SpecError) as caught:
                call()
            tools.one_line(str(caught.value), "state_entries[0].hooks", part)
            assert caught.value.code == "E_BAD_PARAM"
            assert tools.hook_count(one.model) == 1  # the one that counts
    assert seen == []
    assert one.lm.generate([1, 5, 9], max_tokens=1)


def test_hooks_that_cannot_be_registered_are_refused_before_other_items_run(tiny: Any, tools: Any) -> None:
    one = tiny("llama")
    bad = item([1, 5, 9], ms.HookEntry(bad_hooks()["module"][0]))
    with tools.calls(one.model.model.embed_tokens) as seen, pytest.raises(ms.SpecError):
        one.lm.session.generate([item([1, 7]), bad], ms.GenerationParams(max_tokens=2))
    assert seen == []
