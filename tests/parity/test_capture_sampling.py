"""Captures of sampled text: several choices, seeds, and what ends a sequence."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import midstream as ms
from midstream.core.generation import derive_seed

SAMPLED = {"temperature": 1.0, "seed": 7, "ignore_eos": True}


def prompts_of(*lengths: int, seed: int = 41) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def tokens_of(cap: ms.CaptureResult) -> list[Any]:
    return [[one.token_ids for one in output.choices or (output,)] for output in cap.outputs]


# --- several choices


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe", "bloom", "gpt_oss"])
def test_choices_share_prompt_rows_and_go_their_own_way(name: str, tiny: Any, tools: Any) -> None:
    one, prompts = tiny(name), prompts_of(5, 19, 1, 9)
    cap = one.lm.capture(prompts, sites=one.sites, n=3, max_tokens=10, **SAMPLED)
    assert [len(output.choices) for output in cap.outputs] == [3] * 4
    for output in cap.outputs:
        assert output.token_ids == output.choices[0].token_ids
        assert len({one.token_ids for one in output.choices}) == 3, "choices that do not differ"
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    rows = sum(map(len, prompts)) + 4 * 3 * 9
    assert cap.receipt == ms.CaptureReceipt(rows, rows)
    one.assert_rows(cap)


def test_choices_that_end_at_different_times(fresh: Any, tools: Any) -> None:
    one, prompts = fresh("mistral"), prompts_of(12, 2, 7)
    free = tokens_of(one.lm.capture(prompts, n=4, max_tokens=9, **SAMPLED))
    ends = {free[0][1][0], free[1][0][2], free[2][3][5]}
    one.model.generation_config.eos_token_id = sorted(ends)
    again = ms.load(one.model)
    cap = again.capture(prompts, n=4, max_tokens=9, temperature=1.0, seed=7, sites=["resid_post", "k"])
    for sample, choices in enumerate(free):
        for choice, tokens in enumerate(choices):
            stop = next((place for place, token in enumerate(tokens) if token in ends), None)
            got = cap.outputs[sample].choices[choice]
            assert got.token_ids == tokens[: None if stop is None else stop + 1]
            assert got.finish_reason == ("length" if stop is None else "eos")
    assert len({len(tokens) for tokens in tokens_of(cap)[0]}) > 1
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    one.assert_rows(cap)


def test_selections_hold_for_every_choice(tiny: Any, tools: Any) -> None:
    one, prompts = tiny("phi3"), prompts_of(6, 11)
    cap = one.lm.capture(prompts, rows="prompt[-1], generated[1]", n=2, max_tokens=4, **SAMPLED)
    assert [row[:3] for row in tools.table_of(cap.labels)] == [
        *((0, -1, 5), (0, 0, 7), (0, 1, 7), (1, -1, 10), (1, 0, 12), (1, 1, 12)),
    ]
    one.assert_rows(cap)


def test_greedy_choices_are_one_and_the_same(tiny: Any) -> None:
    one = tiny("llama")
    cap = one.lm.capture(prompts_of(6, 3), n=2, max_tokens=4, ignore_eos=True)
    assert all(len({one.token_ids for one in output.choices}) == 1 for output in cap.outputs)
    one.assert_rows(cap)


# --- seeds


def test_the_same_call_with_the_same_seed_gives_the_same_text(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(6, 13, 2)
    first = tokens_of(one.lm.capture(prompts, n=2, max_tokens=8, **SAMPLED))
    with ms.load(one.model) as other:
        assert tokens_of(other.capture(prompts, n=2, max_tokens=8, **SAMPLED)) == first
    assert tokens_of(one.lm.capture(prompts, n=2, max_tokens=8, **SAMPLED)) == first
    assert tokens_of(one.lm.capture(prompts, n=2, max_tokens=8, **{**SAMPLED, "seed": 8})) != first


def test_a_seeded_item_does_not_depend_on_its_batch(tiny: Any) -> None:
    name, prompts = "qwen3", prompts_of(6, 13, 2, 30)

    def tokens(given: list[list[int]], **settings: Any) -> Any:
        with ms.load(tiny(name).model) as lm:
            return tokens_of(lm.capture(given, max_tokens=8, **{**SAMPLED, **settings}))

    every = tokens(prompts)
    assert tokens(prompts[:1]) == every[:1]
    assert tokens(prompts[:2]) == every[:2]
    assert tokens([prompts[3], prompts[1], prompts[0]])[1] == every[1]
    assert [row[0] for row in tokens(prompts, n=3)] == [row[0] for row in every]


def test_seeds_are_the_derived_ones(tiny: Any) -> None:
    """The first token of each choice is drawn from the plain model's distribution by a generator of its own."""
    one, prompts = tiny("llama"), prompts_of(6, 13)
    with ms.load(one.model) as lm:
        got = tokens_of(lm.capture(prompts, n=2, max_tokens=2, **SAMPLED))
    for index, ids in enumerate(prompts):
        with torch.no_grad():
            probabilities = one.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
        for choice in range(2):
            generator = torch.Generator().manual_seed(derive_seed(7, 0, index, choice))
            assert got[index][choice][0] == torch.multinomial(probabilities, 1, generator=generator).item()


