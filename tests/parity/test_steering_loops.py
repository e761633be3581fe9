"""A caller's own decoding loop, with entries applied: it gives what the library's loop gives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import midstream as ms
from midstream.core.interventions import receipts_together
from midstream.core.prompts import PreparedPrompt

pytestmark = pytest.mark.filterwarnings("ignore:no row was selected")

PLAIN: dict[str, Any] = {"ignore_eos": True}
GATE = {"layers": [0, 1], "readout": {"kind": "affine", "w": 0.1 * np.arange(64) - 3}, "rule": {"kind": "sum"}}
TOKENS = 4


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prompts_of(*lengths: int, seed: int = 111) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def specs_of(name: str) -> dict[str, ms.InterventionSpec]:
    v = [drawn(64, seed=seed) for seed in range(4)]
    found = {
        "all": ms.add(v[0], layers=[1], strength=5.0),
        "end": ms.add(v[1], layers=[0, 2], strength=5.0, rows="prompt[-1], generated"),
        "positions": ms.replace(drawn(3, 64, seed=9), layers=[1], positions=[1, 5, 7]),
        "window": ms.add(v[2], layers=[1], strength=8.0, rows="sequence[5:8]") + ms.ablate(v[3], layers=[2]),
        "tokens": ms.add(v[2], layers=[1], strength=8.0, rows="generated[2:], prompt{20,21,22,23}"),
        "gate": ms.add(v[0], layers=[0, 2], strength=6.0, gate=GATE),
        "function": ms.function(lambda rows, labels: rows * 1.3, layers=[1], rows="generated"),
        "silent": ms.add(v[0], layers=[1], strength=0.0),
    }
    if name == "mixtral":
        found["router"] = ms.router(layers=[0, 2], on=[1], off=[3], rows="prompt[2:], generated")
    return found


@torch.no_grad()
def loop(model: Any, prompts: list[list[int]], tokens: int = TOKENS, name: str = "cache") -> list[tuple[int, ...]]:
    """Greedy decoding as people write it: padded on the left, with a mask, one cache, every row kept."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache, made = DynamicCache(config=model.config), []
    for _ in range(tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, name: cache, "use_cache": True}
        ids = model(**given).logits[:, -1].argmax(-1, keepdim=True)
        made.append(ids[:, 0].tolist())
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return list(zip(*made, strict=True))


