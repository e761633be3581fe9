"""Prompts as a command line gives them: words, a file, or stdin; each remembers where it came from."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from midstream.core.errors import PromptError

_PROMPT: Final = ("text", "prompt", "messages", "prompt_token_ids", "input_ids")
_BESIDE: Final = ("attention_mask", "cache_salt", "multi_modal_data", "prompt_embeds", "inputs_embeds")
"""Fields that change what a prompt means, so that they go along (or are refused there); others are left alone."""


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt in a form that `lm.capture` takes, and where it stood: `prompts.jsonl:3`.

    reference: what a record has under that name, as it stands there, for `midstream score`.
    """

    prompt: Any
    source: str
    reference: Any = None


def given_prompts(words: Sequence[str] | None, file: str | None) -> list[GivenPrompt]:
    """The prompts of `--prompt` (first) and `--prompts`.

    Raises PromptError, naming file and line, for a line that is broken, empty or no prompt, and when there is no
    prompt at all; OSError for a file that cannot be read.
    """
    prompts = [GivenPrompt(word, f"--prompt {place}") for place, word in enumerate(words or (), 1)]
    for prompt in prompts:
        if not prompt.prompt:
            raise PromptError(f"{prompt.source} is empty: give some text")
    if file is not None:
        prompts += read_prompts(file)
    if not prompts:
        raise PromptError(
            "no prompts: give --prompt 'some text', or --prompts with a .jsonl or .txt file, or - for stdin"
        )
    return prompts


def read_prompts(file: str) -> list[GivenPrompt]:
    """The prompts of a .jsonl or .txt file, or of stdin (`-`: jsonl if its first line begins with `{`)."""
    if file == "-":
        lines = _lines(sys.stdin.buffer.read(), "stdin")
        first = next((line for line in lines if line.strip()), "")
        return _prompts("stdin", lines, records=first.lstrip().startswith("{"))
    path = Path(file)
    if path.is_dir():
        raise IsADirectoryError(f"--prompts {file} is a directory: name a .jsonl or .txt file in it")
    if not path.exists():
        raise FileNotFoundError(f"no file {file}: --prompts takes a .jsonl or .txt file, or - for stdin")
    if path.suffix not in (".jsonl", ".txt"):
        raise PromptError(f"{file}: prompts are read from .jsonl and .txt files (by their names), or - for stdin")
    return _prompts(file, _lines(path.read_bytes(), file), records=path.suffix == ".jsonl")


def _lines(data: bytes, name: str) -> list[str]:
    """Lines without their ends; only line feeds part them, since JSON may hold other separators as they are."""
    lines: list[str] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            lines.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            raise PromptError(f"{name}:{number} is not UTF-8 text: {error.reason} at byte {error.start + 1}") from None
    return lines[:-1] if lines[-1] == "" else lines


def _prompts(name: str, lines: Sequence[str], *, records: bool) -> list[GivenPrompt]:
    numbered = [(f"{name}:{number}", line) for number, line in enumerate(lines, 1)]
    found = list(_records(numbered)) if records else [GivenPrompt(line, at) for at, line in numbered if line.strip()]
    if not found:
        raise PromptError(f"{name} holds no prompts")
    return found


def _records(numbered: Iterable[tuple[str, str]]) -> Iterator[GivenPrompt]:
    for at, line in numbered:
        if not line.strip():
            raise PromptError(f'{at} is an empty line: each line is one record, e.g. {{"text": "…"}}')
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{at} is not JSON: {error.msg} at character {error.colno} of {line!r:.60}") from None
        except (ValueError, RecursionError) as error:  # a number or a nesting that Python does not read
            raise PromptError(f"{at} is not JSON that can be read: {error}") from None
        if not isinstance(record, dict):
            raise PromptError(f'{at} is {line!r:.60}, which is no record such as {{"text": "…"}}')
        yield GivenPrompt(_record_prompt(record, at), at, record.get("reference"))


def _record_prompt(record: dict[str, Any], at: str) -> dict[str, Any]:
    """A record as the dict that `lm.capture` takes, its parts of the right form and none of them empty."""
    given = [key for key in _PROMPT if record.get(key) is not None]
    if given == ["prompt", "prompt_token_ids"]:
        given = ["prompt_token_ids"]  # vLLM's form: the text is for people, the ids are used
    if len(given) != 1:
        have = ", ".join(given) if given else f"only {', '.join(record) or 'nothing'}"
        raise PromptError(f"{at} wants one of {', '.join(_PROMPT)}; it has {have}")
    (key,) = given
    value, kind = record[key], str if key in ("text", "prompt") else list
    if not isinstance(value, kind):
        wanted = "text" if kind is str else "a list"
        raise PromptError(f"{at}: {key} is {value!r:.60}, which is not {wanted}")
    if not value:
        raise PromptError(f"{at}: {key} is empty")
    if key == "messages" and not all(isinstance(message, dict) and "role" in message for message in value):
        raise PromptError(f'{at}: messages are records such as {{"role": "user", "content": "…"}}')
    beside = {name: record[name] for name in _BESIDE if record.get(name) is not None}
    return {"prompt" if key == "text" else key: value, **beside}


@contextmanager
def sources_named(prompts: Sequence[GivenPrompt]) -> Iterator[None]:
    """While open, a PromptError that begins with a prompt's index gets the place of that prompt instead."""
    try:
        yield
    except PromptError as error:
        match = re.match(r"prompt (\d+)", str(error))
        if match is None or int(match[1]) >= len(prompts):
            raise
        raise PromptError(f"{prompts[int(match[1])].source}{str(error)[match.end() :]}") from error