def test_dispatch_gives_every_item_the_seed_of_the_first(tiny: Any) -> None:
    ids, other = prompts_of(9, 4)
    with ms.load(tiny("llama").model) as lm:
        cap = lm.capture([ids, other, ids], max_tokens=8, seed_scope="dispatch", n=2, **SAMPLED)
    first, _, last = tokens_of(cap)
    assert first == last
    with ms.load(tiny("llama").model) as lm:
        item = tokens_of(lm.capture([ids, other, ids], max_tokens=8, n=2, **SAMPLED))
    assert item[0] == first
    assert item[2] != first


def test_the_callers_random_state_is_left_as_it_was(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(9, 4)
    state, numpy, python = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one.lm.capture(prompts, max_tokens=5, n=2, **SAMPLED)
    one.lm.capture(prompts, max_tokens=5)
    one.lm.capture(prompts)
    ms.load(one.model).close()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy).all()
    assert random.getstate() == python


def test_unseeded_sampling_follows_the_global_seed(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(9, 4)
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        made.append(tokens_of(one.lm.capture(prompts, max_tokens=9, temperature=1.5)))
    made.append(tokens_of(one.lm.capture(prompts, max_tokens=9, temperature=1.5)))
    assert made[0] == made[1] != made[2]


# --- what ends a sequence


@pytest.fixture
def spoken(fresh: Any, words: Any) -> Any:
    """A model with a tokenizer, a prompt, and the words that it goes on with."""
    one, ids = fresh("llama", tokenizer=words), prompts_of(7, seed=43)[0]
    cap = one.lm.capture([ids], max_tokens=10, ignore_eos=True)
    assert len(set(cap.outputs[0].token_ids)) > 6
    return one, ids, list(cap.outputs[0].token_ids), cap.outputs[0].text


def test_text_is_what_was_generated(spoken: Any) -> None:
    _, _, tokens, text = spoken
    assert text == " ".join(f"w{token:03}" for token in tokens if token > 2)


def test_a_stop_string_ends_text_before_it_and_keeps_its_tokens(spoken: Any, tools: Any) -> None:
    one, ids, tokens, text = spoken
    for place in (0, 3, 9):
        stop = f"w{tokens[place]:03}"
        end = tokens.index(tokens[place])
        cap = one.lm.capture([ids, ids[:3]], max_tokens=10, ignore_eos=True, stop=["no such word", stop])
        output = cap.outputs[0]
        assert list(output.token_ids) == tokens[: end + 1]
        assert output.finish_reason == "stop"
        assert output.text == text.split(stop)[0]
        assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
        one.assert_rows(cap)
    across = f"{tokens[2] % 100:02} w{tokens[3] // 100}"
    output = one.lm.capture([ids], max_tokens=10, ignore_eos=True, stop=across).outputs[0]
    assert (output.finish_reason, output.text) == ("stop", text.split(across)[0])
    assert text.startswith(output.text)


def test_stop_ids_are_kept_and_come_before_eos_and_length(spoken: Any) -> None:
    one, ids, tokens, _ = spoken
    place = next(place for place in range(2, 9) if tokens[place] not in tokens[:place])
    one.model.generation_config.eos_token_id = [2, tokens[place]]

    def ended(**settings: Any) -> Any:
        output = one.lm.capture([ids], **{"max_tokens": 10, **settings}).outputs[0]
        assert list(output.token_ids) == tokens[: len(output.token_ids)]
        return len(output.token_ids), output.finish_reason

    word = f"w{tokens[place]:03}"
    assert ended() == (place + 1, "eos")
    assert ended(stop_token_ids=[tokens[place]]) == (place + 1, "stop")
    assert ended(stop=word) == (place + 1, "stop")
    assert ended(ignore_eos=True) == (10, "length")
    assert ended(ignore_eos=True, stop_token_ids=[tokens[place]]) == (place + 1, "stop")
    assert ended(max_tokens=place + 1) == (place + 1, "eos")
    assert ended(max_tokens=place + 1, ignore_eos=True, stop=word) == (place + 1, "stop")
    assert ended(max_tokens=place) == (place, "length")


def test_each_prompt_stops_for_its_own_reason(spoken: Any, tools: Any) -> None:
    one, ids, tokens, _ = spoken
    others = prompts_of(3, 12, 5, seed=44)
    free = [list(output.token_ids) for output in one.lm.capture(others, max_tokens=10, ignore_eos=True).outputs]
    one.model.generation_config.eos_token_id = free[0][1]
    stop_id = free[1][4]
    cap = one.lm.capture([ids, *others], max_tokens=10, stop_token_ids=[stop_id])
    for output, whole in zip(cap.outputs, [tokens, *free], strict=True):
        end = next((place for place, token in enumerate(whole) if token in (stop_id, free[0][1])), None)
        want = whole[: None if end is None else end + 1]
        assert list(output.token_ids) == want
        reason = {stop_id: "stop", free[0][1]: "eos"}.get(want[-1], "length")
        assert output.finish_reason == reason
    assert len({len(output.token_ids) for output in cap.outputs}) > 1
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    one.assert_rows(cap)


@pytest.mark.parametrize("length", [4, 60], ids=["just after", "long after"])
def test_min_tokens_and_a_stop_string_that_came_too_early(length: int, spoken: Any) -> None:
    """Whether the sequence ends then or goes on, the text is cut when the reason is `stop`, and only then."""
    one, ids, _, _ = spoken
    free = one.lm.capture([ids], max_tokens=length + 2, ignore_eos=True).outputs[0]
    early = next(token for token in free.token_ids[:3] if free.token_ids.count(token) == 1)
    stop = f"w{early:03}"
    output = one.lm.capture([ids], max_tokens=length + 2, min_tokens=length, ignore_eos=True, stop=stop).outputs[0]
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) >= length
    whole = one.lm.tokenizer.decode(list(output.token_ids), skip_special_tokens=True)
    assert (output.finish_reason == "stop") == (output.text != whole), output


