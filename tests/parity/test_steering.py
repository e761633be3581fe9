"""Requests that are steered in different ways, together: each is as it is alone, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import midstream as ms
from midstream.core.generation import derive_seed
from midstream.core.prompts import PreparedPrompt
from midstream.taps.reference import reference

pytestmark = pytest.mark.filterwarnings("ignore:no row was selected")

Specs = list[ms.InterventionSpec | None]
MIXED = ["llama", "qwen3_moe"]
SCOPES = [
    None,
    "prompt",
    "generated",
    "prompt[-1]",
    "prompt[-1], generated",
    "prompt[-3:]",
    "prompt[1:-1]",
    "sequence[4:]",
    "sequence[6]",
    "generated[1:3]",
    "generated[0]",
    "prompt, generated, !prompt[0]",
    "sequence, !sequence[2:7]",
    "prompt{20,21,22,23,24}, generated{3}",
]


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prompts_of(*lengths: int, seed: int = 81) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def many(one: Any) -> Specs:
    """Specs of every kind, several of one kind with other vectors, strengths and scopes, and none."""
    layouts, width = one.lm.session.taps.layouts, one.lm.facts.hidden_size
    size = layouts["head_out"][0].head_size
    v = [drawn(width, seed=place) for place in range(8)]
    gates = [
        {"layers": [0, 1], "readout": {"kind": "affine", "w": sign * v[7]}, "rule": {"kind": "sum"}} for sign in (1, -1)
    ]
    found: Specs = [
        None,
        ms.add(v[1], layers=[1], strength=6.0),
        ms.add(v[2], layers=[1], strength=-4.0),
        ms.add(v[1], layers=[1], strength=6.0, rows="generated"),
        ms.add({0: v[3], 2: v[4]}, strength=3.0, rows="prompt[-1], generated"),
        ms.add(v[5], layers=[0, 1, 2], norm_match=True, strength=0.4),
        ms.add(drawn(3, width, seed=11), layers=[1], positions=[0, 3, 9], strength=5.0),
        ms.ablate(v[6], layers=[0, 1, 2]),
        ms.ablate(v[2], layers=[1, 2], strength=0.5, only_aligned={"measure": "projection", "above": 0.2}),
        ms.ablate(drawn(3, width, seed=12), layers=[1], strength=0.8) + ms.clamp(v[1], layers=[2], value=4.0),
        ms.replace(v[7], layers=[0], strength=0.5, rows="sequence[2:6]"),
        ms.rotate(drawn(2, width, seed=13), layers=[1], angle=1.2, mode="by") + ms.add(v[2], layers=[1], strength=2.0),
        ms.affine(0.3 * drawn(width, width, seed=14) / width**0.5, v[3], layers=[2], strength=0.7, rows="generated"),
        ms.low_rank(0.1 * drawn(2, width, seed=15), drawn(width, 2, seed=16), layers=[1], cap_norm=True),
        ms.add(drawn(2 * size, seed=17), layers=[1], site="head_out", heads=[0, 2], strength=4.0),
        ms.add(v[4], layers=[0], site="attn_out", strength=3.0) + ms.clamp(v[5], layers=[1], site="mlp_out", value=2.0),
        ms.add(v[0], layers=[0, 2], strength=4.0, gate=gates[0]),
        ms.add(v[0], layers=[0, 2], strength=4.0, gate=gates[1]),
        ms.affine(1.5 * np.eye(width), layers=[1], rows="sequence[1:]"),
        ms.add(v[1], layers=[1], strength=0.0),
    ]
    if "router_logits" in layouts:
        found += [ms.router(layers=[0, 2], on=[2]), ms.router(layers=[2], off=[1, 4], shift={0: 2.0}, rows="generated")]
    return found


def lengths_of(specs: Specs) -> list[int]:
    return [(7, 3, 12, 1, 9, 5, 16)[place % 7] for place in range(len(specs))]


def tokens_of(made: Sequence[ms.Completion]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in made]


def assert_receipts(got: ms.Completion, want: ms.Completion) -> None:
    assert len(got.steering) == len(want.steering)
    for one, other in zip(got.steering, want.steering, strict=True):
        assert (one.op, one.kind, one.site, one.layer) == (other.op, other.kind, other.site, other.layer)
        assert (one.selected, one.computed, one.skipped) == (other.selected, other.computed, other.skipped)
        assert one.complete
        assert one.relative == (None if other.relative is None else pytest.approx(other.relative, rel=1e-4))


# --- together and alone


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_batch_is_its_solo_runs(name: str, tiny: Any, tools: Any) -> None:
    one, specs = tiny(name), many(tiny(name))
    prompts = prompts_of(*lengths_of(specs))
    settings: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    batch = one.lm.capture(prompts, sites=one.sites, steering=specs, **settings)
    made = one.lm.generate(prompts, steering=specs, **settings)
    references = prompts_of(*[4] * len(prompts), seed=82)
    scores = one.lm.score(prompts, references, steering=specs)
    for sample, (ids, spec) in enumerate(zip(prompts, specs, strict=True)):
        alone = one.lm.capture([ids], sites=one.sites, steering=spec, **settings)
        assert batch.outputs[sample].token_ids == made[sample].token_ids == alone.outputs[0].token_ids, spec
        for site in one.sites:
            for layer, rows in alone.sample(0, site).items():
                assert tools.worst(batch.sample(sample, site)[layer], rows) <= 1, (spec, site, layer)
        assert_receipts(batch.outputs[sample], alone.outputs[0])
        assert_receipts(made[sample], alone.outputs[0])
        assert tools.worst(scores[[sample]], one.lm.score([ids], [references[sample]], steering=spec)) <= 2
    # the other way round
    back = one.lm.generate(prompts[::-1], steering=specs[::-1], **settings)
    assert tokens_of(back) == tokens_of(made[::-1])
    # and most specs show
    plain = one.lm.generate(prompts, **settings)
    assert sum(done.token_ids != other.token_ids for done, other in zip(made, plain, strict=True)) > len(specs) // 2


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_sampled_choices_with_seeds_of_their_own_are_as_alone(name: str, tiny: Any, tools: Any) -> None:
    one, specs = tiny(name), many(tiny(name))
    params = ms.GenerationParams(
        max_tokens=5, temperature=0.9, top_p=0.95, top_k=80, repetition_penalty=1.1, n=3, logprobs=2, ignore_eos=True
    )
    items = [
        ms.GenerationItem(PreparedPrompt(tuple(ids)), () if spec is None else (ms.InterventionEntry(spec),), seed=seed)
        for seed, (ids, spec) in enumerate(zip(prompts_of(*lengths_of(specs)), specs, strict=True))
    ]
    batch = one.lm.session.generate(items, params)
    for item, together in zip(items, batch, strict=True):
        (alone,) = one.lm.session.generate([item], params)
        assert tokens_of(together.choices) == tokens_of(alone.choices)
        assert len({done.token_ids for done in together.choices}) > 1
        assert_receipts(together, alone)
        for got, want in zip(together.choices, alone.choices, strict=True):
            for each, other in zip(got.logprobs, want.logprobs, strict=True):
                assert [token for token, _ in each.top] == [token for token, _ in other.top]
                assert each.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_rows_of_several_choices_are_the_references(tiny: Any, tools: Any) -> None:
    """The prompt's rows once, and each choice's own; a gate is decided for all of them."""
    one = tiny("llama")
    specs = [spec for place, spec in enumerate(many(one)) if place in (0, 1, 3, 4, 6, 10, 16, 17)]
    prompts = prompts_of(*lengths_of(specs))
    cap = one.lm.capture(
        prompts, sites=["resid_pre", "resid_post"], steering=specs, max_tokens=4, n=3, temperature=1.0, seed=3,
        ignore_eos=True,
    )  # fmt: skip
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    for sample, spec in enumerate(specs):
        for choice, done in enumerate(cap.outputs[sample].choices):
            mine = (cap.labels.sample == sample) & np.isin(cap.labels.choice, [-1, choice])
            ids = [*prompts[sample], *done.token_ids[:-1]]
            want = rows_of(one, ids, len(prompts[sample]), spec, "resid_pre", "resid_post")
            for key, rows in cap.tensors.items():
                assert tools.worst(rows[torch.from_numpy(mine)], want[key]) <= 1, (sample, choice, key)
        for line in cap.outputs[sample].steering:
            assert line.complete
    counts = [sum(line.computed for line in cap.outputs[place].steering) for place in range(3)]
    assert counts == [0, len(prompts[1]) + 9, 9]  # nothing, the prompt and three choices, three choices


def rows_of(one: Any, ids: list[int], prompt_len: int, spec: Any, *sites: str) -> dict[Any, Tensor]:
    taps = one.lm.session.taps
    wanted = {site: taps.sites[site] for site in sites}
    return reference(taps, ids, wanted, steering=spec, prompt_len=prompt_len)


def test_more_requests_than_a_batch_holds(tiny: Any) -> None:
    one = tiny("llama")
    specs = [spec for place, spec in enumerate(many(one)) if place in (0, 1, 2, 3, 9, 14, 16)] * 14
    prompts = prompts_of(*[1 + place % 6 for place in range(len(specs))])
    made = one.lm.generate(prompts, max_tokens=3, steering=specs, ignore_eos=True)
    for first in range(0, len(specs), 7):
        some = slice(first, first + 7)
        again = one.lm.generate(prompts[some], max_tokens=3, steering=specs[some], ignore_eos=True)
        assert tokens_of(made[some]) == tokens_of(again)


def test_sequences_that_end_early_leave_the_others_steered(fresh: Any, tools: Any) -> None:
    one = fresh("llama")
    specs = many(one)
    prompts = prompts_of(*lengths_of(specs))
    free = one.lm.generate(prompts, max_tokens=6, steering=specs, ignore_eos=True)
    ends = {free[1].token_ids[0], free[4].token_ids[1], free[9].token_ids[2]}
    one.model.generation_config.eos_token_id = sorted(ends)
    cap = one.lm.capture(prompts, layers=[1, 2], max_tokens=6, steering=specs)
    for sample, done in enumerate(cap.outputs):
        tokens = free[sample].token_ids
        stop = next((place for place, token in enumerate(tokens) if token in ends), 5)
        assert done.token_ids == tokens[: stop + 1]
        assert all(line.complete for line in done.steering)
        ids = [*prompts[sample], *done.token_ids[:-1]]
        want = rows_of(one, ids, len(prompts[sample]), specs[sample], "resid_post")
        for layer, rows in cap.sample(sample).items():
            assert tools.worst(rows, want["resid_post", layer]) <= 1, (sample, layer)
    assert {done.finish_reason for done in cap.outputs} == {"eos", "length"}


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_every_scope_in_one_batch(name: str, tiny: Any, tools: Any) -> None:
    """The same vector on other rows of each request; rows and counts are the reference's."""
    one, vector = tiny(name), drawn(64, seed=20)
    specs = [ms.add(vector, layers=[0, 2], strength=3.0, rows=scope) for scope in SCOPES]
    prompts = [prompts_of(9, seed=83)[0]] * len(SCOPES)
    prompts[3] = prompts_of(1)[0]
    cap = one.lm.capture(prompts, sites=one.sites, steering=specs, max_tokens=5, ignore_eos=True)
    for sample, (ids, spec) in enumerate(zip(prompts, specs, strict=True)):
        whole = [*ids, *cap.outputs[sample].token_ids[:-1]]
        want = rows_of(one, whole, len(ids), spec, *one.sites)
        for site in one.sites:
            for layer, rows in cap.sample(sample, site).items():
                assert tools.worst(rows, want[site, layer]) <= 1, (SCOPES[sample], site, layer)
        plain = rows_of(one, whole, len(ids), None, "resid_post")["resid_post", 0]
        moved = int(((cap.sample(sample, "resid_post")[0] - plain).norm(dim=1) > 1).sum())
        assert [line.computed for line in cap.outputs[sample].steering] == [moved, moved], SCOPES[sample]