@torch.no_grad()
def bare_loop(model: Any, prompt: list[int], tokens: int = TOKENS) -> tuple[int, ...]:
    """The same for one prompt, with neither mask nor positions, and the ids by place."""
    cache, ids, made = DynamicCache(config=model.config), torch.tensor([prompt]), []
    for _ in range(tokens):
        ids = model(ids, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
        made.append(int(ids))
    return tuple(made)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_a_loop_is_the_librarys(name: str, tiny: Any, tools: Any) -> None:
    one, prompts = tiny(name), prompts_of(7, 3, 9, 1)
    for what, spec in specs_of(name).items():
        want = one.lm.generate(prompts, max_tokens=TOKENS, steering=spec, **PLAIN)
        receipts = receipts_together(done.steering for done in want)
        with one.lm.session.entries_applied([ms.InterventionEntry(spec)]) as applied:
            assert loop(one.model, prompts) == [done.token_ids for done in want], what
            for got, due in zip(applied.receipts(), receipts, strict=True):
                assert (got.op, got.layer, got.selected, got.computed) == (
                    *(due.op, due.layer, due.selected, due.computed),
                )
                assert got.relative == (None if due.relative is None else pytest.approx(due.relative, rel=1e-4))
            # a second batch in the same context begins anew
            assert loop(one.model, prompts[1:3]) == [done.token_ids for done in want[1:3]], what
            assert bare_loop(one.model, prompts[0]) == want[0].token_ids, what
    assert tools.hook_count(one.model) == 0


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_models_own_generate_is_followed(name: str, tiny: Any) -> None:
    one, prompts = tiny(name), prompts_of(7, 7, 7)
    given = torch.tensor(prompts)
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for what, spec in specs_of(name).items():
        want = one.lm.generate(prompts, max_tokens=TOKENS, steering=spec, **PLAIN)
        with one.lm.session.entries_applied([ms.InterventionEntry(spec)]):
            made = one.model.generate(given, attention_mask=torch.ones_like(given), **settings)[:, 7:]
        assert [tuple(row) for row in made.tolist()] == [done.token_ids for done in want], what


def test_a_whole_forward_is_all_prompt(tiny: Any, tools: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(8, 5)
    seen: list[Tensor] = []
    spec = ms.add(drawn(64), layers=[1], strength=3.0, rows="prompt[-1]")
    hook = ms.HookEntry({"forward": [{"module": "model.layers.2", "hook_func": lambda *args: seen.append(args[3])}]})
    with one.lm.session.entries_applied([ms.InterventionEntry(spec), hook]), torch.no_grad():
        for ids in prompts:
            one.model(input_ids=torch.tensor([ids]), use_cache=False)
        # rows that a mask leaves out on the right are nobody's
        padded = torch.tensor([prompts[0], [*prompts[1], 0, 0, 0]])
        one.model(padded, attention_mask=torch.tensor([[1] * 8, [1] * 5 + [0] * 3]))
    cap = one.lm.capture(prompts, layers=[2], steering=spec)
    for sample in range(2):
        assert tools.worst(seen[sample][0], cap.sample(sample)[2]) <= 1
        assert tools.worst(seen[2][sample, : len(prompts[sample])], cap.sample(sample)[2]) <= 1
    assert tools.hook_count(one.model) == 0


def test_a_patch_is_laid_into_each_prompt_of_a_loop(tiny: Any) -> None:
    one, (source, first, second) = tiny("llama"), prompts_of(6, 6, 9)
    cap = one.lm.capture(source, layers=[0, 1])
    spec = ms.patch(cap, source="prompt[1:3]", target="prompt[-2:]") + ms.add(drawn(64), layers=[2], rows="generated")
    want = one.lm.generate([first, second], max_tokens=TOKENS, steering=spec, **PLAIN)
    with one.lm.session.entries_applied([ms.InterventionEntry(spec)]):
        assert loop(one.model, [first, second]) == [done.token_ids for done in want]


def test_several_entries_apply_in_order(tiny: Any) -> None:
    one, (ids,) = tiny("llama"), prompts_of(6)
    specs = ms.add(drawn(64), layers=[1], strength=5.0), ms.ablate(drawn(64, seed=2), layers=[1])
    made = []
    for order in (specs, specs[::-1]):
        made.append(one.lm.generate(ids, max_tokens=TOKENS, steering=order[0] + order[1], **PLAIN)[0].token_ids)
        with one.lm.session.entries_applied([ms.InterventionEntry(spec) for spec in order]):
            assert bare_loop(one.model, ids) == made[-1]
    plain = one.lm.generate(ids, max_tokens=TOKENS, **PLAIN)[0].token_ids
    with one.lm.session.entries_applied([]):
        assert bare_loop(one.model, ids) == plain not in made


def test_while_entries_are_applied_the_model_is_in_use(tiny: Any) -> None:
    one, (ids,) = tiny("llama"), prompts_of(6)
    with one.lm.session.entries_applied([ms.InterventionEntry(ms.add(drawn(64), layers=[1]))]):
        for call in (
            lambda: one.lm.generate(ids, max_tokens=1),
            lambda: one.lm.capture(ids),
            lambda: one.lm.score([ids], [[5]]),
            lambda: next(one.lm.stream(ids, max_tokens=1)),
        ):
            with pytest.raises(ms.BusyError):
                call()
    assert one.lm.generate(ids, max_tokens=1)


def test_bad_entries_are_refused_on_the_way_in(tiny: Any, tools: Any) -> None:
    one = tiny("llama")
    for spec, code in (
        (ms.add([1.0] * 63, layers=[1]), "E_BAD_PARAM"),
        (ms.add([1.0] * 64, layers=[7]), "E_LAYER_RANGE"),
        (ms.router(layers=[0], on=[1]), "E_SITE"),
    ):
        with pytest.raises(ms.SpecError) as caught:
            one.lm.session.entries_applied([ms.InterventionEntry(spec)]).__enter__()
        assert caught.value.code == code
        assert "ops[0]" in caught.value.path
        assert tools.hook_count(one.model) == 0


# --- what the arguments of a forward may hide


def test_a_cache_under_its_former_name_is_one(tiny: Any) -> None:
    """transformers still takes `past_key_values`: a step of it is no new prompt."""
    one, (ids,) = tiny("llama"), prompts_of(7)
    spec = ms.add(drawn(64), layers=[1], strength=8.0, rows="generated")
    (want,) = one.lm.generate(ids, max_tokens=TOKENS, steering=spec, **PLAIN)
    with one.lm.session.entries_applied([ms.InterventionEntry(spec)]):
        assert loop(one.model, [ids], name="past_key_values") == [want.token_ids]


def test_another_threads_forwards_pass(tiny: Any) -> None:
    """Entries are applied to what this thread runs; what another runs meanwhile is plain, and disturbs nothing."""
    one, (ids, other) = tiny("llama"), prompts_of(7, 4)
    spec, given, found = ms.add(drawn(64), layers=[1], strength=5.0), torch.tensor([other]), []

    def run() -> None:
        with torch.no_grad():
            found.append(one.model(given).logits)

    run()
    (want,) = one.lm.generate(ids, max_tokens=TOKENS, steering=spec, **PLAIN)
    cache, made, step = DynamicCache(config=one.model.config), [], torch.tensor([ids])
    with one.lm.session.entries_applied([ms.InterventionEntry(spec)]), torch.no_grad():
        for _ in range(TOKENS):
            step = one.model(step, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
            made.append(int(step))
            with ThreadPoolExecutor(1) as pool:
                pool.submit(run).result()
    assert tuple(made) == want.token_ids
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_hooks_and_steering_of_one_module_have_one_order(tiny: Any) -> None:
    """By whichever way the passes are run, an item's entries act in the same order."""
    one, (ids,) = tiny("llama"), prompts_of(7)
    double = ms.HookEntry({"forward": [{"module": "model.layers.1", "hook_func": lambda *args: args[3] * 2}]})
    for entries in (
        (double, steer := ms.InterventionEntry(ms.clamp(drawn(64), layers=[1], value=30.0))),
        (steer, double),
    ):
        item = ms.GenerationItem(PreparedPrompt(tuple(ids)), entries)
        made = [
            one.lm.session.generate([item], ms.GenerationParams(max_tokens=TOKENS, extra=extra, **PLAIN))[0].token_ids
            for extra in ({}, {"num_beams": 1})
        ]
        with one.lm.session.entries_applied(entries):
            made.append(bare_loop(one.model, ids))
        assert len(set(made)) == 1


def test_a_body_that_is_run_without_its_head_is_steered_or_refused_in_words(tiny: Any) -> None:
    one, (ids,), seen = tiny("llama"), prompts_of(6), []
    spec = ms.add(drawn(64), layers=[1], strength=5.0)
    hook = ms.HookEntry({"forward": [{"module": "model.layers.1", "hook_func": lambda *args: seen.append(args[3])}]})
    with one.lm.session.entries_applied([ms.InterventionEntry(spec), hook]), torch.no_grad():
        try:
            one.model.model(torch.tensor([ids]))
        except ms.MidstreamError:
            return
    assert torch.allclose(seen[0][0], one.lm.capture(ids, layers=[1], steering=spec).rows(1), atol=1e-4)


def test_forwards_whose_rows_cannot_be_known_are_refused(tiny: Any, tools: Any) -> None:
    one, (ids,) = tiny("llama"), prompts_of(6)
    given, spec = torch.tensor([ids]), ms.add(drawn(64), layers=[1], rows="generated")
    with one.lm.session.entries_applied([ms.InterventionEntry(spec)]), torch.no_grad():
        for arguments in (
            {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)},
            {"attention_mask": torch.ones(1, 3, dtype=torch.long)},
        ):
            with pytest.raises(ms.CaptureError) as caught:
                one.model(given, **arguments)
            tools.one_line(str(caught.value), "attention_mask")
        one.model(given)
    assert tools.hook_count(one.model) == 0
