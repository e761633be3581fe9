"""Prompts of every form as token ids, each special token once (docs/semantics.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import PromptError
from .narrow import is_int, is_list, is_mapping, plain

_KEYS = {
    "prompt", "messages", "prompt_token_ids", "input_ids", "attention_mask", "multi_modal_data", "cache_salt",
}  # fmt: skip


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt as the ids that the model consumes.

    text: what was tokenised, if text or messages were given. multi_modal_data: images and the like, handed to the
    model's forward by argument name. cache_salt: kept apart from other salts by engines that cache prefixes.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    multi_modal_data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise PromptError("a prompt has no tokens: give at least one")
        if not all(is_int(token) and token >= 0 for token in self.token_ids):
            raise PromptError(f"token ids are integers from 0, got {min(self.token_ids, key=_as_number)!r}")
        if not is_mapping(self.multi_modal_data):
            raise PromptError(f"multi_modal_data is tensors by name, got {self.multi_modal_data!r:.60}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PromptError(f"cache_salt is a text, got {self.cache_salt!r:.60}")


def _as_number(token: Any) -> float:
    """So that what is no integer is named first, then the smallest."""
    return token if is_int(token) else float("-inf")


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or several as a list of prompts.

    A text, a list of ints, a list of chat messages and a mapping are one prompt each; a 2-D array of ids, and a
    mapping with `input_ids` `[prompts, tokens]`, are several.

    >>> prompt_list("hello"), prompt_list([1, 2, 3]), prompt_list([[1], [2, 3]])
    (['hello'], [[1, 2, 3]], [[1], [2, 3]])
    """
    if isinstance(prompts, str | bytes | PreparedPrompt):
        return [prompts]
    if is_mapping(prompts):
        return _rows_of_mapping(prompts)
    items = plain(prompts)
    if isinstance(items, str) or not hasattr(items, "__iter__"):
        raise PromptError(f"prompts are {prompts!r:.60}: give text, token ids, chat messages, or a list of them")
    items = list(items)
    one = bool(items) and (all(is_int(item) for item in items) or all(_is_message(item) for item in items))
    return [items] if one else items


def _rows_of_mapping(prompt: Mapping[str, Any]) -> list[Any]:
    """A mapping as one prompt, or, when it is a tokenizer's batch, as one per row."""
    ids, mask = plain(prompt.get("input_ids")), plain(prompt.get("attention_mask"))
    if not is_list(ids) or not ids or is_int(ids[0]):
        return [prompt]
    if mask is not None and (not is_list(mask) or len(mask) != len(ids)):
        raise PromptError(f"{len(ids)} rows of input_ids want as many of attention_mask")
    shared = {key: value for key, value in prompt.items() if key not in ("input_ids", "attention_mask")}
    rows: list[dict[str, Any]] = [{"prompt_token_ids": row, **shared} for row in ids]
    for row, kept in zip(rows, mask or (), strict=False):
        row["attention_mask"] = kept
    return rows


def _is_message(value: Any) -> bool:
    return is_mapping(value) and "role" in value


def prepare(
    prompt: Any, tokenizer: Any, *, index: int = 0, name: str | None = None, add_special_tokens: bool = True
) -> PreparedPrompt:
    """One prompt of any form as a PreparedPrompt.

    Raises PromptError, naming `index`, or the place that is given as `name`, for what is no prompt, has no token, wants
    a tokenizer that is not there, or carries embeddings.
    """
    name = name or f"prompt {index}"
    if isinstance(prompt, PreparedPrompt):
        return prompt
    if isinstance(prompt, bytes):
        raise PromptError(f"{name} is bytes: decode it to text, or give token ids")
    salt: str | None = None
    data: Mapping[str, Any] = {}
    if is_mapping(prompt):
        prompt, mask, salt, data = _open_mapping(prompt, name)
        if mask is not None:
            prompt = _unmasked(prompt, mask, name)
    if isinstance(prompt, str):
        ids = _encode(prompt, tokenizer, name, add_special_tokens)
        text: str | None = prompt
    elif is_list(prompt) and prompt and all(_is_message(message) for message in prompt):
        ids, text = _encode_chat(list(prompt), tokenizer, name)
    else:
        ids, text = _as_ids(prompt, name), None
    try:
        return PreparedPrompt(tuple(ids), text, data, salt)
    except PromptError as error:
        raise PromptError(f"{name}: {error}") from None