def test_special_tokens_are_in_the_ids_and_not_in_the_text(spoken: Any) -> None:
    one, ids, tokens, text = spoken
    with torch.no_grad():  # the output embedding now gives EOS where it gave the fourth token
        weight = one.model.lm_head.weight
        weight[2], weight[tokens[3]] = weight[tokens[3]].clone(), weight[2].clone()
    output = one.lm.capture([ids], max_tokens=10).outputs[0]
    assert list(output.token_ids) == [*tokens[:3], 2]
    assert (output.text, output.finish_reason) == (" ".join(text.split(" ")[:3]), "eos")


@pytest.mark.real_model
def test_stop_strings_of_several_bytes_and_tokens(smollm2_float32: ms.LanguageModel) -> None:
    lm, prompt = smollm2_float32, "The first ten numbers are one, two, three,"
    free = lm.capture(prompt, max_tokens=24, layers=[0], rows="prompt[0]").outputs[0]
    assert len(free.text) > 30
    for start, stop in ((3, 9), (10, 11), (17, 27)):
        word = free.text[start:stop]
        got = lm.capture(prompt, max_tokens=24, layers=[0], rows="prompt[0]", stop=word).outputs[0]
        assert (got.text, got.finish_reason) == (free.text.split(word)[0], "stop")
        assert free.token_ids[: len(got.token_ids)] == got.token_ids
        assert word in lm.tokenizer.decode(got.token_ids)
        assert word not in lm.tokenizer.decode(got.token_ids[:-1])
