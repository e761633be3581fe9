"""Captures that generate: rows of prompt and decode are the oracle's, tokens are those of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import midstream as ms
from parity.architectures import ARCHITECTURES, LISTED, WINDOW, extra_inputs, prompt
from parity.oracle import FAMILIES

NAMES = [name for name in ARCHITECTURES if name in FAMILIES]
#: Unlisted architectures whose caches may be refused.
MAY_REFUSE = {"mamba", "qwen3_next"}
#: Gives the same token whatever it reads.
ONE_TOKEN = {"opt_post_norm"}
TOKENS = WINDOW + 3
LENGTHS = (WINDOW - 4, 3 * WINDOW + 1, 1, WINDOW + 1)


def prompts_of(lengths: Any = LENGTHS, seed: int = 21) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def greedy(model: PreTrainedModel, ids: list[int], tokens: int, **changes: Any) -> list[int]:
    """What `model.generate` gives for one prompt alone, without any EOS unless one is named."""
    changes = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, **changes}
    given = torch.tensor([ids])
    made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, **changes)
    return made[0, len(ids) :].tolist()


def tokens_of(cap: ms.CaptureResult) -> list[list[int]]:
    return [list(output.token_ids) for output in cap.outputs]


def until(tokens: list[int], ends: set[int]) -> list[int]:
    """Tokens up to and with the first of `ends`."""
    stop = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


# --- greedy, every architecture


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_decode_rows_are_the_oracles_and_tokens_the_models(name: str, tiny: Any, tools: Any) -> None:
    one, prompts = tiny(name), prompts_of()
    if name in MAY_REFUSE:
        with tools.calls(one.model.get_input_embeddings()) as seen:
            try:
                cap = one.lm.capture(prompts, sites=one.sites, max_tokens=TOKENS, ignore_eos=True)
            except ms.UnsupportedOperationError as error:
                tools.one_line(str(error), "max_tokens")
                assert not seen
                return
    cap = one.lm.capture(prompts, sites=one.sites, max_tokens=TOKENS, ignore_eos=True)
    assert tokens_of(cap) == [greedy(one.model, ids, TOKENS) for ids in prompts]
    assert [output.finish_reason for output in cap.outputs] == ["length"] * len(prompts)
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    rows = sum(LENGTHS) + len(prompts) * (TOKENS - 1)
    assert cap.receipt == ms.CaptureReceipt(rows, rows)
    for output, ids in zip(cap.outputs, prompts, strict=True):
        assert output.receipt == ms.CaptureReceipt(len(ids) + TOKENS - 1, len(ids) + TOKENS - 1)
    one.assert_rows(cap)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MAY_REFUSE | ONE_TOKEN])
def test_sequences_that_end_early_leave_the_others_right(name: str, fresh: Any, tools: Any) -> None:
    one, prompts = fresh(name), prompts_of(seed=22)
    full = [greedy(one.model, ids, TOKENS) for ids in prompts]
    # the shortest prompt ends at once, the longest after three tokens, the others when they please
    ends = {full[2][0], full[1][2]}
    one.model.generation_config.eos_token_id = sorted(ends)
    cap = one.lm.capture(prompts, sites=["resid_pre", "resid_post"], max_tokens=TOKENS)
    want = [until(tokens, ends) for tokens in full]
    assert min(map(len, want)) < max(map(len, want)), "all sequences are of one length: choose another seed"
    assert tokens_of(cap) == want
    reasons = ["eos" if tokens[-1] in ends else "length" for tokens in want]
    assert [output.finish_reason for output in cap.outputs] == reasons
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    one.assert_rows(cap)


@pytest.mark.parametrize("name", LISTED)
def test_decoded_rows_are_those_of_the_same_ids_as_a_prompt(name: str, tiny: Any, tools: Any) -> None:
    one, prompts = tiny(name), prompts_of(seed=23)
    cap = one.lm.capture(prompts, max_tokens=6, ignore_eos=True, rows="generated", layers=[0, 2])
    whole = [[*output.prompt_token_ids, *output.token_ids[:-1]] for output in cap.outputs]
    again = one.lm.capture(whole, layers=[0, 2], per_prompt_rows=[f"prompt[{len(ids)}:]" for ids in prompts])
    assert cap.labels.position.tolist() == again.labels.position.tolist()
    for layer in (0, 2):
        assert tools.worst(cap.rows(layer), again.rows(layer)) <= 1


def test_more_prompts_than_a_batch_holds(tiny: Any, tools: Any) -> None:
    one = tiny("gpt2")
    prompts = prompts_of([1 + place % 13 for place in range(131)], seed=24)
    cap = one.lm.capture(prompts, layers=[2], max_tokens=4, ignore_eos=True)
    assert len(cap.outputs) == 131
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    for place in range(0, 131, 13):
        alone = one.lm.capture([prompts[place]], layers=[2], max_tokens=4, ignore_eos=True)
        assert alone.outputs[0].token_ids == cap.outputs[place].token_ids
    one.assert_rows(cap)


def test_the_last_position_of_the_context_can_be_reached(tiny: Any, tools: Any) -> None:
    one, ids = tiny("gpt2"), prompts_of([250], seed=25)[0]
    cap = one.lm.capture([ids, ids[:3]], max_tokens=7, ignore_eos=True)
    assert cap.sample_positions(0)[-1] == 255
    assert list(cap.outputs[0].token_ids) == greedy(one.model, ids, 7)
    one.assert_rows(cap)
    with pytest.raises(ms.PromptError) as caught:
        one.lm.capture([ids[:3], ids], max_tokens=8)
    tools.one_line(str(caught.value), "prompt 1", "257", "256")


def test_an_image_prompt_decodes_beside_text(tiny: Any, tools: Any) -> None:
    one, image = tiny("llava"), extra_inputs("llava")
    texts = prompts_of(seed=26)[:2]
    with_image = {"prompt_token_ids": prompt("llava"), "multi_modal_data": image}
    cap = one.lm.capture([texts[0], with_image, texts[1]], sites=one.sites, max_tokens=5, ignore_eos=True)
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    one.assert_rows(cap, {1: image})
    plain = [greedy(one.model, ids, 5) for ids in texts]
    assert tokens_of(cap) == [plain[0], greedy(one.model, prompt("llava"), 5, **image), plain[1]]
    both = one.lm.capture([with_image], max_tokens=5, ignore_eos=True, n=2, seed=3, temperature=1.0)
    one.assert_rows(both, {0: image})


# --- what is unset is neutral


def test_the_models_generation_config_changes_nothing_but_eos(fresh: Any) -> None:
    one, prompts = fresh("llama"), prompts_of(seed=27)
    want = [greedy(one.model, ids, 6) for ids in prompts]
    one.model.generation_config.update(
        do_sample=True,
        temperature=0.2,
        top_k=1,
        repetition_penalty=9.0,
        min_new_tokens=5,
        max_new_tokens=2,
        num_beams=3,
    )
    before = one.model.generation_config.to_dict()
    cap = one.lm.capture(prompts, max_tokens=6, ignore_eos=True)
    assert tokens_of(cap) == want
    assert one.model.generation_config.to_dict() == before


def test_penalty_and_min_tokens_are_those_of_generate(fresh: Any) -> None:
    one, prompts = fresh("llama"), prompts_of(seed=28)
    cap = one.lm.capture(prompts, max_tokens=8, ignore_eos=True, repetition_penalty=1.7)
    assert tokens_of(cap) == [greedy(one.model, ids, 8, repetition_penalty=1.7) for ids in prompts]
    ends = sorted({tokens[1] for tokens in (greedy(one.model, ids, 8) for ids in prompts)})
    one.model.generation_config.eos_token_id = ends
    cap = one.lm.capture(prompts, max_tokens=8, min_tokens=4)
    assert tokens_of(cap) == [greedy(one.model, ids, 8, eos_token_id=ends, min_new_tokens=4) for ids in prompts]
    assert min(map(len, tokens_of(cap))) >= 4
    one.assert_rows(cap)


def test_min_tokens_with_an_eos_beyond_the_vocabulary(fresh: Any) -> None:
    """Configs of shrunk models keep the EOS ids of the large ones."""
    one, ids = fresh("llama"), prompts_of(seed=28)[0]
    one.model.generation_config.eos_token_id = [2, 50256]
    cap = one.lm.capture([ids], max_tokens=4, min_tokens=4)
    assert tokens_of(cap) == [greedy(one.model, ids, 4, eos_token_id=2, min_new_tokens=4)]
    cap = one.lm.capture([ids], max_tokens=4, min_tokens=4, stop_token_ids=[70000], ignore_eos=True)
    assert tokens_of(cap) == [greedy(one.model, ids, 4)]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "seed": 4},
        {"greedy": True, "seed": 4},
        {"top_k": 1},
        {"top_p": 1e-6, "seed": 1},
        {"temperature": 1e-4, "seed": 2},
    ],
    ids=str,
)
def test_sampling_with_no_freedom_is_greedy(settings: dict[str, Any], tiny: Any) -> None:
    one, prompts = tiny("qwen3"), prompts_of(seed=29)
    cap = one.lm.capture(prompts, max_tokens=5, ignore_eos=True, **settings)
    assert tokens_of(cap) == [greedy(one.model, ids, 5) for ids in prompts]


# --- rows that are selected


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma2"])
def test_selected_rows_of_both_phases(name: str, tiny: Any, tools: Any) -> None:
    one, prompts = tiny(name), prompts_of((4, 17, 20, 1), seed=31)
    every = one.lm.capture(prompts, max_tokens=9, ignore_eos=True)
    token = every.outputs[0].token_ids[2]
    prompts[1][6] = token  # a token that stands in a prompt and is generated after another
    every = one.lm.capture(prompts, max_tokens=9, ignore_eos=True)
    full = tools.every_row(every.outputs)
    length = [len(ids) for ids in prompts]
    chosen = {
        "generated[3:]": lambda s, p, t, gen: gen and p - length[s] >= 3,
        "sequence[17]": lambda s, p, t, gen: p == 17,
        "sequence[15:19], !generated[0]": lambda s, p, t, gen: 15 <= p < 19 and p != length[s],
        f"sequence{{{token}}}": lambda s, p, t, gen: t == token,
        f"generated{{{token}}}": lambda s, p, t, gen: gen and t == token,
        f"prompt{{{token}}}": lambda s, p, t, gen: not gen and t == token,
        f"sequence, !sequence{{{token}}}": lambda s, p, t, gen: t != token,
        "prompt[-2:], generated[0], generated[7]": lambda s, p, t, gen: (
            p >= length[s] - 2 and p <= length[s] if p <= length[s] else p == length[s] + 7
        ),
        "generated, !sequence[0:22]": lambda s, p, t, gen: gen and p >= 22,
        "prompt": lambda s, p, t, gen: not gen,
    }
    for rows, holds in chosen.items():
        want = [row for row in full if holds(row[0], row[2], row[3], row[4] == "generation")]
        cap = one.lm.capture(prompts, rows=rows, max_tokens=9, ignore_eos=True, sites=["resid_pre", "resid_post"])
        assert tools.table_of(cap.labels) == want, rows
        assert cap.receipt == ms.CaptureReceipt(len(want), len(want))
        assert want, rows
        one.assert_rows(cap)


def test_a_selection_of_its_own_for_each_prompt(tiny: Any, tools: Any) -> None:
    one, prompts = tiny("opt"), prompts_of((6, 12, 3, 9), seed=32)
    each = ["generated[1]", None, "prompt[0], sequence[4]", {"generation": "all", "exclude_generation_positions": [2]}]
    cap = one.lm.capture(prompts, rows="prompt[-1]", per_prompt_rows=each, max_tokens=5, ignore_eos=True)
    assert [row[:3:2] for row in tools.table_of(cap.labels)] == [
        *((0, 7), (1, 11), (2, 0), (2, 4)),
        *((3, position) for position in (9, 10, 12)),
    ]
    one.assert_rows(cap)


def test_rows_that_no_sequence_reaches(fresh: Any) -> None:
    one, prompts = fresh("llama"), prompts_of((6, 3), seed=33)
    with pytest.warns(UserWarning, match="row") as warned:
        cap = one.lm.capture(prompts, rows="generated[5:]", max_tokens=5, ignore_eos=True)
    assert len(warned) == 1
    assert cap.receipt == ms.CaptureReceipt(0, 0)
    assert (len(cap.labels), cap.layer_ids) == (0, ())
    assert [len(output.token_ids) for output in cap.outputs] == [5, 5]
    some = one.lm.capture(prompts, rows="sequence[6:]", max_tokens=2, ignore_eos=True, layers=[1])
    assert some.sample(0)[1].shape == (1, 64)
    assert some.sample(1)[1].shape == (0, 64)


def test_one_token_is_none_at_all(tiny: Any, tools: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(seed=34)
    for settings in ({}, {"temperature": 1.0, "seed": 5}, {"stop_token_ids": [4]}):
        cap = one.lm.capture(prompts, max_tokens=1, **settings)
        assert [(output.token_ids, output.finish_reason) for output in cap.outputs] == [((), None)] * len(prompts)
        assert [row[:3] for row in tools.table_of(cap.labels)] == [
            (sample, -1, position) for sample, ids in enumerate(prompts) for position in range(len(ids))
        ]
        one.assert_rows(cap)


def test_one_token_of_several_choices_is_sampled(tiny: Any) -> None:
    """More than one choice makes sense for a sampled token alone, so it is sampled; no choice has a row of its own."""
    one, prompts = tiny("llama"), prompts_of(seed=34)
    cap = one.lm.capture(prompts, max_tokens=1, n=3, temperature=1.0, seed=5)
    assert [[len(choice.token_ids) for choice in output.choices] for output in cap.outputs] == [[1] * 3] * len(prompts)
    assert set(cap.labels.choice.tolist()) == {-1}
    one.assert_rows(cap)


@pytest.mark.parametrize("rows", ["generated{5,9}", "generated", None], ids=str)
def test_tensors_own_their_memory_and_no_more(rows: str | None, fresh: Any) -> None:
    one, prompts = fresh("llama"), prompts_of(seed=35)
    one.model.generation_config.eos_token_id = greedy(one.model, prompts[1], 3)[1:]
    prompts[0][2:4] = [5, 9]
    both = f"{rows}, prompt{{5,9}}" if rows and "{" in rows else rows
    cap = one.lm.capture(prompts, rows=both, max_tokens=40)
    assert len(cap.labels)
    for tensor in cap.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
