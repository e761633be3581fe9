"""Prompts of every form as token ids, with a tokenizer small enough to read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerFast

from midstream.core.errors import PromptError
from midstream.core.prompts import PreparedPrompt, prepare, prompt_list

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<model>", "hello", "world", "fine", "yes"]
PAD, BOS, EOS, UNK, USER, MODEL, HELLO, WORLD, FINE, YES = range(len(WORDS))
TURNS = (
    "{% for m in messages %}<{{ 'user' if m.role == 'user' else 'model' }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


def tokenizer(*, adds_bos: bool = True, has_bos: bool = True, template: str | None = None) -> Any:
    """A tokenizer of whole words, which adds BOS to text or does not."""
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
        )
    named = {"bos_token": "<s>"} if has_bos else {}
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side="left",
        **named,
    )
    made.chat_template = template
    return made


WITH_BOS = tokenizer(template="{{ bos_token }} " + REFUSES_SYSTEM + TURNS)
TEMPLATE_WITHOUT_BOS = tokenizer(template=TURNS)
WITHOUT_BOS = tokenizer(adds_bos=False, has_bos=False, template=TURNS)
CHAT = [{"role": "user", "content": "hello world"}]


def ids(prompt: Any, use: Any = WITH_BOS, **options: Any) -> list[int]:
    return list(prepare(prompt, use, **options).token_ids)


# --- special tokens, once


def test_text_gets_bos_once() -> None:
    assert ids("hello world") == [BOS, HELLO, WORLD]
    assert ids("<s> hello world") == [BOS, HELLO, WORLD]
    assert ids("<s>hello world") == [BOS, HELLO, WORLD]
    assert ids("hello <s> world") == [BOS, HELLO, BOS, WORLD]


def test_special_tokens_can_be_switched_off() -> None:
    assert ids("hello world", add_special_tokens=False) == [HELLO, WORLD]
    assert ids("<s> hello", add_special_tokens=False) == [BOS, HELLO]


def test_no_bos_is_invented() -> None:
    assert ids("hello world", WITHOUT_BOS) == [HELLO, WORLD]
    assert ids(CHAT, WITHOUT_BOS) == [USER, HELLO, WORLD, MODEL]
    assert ids("<s> hello", tokenizer(adds_bos=False)) == [BOS, HELLO]


def test_a_text_that_is_bos_alone() -> None:
    assert ids("<s>") == [BOS]
    assert ids("<s> <s> hello") == [BOS, BOS, HELLO]  # the second is the caller's own


def test_the_text_is_kept() -> None:
    prepared = prepare("<s> hello", WITH_BOS)
    assert prepared.text == "<s> hello"
    assert prepare([HELLO], WITH_BOS).text is None


def test_chat_gets_bos_once() -> None:
    prepared = prepare(CHAT, WITH_BOS)
    assert prepared.token_ids == (BOS, USER, HELLO, WORLD, MODEL)
    assert prepared.text is not None
    assert prepared.text.count("<s>") == 1
    assert ids(CHAT, TEMPLATE_WITHOUT_BOS).count(BOS) <= 1


def test_chat_text_by_hand_gives_the_same_ids() -> None:
    """A caller who applies the template first, then hands over its text."""
    text = WITH_BOS.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ids(text) == ids(CHAT) == [BOS, USER, HELLO, WORLD, MODEL]


def test_a_transcript_that_ends_with_the_models_words_asks_for_none() -> None:
    assert ids([*CHAT, {"role": "assistant", "content": "fine"}]) == [BOS, USER, HELLO, WORLD, MODEL, FINE]


# --- ids and masks


@pytest.mark.parametrize(
    "given",
    [
        [BOS, HELLO],
        (BOS, HELLO),
        np.array([BOS, HELLO]),
        torch.tensor([BOS, HELLO]),
        [np.int64(BOS), np.int32(HELLO)],
        {"prompt_token_ids": [BOS, HELLO]},
        {"input_ids": torch.tensor([BOS, HELLO])},
        {"prompt": [BOS, HELLO]},
        {"prompt_token_ids": [BOS, HELLO], "prompt": "something else"},
    ],
    ids=str,
)
def test_ids_are_taken_as_they_are(given: Any) -> None:
    prepared = prepare(given, None)  # no tokenizer is needed
    assert prepared.token_ids == (BOS, HELLO)
    assert all(type(token) is int for token in prepared.token_ids)
    assert prepare(given, WITH_BOS).token_ids == (BOS, HELLO)
    assert ids([BOS, BOS, HELLO]) == [BOS, BOS, HELLO]


def test_pad_ids_without_a_mask_are_tokens() -> None:
    assert ids([PAD, PAD, BOS, HELLO]) == [PAD, PAD, BOS, HELLO]


@pytest.mark.parametrize("mask", [[0, 1, 1, 0], np.array([0, 1, 1, 0]), torch.tensor([False, True, True, False])])
@pytest.mark.parametrize("key", ["prompt_token_ids", "input_ids"])
def test_a_mask_drops_its_rows(key: str, mask: Any) -> None:
    assert ids({key: [PAD, BOS, HELLO, PAD], "attention_mask": mask}) == [BOS, HELLO]
    assert ids({key: torch.tensor([PAD, BOS, HELLO, PAD]), "attention_mask": mask}) == [BOS, HELLO]


def test_salt_and_images_are_kept() -> None:
    image = object()
    prepared = prepare({"prompt": "hello", "cache_salt": "tenant", "multi_modal_data": {"image": image}}, WITH_BOS)
    assert prepared.token_ids == (BOS, HELLO)
    assert prepared.cache_salt == "tenant"
    assert prepared.multi_modal_data["image"] is image


def test_what_is_prepared_stays() -> None:
    prepared = PreparedPrompt((1, 2))
    assert prepare(prepared, None) is prepared
    assert prompt_list([prepared, "hello"]) == [prepared, "hello"]


# --- one prompt or several


@pytest.mark.parametrize(
    "one",
    [
        "hello",
        [BOS, HELLO],
        (BOS, HELLO),
        np.array([BOS, HELLO]),
        torch.tensor([BOS, HELLO]),
        [np.int64(BOS), np.int64(HELLO)],
        CHAT,
        {"prompt": "hello"},
        {"prompt_token_ids": [BOS, HELLO]},
        {"messages": CHAT},
    ],
    ids=str,
)
def test_one_prompt(one: Any) -> None:
    several = prompt_list(one)
    assert len(several) == 1
    assert ids(several[0]) == ids(one)


@pytest.mark.parametrize(
    ("several", "expected"),
    [
        ([], []),
        (["hello", "world"], [[BOS, HELLO], [BOS, WORLD]]),
        (("hello", "world"), [[BOS, HELLO], [BOS, WORLD]]),
        ([[HELLO], [WORLD, YES]], [[HELLO], [WORLD, YES]]),
        ([torch.tensor([HELLO]), np.array([WORLD, YES])], [[HELLO], [WORLD, YES]]),
        (torch.tensor([[PAD, HELLO], [WORLD, YES]]), [[PAD, HELLO], [WORLD, YES]]),
        (np.array([[PAD, HELLO]]), [[PAD, HELLO]]),
        ([CHAT, CHAT], [[BOS, USER, HELLO, WORLD, MODEL]] * 2),
        ([CHAT], [[BOS, USER, HELLO, WORLD, MODEL]]),
        ([{"prompt": "hello"}, "world", [YES]], [[BOS, HELLO], [BOS, WORLD], [YES]]),
    ],
    ids=str,
)
def test_several_prompts(several: Any, expected: list[list[int]]) -> None:
    assert [ids(prompt) for prompt in prompt_list(several)] == expected


@pytest.mark.parametrize("tensors", [None, "pt", "np"])
def test_a_tokenizers_batch(tensors: str | None) -> None:
    """Left padding goes with its mask; what is left equals each text alone."""
    batch = WITH_BOS(["hello", "hello world fine"], padding=True, return_tensors=tensors)
    assert isinstance(batch, BatchEncoding)
    expected = [[BOS, HELLO], [BOS, HELLO, WORLD, FINE]]
    assert [ids(prompt) for prompt in prompt_list(batch)] == expected
    assert [ids(prompt) for prompt in prompt_list(dict(batch))] == expected


def test_a_batch_without_a_mask_keeps_its_padding() -> None:
    batch = {"input_ids": torch.tensor([[PAD, HELLO], [WORLD, YES]])}
    assert [ids(prompt) for prompt in prompt_list(batch)] == [[PAD, HELLO], [WORLD, YES]]


def test_one_tokenized_text() -> None:
    assert [ids(prompt) for prompt in prompt_list(WITH_BOS("hello world"))] == [[BOS, HELLO, WORLD]]


def test_a_batch_with_a_field_we_do_not_know_is_not_silently_stripped() -> None:
    batch = {"input_ids": [[HELLO], [WORLD]], "inputs_embeds": object()}
    with pytest.raises(PromptError, match="embed"):
        [prepare(prompt, None) for prompt in prompt_list(batch)]
    batch = {"input_ids": [[HELLO], [WORLD]], "cache_salt": "tenant"}
    assert [prepare(prompt, None).cache_salt for prompt in prompt_list(batch)] == ["tenant", "tenant"]


# --- refusals, each naming its prompt


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (None, "None"),
        (5, "5"),
        (1.5, "1.5"),
        ([1.0, 2.0], "1.0"),
        ([True, False], "True"),
        (torch.tensor([0.5]), "0.5"),
        ([[1], [2]], "token ids"),
        ([1, "hello"], "token ids"),
        (b"hello", "bytes"),
        ([], "token"),
        ("", "no tokens"),
        ([1, -1], "-1"),
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"text": "hello"}, "text"),
        ({"prompt": "hello", "input_ids": [1]}, "one of"),
        ({"prompt_embeds": torch.zeros(2, 4)}, "embeddings"),
        ({"inputs_embeds": torch.zeros(2, 4), "prompt_token_ids": [1, 2]}, "embeddings"),
        ({"prompt_token_ids": [1, 2], "attention_mask": [1]}, "mask of 1"),
        ({"prompt_token_ids": [1, 2], "attention_mask": 1}, "mask"),
        ({"prompt_token_ids": [1, 2], "attention_mask": [0, 0]}, "no tokens"),
        ({"prompt": "hello", "attention_mask": [1]}, "mask"),
        ({"prompt_token_ids": []}, "no tokens"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_by_its_index(bad: Any, says: str) -> None:
    use = WITHOUT_BOS if bad == "" else WITH_BOS
    with pytest.raises(PromptError, match=r"^prompt 7\b") as caught:
        prepare(bad, use, index=7)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", ["hello", CHAT, {"prompt": "hello"}, {"messages": CHAT}], ids=str)
def test_text_without_a_tokenizer_is_refused(prompt: Any) -> None:
    with pytest.raises(PromptError, match=r"^prompt 2 .*no tokenizer.*token ids"):
        prepare(prompt, None, index=2)


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(PromptError, match=r"^prompt 3 .*chat template"):
        prepare(CHAT, tokenizer(), index=3)


def test_what_the_template_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(PromptError, match=r"^prompt 1\b.*no system role"):
        prepare([{"role": "system", "content": "x"}], WITH_BOS, index=1)


def test_a_mask_with_too_few_rows_is_refused() -> None:
    with pytest.raises(PromptError, match="mask"):
        [prepare(p, None) for p in prompt_list({"input_ids": [[1], [2]], "attention_mask": [[1]]})]


@pytest.mark.parametrize("bad", [5, None, 1.5, torch.tensor(3)], ids=str)
def test_a_call_without_a_list_of_prompts(bad: Any) -> None:
    with pytest.raises(PromptError):
        [prepare(prompt, None, index=place) for place, prompt in enumerate(prompt_list(bad))]


def test_a_tokenizer_without_special_tokens() -> None:
    class Lengths(SimpleNamespace):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [len(word) for word in text.split()]}

    assert ids("a abc", Lengths(bos_token_id=None, bos_token=None)) == [1, 3]
