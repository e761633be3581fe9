"""Inputs of a harvest: files, data sets and lists, read as often as needed, one record at a time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final

from midstream.core.errors import PromptError
from midstream.core.narrow import is_mapping, plain
from midstream.core.prompts import PreparedPrompt
from midstream.formats.records import (
    PROMPT_FIELDS,
    Record,
    begins_an_object,
    json_records,
    lines,
    record_of,
    text_records,
)

_KINDS: Final = ".jsonl, .txt or .parquet"
_TOKEN_BYTES: Final = 4
_TABLE_ROWS: Final = 256
"""Rows of a table that are in memory at once."""


@dataclass(frozen=True)
class Input:
    """Records that can be read again and again, in one order."""

    name: str
    records: Callable[[], Iterator[Record]]

    def after(self, count: int) -> Iterator[Record]:
        """The records after the first `count`."""
        return islice(self.records(), count, None)


@dataclass(frozen=True)
class Scanned:
    """What was found in an input as a whole. sha256: of its records in canonical JSON. tokens: a guess, by bytes."""

    sha256: str
    records: int
    tokens: int


def scan(given: Input, check: Callable[[Record, int], None]) -> Scanned:
    """Read an input once: PromptError, naming the record, for the first that is broken, or that `check` refuses.

    check: is given a record and its size in canonical JSON.
    """
    digest, count, size = sha256(), 0, 0
    for one in given.records():
        line = canonical(one)
        check(one, len(line))
        digest.update(line + b"\n")
        count, size = count + 1, size + len(line)
    if not count:
        raise PromptError(f"{given.name} holds no prompts")
    return Scanned(f"sha256:{digest.hexdigest()}", count, size // _TOKEN_BYTES)


def canonical(record: Record) -> bytes:
    """A record as one line of JSON, the same for the same data whatever file it stood in."""
    try:
        text = json.dumps([record.prompt, record.labels], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError) as error:  # half a surrogate pair is a ValueError too
        raise PromptError(f"{record.source} holds what is no JSON: {error}") from None


# --- what may be given


@contextmanager
def opened(given: Any) -> Iterator[Input]:
    """An input from a path, `-` for stdin, a data set of `datasets`, or a list of prompts or records.

    A path is a .jsonl, .txt or .parquet file, or a folder that `datasets` has saved. Stdin is kept in a temporary file
    meanwhile. OSError or PromptError for what cannot be read.
    """
    if given == "-":
        with tempfile.TemporaryFile() as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.seek(0)
            as_json = begins_an_object(lines(kept, "stdin"))
            yield Input("stdin", lambda: _of_lines(os.fdopen(os.dup(kept.fileno()), "rb"), "stdin", as_json))
    elif isinstance(given, str | os.PathLike):
        yield _of_path(Path(given), str(given))
    elif hasattr(given, "features") and hasattr(given, "__getitem__"):
        yield Input("the data set", lambda: _of_rows(given, "the data set"))
    elif isinstance(given, list | tuple):
        items: list[Any] = list(given)  # pyright: ignore[reportUnknownArgumentType]
        yield Input("the list", lambda: (_of_item(one, place) for place, one in enumerate(items)))
    else:
        kind = type(given).__name__
        raise PromptError(f"a {kind} is no input: give a path to a {_KINDS} file, a data set, or a list of prompts")


def _of_path(path: Path, name: str) -> Input:
    if path.is_dir():
        if not (path / "dataset_info.json").exists():
            raise IsADirectoryError(f"{name} is a directory without a saved data set: name a {_KINDS} file in it")
        return Input(name, lambda: _of_rows(_saved(path), name))
    if not path.exists():
        raise FileNotFoundError(f"no file {name}: a harvest reads a {_KINDS} file, or - for stdin")
    if path.suffix == ".parquet":
        return Input(name, lambda: _of_parquet(path, name))
    if path.suffix not in (".jsonl", ".txt"):
        raise PromptError(f"{name}: prompts are read from {_KINDS} files (by their names), or - for stdin")
    return Input(name, lambda: _of_lines(path.open("rb"), name, path.suffix == ".jsonl"))


def _of_lines(file: Any, name: str, as_json: bool) -> Iterator[Record]:
    with file:
        file.seek(0)
        yield from (json_records if as_json else text_records)(lines(file, name))


def _of_parquet(path: Path, name: str) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            batches = file.iter_batches(_TABLE_ROWS)
            yield from _of_rows((fields for batch in batches for fields in batch.to_pylist()), name)
    except ArrowException as error:
        raise PromptError(f"{name} is no parquet file, or is damaged: {' '.join(str(error).split())}") from None


def _saved(path: Path) -> Any:
    try:
        from datasets import load_from_disk  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise PromptError(f"{path} is a data set, and reading it needs datasets; type: pip install datasets") from None
    return load_from_disk(str(path))


def _of_rows(rows: Iterable[Any], name: str) -> Iterator[Record]:
    for number, fields in enumerate(rows, 1):
        yield record_of(fields, f"{name}:{number}")


def _of_item(item: Any, place: int) -> Record:
    """One of a list: a record with labels, or a prompt in any form that `lm.capture` takes."""
    source = f"prompt {place}"
    if isinstance(item, PreparedPrompt):
        return Record({"prompt_token_ids": list(item.token_ids)}, source)
    if is_mapping(item) and any(name in item for name in PROMPT_FIELDS):
        return record_of(dict(item), source)
    return Record(plain(item), source)