# --- whose spec is whose


def test_lists_defaults_and_false(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(5, 8, 3)
    strong, other = (ms.add(drawn(64, seed=seed), layers=[1], strength=9.0) for seed in (1, 2))

    def tokens(lm: ms.LanguageModel, steering: Any) -> list[Any]:
        return tokens_of(lm.generate(prompts, max_tokens=4, steering=steering, ignore_eos=True))

    plain, steered, others = (tokens(one.lm, spec) for spec in (None, strong, other))
    assert all(len(set(of)) == 3 for of in zip(plain, steered, others, strict=True))
    assert tokens(one.lm, False) == plain
    assert tokens(one.lm, [strong, None, other]) == [steered[0], plain[1], others[2]]
    assert tokens(one.lm, (None, False, strong)) == [plain[0], plain[1], steered[2]]
    assert tokens(one.lm, strong.canonical() | {"ops": list(strong.ops)}) == steered
    assert one.lm.default_steering() is None
    with ms.load(one.model, steering=strong) as lm:
        assert lm.default_steering() == strong
        assert tokens(lm, None) == steered
        assert tokens(lm, False) == plain
        assert tokens(lm, other) == others
        assert tokens(lm, [None, False, other]) == [steered[0], plain[1], others[2]]
        assert tokens(lm, [[*strong.ops, *other.ops], None, False]) == [
            *(tokens(one.lm, strong + other)[0], steered[1], plain[2]),
        ]
    with ms.load(one.model, steering=False) as lm:
        assert tokens(lm, None) == plain


def test_the_same_call_with_the_same_seed_is_the_same_text(tiny: Any) -> None:
    one, specs = tiny("llama"), many(tiny("llama"))[:6]
    prompts = prompts_of(*lengths_of(specs))
    settings: dict[str, Any] = {"max_tokens": 6, "seed": 5, "n": 2, "steering": specs, "ignore_eos": True}

    def tokens(**changes: Any) -> list[Any]:
        return [tokens_of(done.choices) for done in lm.generate(prompts, **{**settings, **changes})]

    with ms.load(one.model) as lm:
        first = tokens()
        assert tokens() == first
        assert tokens(seed=6) != first
        for index, (ids, spec) in enumerate(zip(prompts, specs, strict=True)):
            logits: list[Tensor] = []
            reference(lm.session.taps, ids, {}, steering=spec, prompt_len=len(ids), logits=logits)
            for choice, drawn_tokens in enumerate(first[index]):
                generator = torch.Generator().manual_seed(derive_seed(5, 0, index, choice))
                assert drawn_tokens[0] == torch.multinomial(logits[0][-1].softmax(-1), 1, generator=generator).item()
        assert [of[0] for of in first] == tokens_of(lm.generate(prompts, **{**settings, "n": 1}))
        cap = lm.capture(prompts, layers=[0], **settings)
        assert [tokens_of(done.choices) for done in cap.outputs] == first
        same = [prompts[1]] * 2
        twice = lm.generate(same, max_tokens=6, seed=5, seed_scope="dispatch", steering=specs[1], ignore_eos=True)
        assert twice[0].token_ids == twice[1].token_ids
        *_, chunk = lm.stream(prompts[0], max_tokens=6, seed=5, steering=specs[0], ignore_eos=True)
        assert chunk.completion.token_ids == first[0][0]


def test_functions_see_the_rows_and_labels_of_one_request_at_a_time(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(4, 2, 6)
    seen: list[tuple[int, list[int], list[int], list[str], torch.dtype]] = []

    def look(rows: Tensor, labels: ms.Labels) -> None:
        (sample,) = set(labels.sample.tolist())
        assert len(rows) == len(labels)
        seen.append((sample, labels.position.tolist(), labels.token_id.tolist(), labels.phase.tolist(), rows.dtype))

    looking = ms.function(look, layers=[1], rows="prompt[-2:], generated")
    plain = one.lm.generate(prompts, max_tokens=2, ignore_eos=True)
    made = one.lm.generate(prompts, max_tokens=2, steering=[looking, None, looking], ignore_eos=True)
    assert tokens_of(made) == tokens_of(plain)
    first, last = (made[place].token_ids[0] for place in (0, 2))
    float32 = torch.float32
    assert sorted(seen, key=lambda of: (of[3], of[0])) == [
        (0, [4], [first], ["generation"], float32),
        (2, [6], [last], ["generation"], float32),
        (0, [2, 3], prompts[0][2:], ["prompt"] * 2, float32),
        (2, [4, 5], prompts[2][4:], ["prompt"] * 2, float32),
    ]
    with pytest.raises(ms.CaptureError, match="the function returned"):
        one.lm.generate(prompts, max_tokens=2, steering=ms.function(lambda rows, _: rows[:, :3], layers=[1]))


def test_functions_see_the_label_of_each_choice(tiny: Any) -> None:
    one, prompts, seen = tiny("llama"), prompts_of(4, 2), set()

    def look(_: Tensor, labels: ms.Labels) -> None:
        seen.update(zip(labels.sample.tolist(), labels.choice.tolist(), labels.phase.tolist(), strict=True))

    one.lm.generate(prompts, max_tokens=3, n=2, seed=1, steering=ms.function(look, layers=[1]), ignore_eos=True)
    assert seen == {
        *((sample, -1, "prompt") for sample in (0, 1)),
        *((sample, choice, "generation") for sample in (0, 1) for choice in (0, 1)),
    }


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_routers_change_which_experts_run(name: str, tiny: Any) -> None:
    one, prompts = tiny(name), prompts_of(7, 12, 4)
    specs = [
        ms.router(layers=[2], on=[3], off=[0, 5]),
        None,
        ms.router(layers=[2], shift={1: 40.0, 4: -40.0}, rows="prompt[2:], generated"),
    ]

    def experts(layer: int, steering: Any) -> list[list[set[int]]]:
        """Request → the experts of each of its rows: prompt, then one row for each token."""
        found: list[Tensor] = []
        handle = one.model.model.layers[layer].mlp.experts.register_forward_pre_hook(
            lambda _, args: found.append(args[1].clone())
        )
        made.append(tokens_of(one.lm.generate(prompts, max_tokens=4, steering=steering, ignore_eos=True)))
        handle.remove()
        wide = found[-4].reshape(len(prompts), -1, found[-4].shape[-1])  # before it, passes that prove the taps
        order = sorted(range(len(prompts)), key=lambda place: (-len(prompts[place]), place))
        rows = [[set(row.tolist()) for row in wide[order.index(p), -len(prompts[p]) :]] for p in range(len(prompts))]
        for step in found[-3:]:
            for place, row in zip(order, step, strict=True):
                rows[place].append(set(row.tolist()))
        return rows

    made: list[Any] = []
    before, after, below = experts(2, None), experts(2, specs), experts(0, specs)
    assert before[0] != after[0]
    assert all(3 in row and not row & {0, 5} for row in after[0])
    assert any(3 not in row or row & {0, 5} for row in before[0])
    assert after[1] == before[1]
    assert after[2][:2] == before[2][:2]
    assert all(1 in row and 4 not in row for row in after[2][2:])
    assert below[1] == experts(0, None)[1]
    assert made[0] != made[1], "the experts do not show in the text"
