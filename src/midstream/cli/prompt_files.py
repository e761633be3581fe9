"""Prompts as a command line gives them: words, a file, or stdin; each remembers where it came from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from midstream.core.errors import PromptError
from midstream.formats.records import begins_an_object, json_records, lines, text_records


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
        return _prompts("stdin", sys.stdin.buffer, records=None)
    path = Path(file)
    if path.is_dir():
        raise IsADirectoryError(f"--prompts {file} is a directory: name a .jsonl or .txt file in it")
    if not path.exists():
        raise FileNotFoundError(f"no file {file}: --prompts takes a .jsonl or .txt file, or - for stdin")
    if path.suffix not in (".jsonl", ".txt"):
        raise PromptError(f"{file}: prompts are read from .jsonl and .txt files (by their names), or - for stdin")
    with path.open("rb") as opened:
        return _prompts(file, opened, records=path.suffix == ".jsonl")


def _prompts(name: str, file: BinaryIO, *, records: bool | None) -> list[GivenPrompt]:
    numbered = list(lines(file, name))
    read = json_records if records or (records is None and begins_an_object(numbered)) else text_records
    found = [GivenPrompt(one.prompt, one.source, one.labels.get("reference")) for one in read(numbered)]
    if not found:
        raise PromptError(f"{name} holds no prompts")
    return found


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
