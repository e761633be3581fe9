"""Records of prompts in files: one at a time, each with the place where it stands, and its labels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

from midstream.core.errors import PromptError

PROMPT_FIELDS: Final = ("text", "prompt", "messages", "prompt_token_ids", "input_ids")
_BESIDE: Final = ("attention_mask", "cache_salt", "multi_modal_data", "prompt_embeds", "inputs_embeds")
"""Fields that change what a prompt means, so that they go along (or are refused there); others are left alone."""
LINE_LIMIT: Final = 64 << 20
"""Bytes of one line: more is a file of another kind, or one that would fill the memory."""


@dataclass(frozen=True)
class Record:
    """A prompt in a form that `lm.capture` takes, where it stood (`prompts.jsonl:3`), and the record's other fields."""

    prompt: Any
    source: str
    labels: dict[str, Any] = field(default_factory=dict[str, Any])


def lines(file: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    """The lines of a file without their ends, each with its place (`name:3`).

    Only line feeds part them, since JSON may hold other separators as they are. PromptError, naming the line, for what
    is no UTF-8 or longer than LINE_LIMIT.
    """
    number = 0
    while line := file.readline(LINE_LIMIT + 1):
        number += 1
        if len(line) > LINE_LIMIT:
            raise PromptError(f"{name}:{number} is longer than {LINE_LIMIT >> 20} MiB: part it into several records")
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        try:
            yield f"{name}:{number}", text.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            place = error.start + 1
            raise PromptError(f"{name}:{number} is not UTF-8 text: {error.reason} at byte {place}") from None


def begins_an_object(numbered: Iterable[tuple[str, str]]) -> bool:
    """Whether the first line that holds something begins a JSON object: then lines of no name are taken as JSON."""
    return next((line for _, line in numbered if line.strip()), "").lstrip().startswith("{")


def text_records(numbered: Iterable[tuple[str, str]]) -> Iterator[Record]:
    """Lines of text, those that hold nothing left out.

    >>> [one.prompt for one in text_records([("a:1", "yes"), ("a:2", " ")])]
    ['yes']
    """
    return (Record(line, at) for at, line in numbered if line.strip())


def json_records(numbered: Iterable[tuple[str, str]]) -> Iterator[Record]:
    """Lines of JSON, one record each; PromptError, naming the line, for one that is empty, broken or no prompt.

    >>> next(json_records([("a:1", '{"text": "yes", "topic": 3}')]))
    Record(prompt={'prompt': 'yes'}, source='a:1', labels={'topic': 3})
    """
    for at, line in numbered:
        if not line.strip():
            raise PromptError(f'{at} is an empty line: each line is one record, e.g. {{"text": "…"}}')
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{at} is not JSON: {error.msg} at character {error.colno} of {line!r:.60}") from None
        except (ValueError, RecursionError) as error:  # a number or a nesting that Python does not read
            raise PromptError(f"{at} is not JSON that can be read: {error}") from None
        if not isinstance(found, dict):
            raise PromptError(f'{at} is {line!r:.60}, which is no record such as {{"text": "…"}}')
        yield record_of(found, at)


def record_of(fields: dict[str, Any], at: str) -> Record:
    """A record from its fields: the prompt as the dict that `lm.capture` takes, the others as labels.

    PromptError, naming `at`, where no field holds a prompt, several do, or it is empty or of the wrong form.
    """
    given = [key for key in PROMPT_FIELDS if fields.get(key) is not None]
    if given == ["prompt", "prompt_token_ids"]:
        given = ["prompt_token_ids"]  # vLLM's form: the text is for people, the ids are used
    if len(given) != 1:
        have = ", ".join(given) if given else f"only {', '.join(fields) or 'nothing'}"
        raise PromptError(f"{at} wants one of {', '.join(PROMPT_FIELDS)}; it has {have}")
    (key,) = given
    value, kind = fields[key], str if key in ("text", "prompt") else list
    if not isinstance(value, kind):
        wanted = "text" if kind is str else "a list"
        raise PromptError(f"{at}: {key} is {value!r:.60}, which is not {wanted}")
    if not value:
        raise PromptError(f"{at}: {key} is empty")
    if key == "messages" and not all(isinstance(message, dict) and "role" in message for message in value):
        raise PromptError(f'{at}: messages are records such as {{"role": "user", "content": "…"}}')
    beside = {name: fields[name] for name in _BESIDE if fields.get(name) is not None}
    others = {name: one for name, one in fields.items() if name not in PROMPT_FIELDS and name not in _BESIDE}
    return Record({"prompt" if key == "text" else key: value, **beside}, at, others)