def reference_ids(references: Any, count: int, tokenizer: Any) -> list[tuple[int, ...]]:
    """References as token ids, one per prompt; one reference alone is everybody's.

    A text is tokenised by itself, without special tokens, as what follows a prompt. Raises PromptError, naming the
    reference.

    >>> reference_ids([5, 6], 2, None)
    [(5, 6), (5, 6)]
    """
    given = plain(references)
    one = isinstance(given, str) or (is_list(given) and bool(given) and all(is_int(item) for item in given))
    each = [given] * count if one else (list(given) if is_list(given) else None)
    if each is None or len(each) != count:
        what = f"{references!r:.60}" if each is None else f"{len(each)} references for {count} prompts"
        raise PromptError(f"references are {what}: give token ids or a text for each prompt, or one for all")
    found: list[tuple[int, ...]] = []
    for index, reference in enumerate(each):
        name = f"reference {index}"
        if isinstance(reference, str):
            found.append(tuple(_encode(reference, tokenizer, name, add_special_tokens=False)))
        else:
            found.append(tuple(_as_ids(reference, name)))
    return found


def _open_mapping(prompt: Mapping[str, Any], name: str) -> tuple[Any, Any, str | None, Mapping[str, Any]]:
    if "prompt_embeds" in prompt or "inputs_embeds" in prompt:
        raise PromptError(f"{name} has prompt embeddings, which have no token ids to label: give text or ids")
    unknown = set(prompt) - _KEYS
    if unknown:
        raise PromptError(f"{name} has unknown keys {sorted(unknown)}; there are: {', '.join(sorted(_KEYS))}")
    given = [key for key in ("prompt", "messages", "prompt_token_ids", "input_ids") if prompt.get(key) is not None]
    if "prompt_token_ids" in given and "prompt" in given:
        given.remove("prompt")  # vLLM's form: the text is for people, the ids are used
    if len(given) != 1:
        raise PromptError(f"{name} wants one of prompt, messages, prompt_token_ids, input_ids; got {given or 'none'}")
    mask = prompt.get("attention_mask")
    if mask is not None and given[0] in ("prompt", "messages"):
        raise PromptError(f"{name} has an attention_mask without ids: a mask goes with prompt_token_ids")
    return prompt[given[0]], mask, prompt.get("cache_salt"), prompt.get("multi_modal_data") or {}


def _as_ids(value: Any, name: str) -> list[int]:
    ids = plain(value)
    if not is_list(ids) or not all(is_int(item) for item in ids):
        raise PromptError(
            f"{name} is {value!r:.60}: give text, token ids, chat messages, or a dict with one of {sorted(_KEYS)}"
        )
    if any(item < 0 for item in ids):
        raise PromptError(f"{name} has a negative token id {min(ids)}")
    return [int(item) for item in ids]


def _unmasked(value: Any, mask: Any, name: str) -> list[int]:
    """The ids whose mask is not zero: masked rows are dropped before all else."""
    ids = _as_ids(value, name)
    keep = plain(mask)
    if not is_list(keep) or len(keep) != len(ids):
        raise PromptError(f"{name} has {len(ids)} ids and a mask of {len(keep) if is_list(keep) else repr(keep)}")
    return [item for item, kept in zip(ids, keep, strict=True) if kept]


def _need_tokenizer(tokenizer: Any, name: str, what: str) -> None:
    if tokenizer is None:
        raise PromptError(f"{name} is {what}, but this model has no tokenizer: give token ids, or load(…, tokenizer=)")


def _encode(text: str, tokenizer: Any, name: str, add_special_tokens: bool) -> list[int]:
    """Text as ids, with the tokenizer's special tokens once, also when the text already begins with BOS."""
    _need_tokenizer(tokenizer, name, "text")
    ids: list[int] = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    bos = tokenizer.bos_token_id
    if add_special_tokens and bos is not None and ids[:2] == [bos, bos] and text.startswith(tokenizer.bos_token):
        return ids[1:]
    return ids


def _encode_chat(messages: list[Any], tokenizer: Any, name: str) -> tuple[list[int], str]:
    """Messages through the chat template, which brings its own special tokens; none is added to them."""
    _need_tokenizer(tokenizer, name, "chat messages")
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"{name} is chat messages, but the tokenizer has no chat template: give text or ids")
    ask = messages[-1]["role"] != "assistant"  # a transcript that ends with the model's words is taken as it is
    from jinja2 import TemplateError  # transformers renders templates with it; not needed to import midstream

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    except TemplateError as error:
        raise PromptError(f"{name}: the chat template refuses these messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]), text
