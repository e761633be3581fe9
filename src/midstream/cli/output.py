"""What commands print: tables and JSON to stdout, words to stderr."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

_PIPE_WIDTH: Final = 240
"""Columns of a table that does not go to a terminal: whoever reads it there can take long lines."""


def print_json(value: Any, *, indent: int | None = None) -> None:
    """One JSON object to stdout; numbers that JSON has not (NaN, infinities) are null."""
    sys.stdout.write(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent) + "\n")


def save_json(path: Path, value: Any) -> None:
    """One JSON object into a file, as `print_json` prints it; the old file stays until the new one is whole."""
    from midstream.formats.atomic import replacing

    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[str] = (), file: TextIO | None = None
) -> None:
    """A table to stdout, or to `file`. The columns named in `words` hold text, and are cut; the others keep theirs."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    lines, between, whole = list(rows), 2 * len(columns) + 2, table_width(file)
    longest = [max((len(line[place]) for line in lines), default=0) for place in range(len(columns))]
    widths = [0 if column in words else max(most, len(column)) for column, most in zip(columns, longest, strict=True)]
    if sum(widths) + between + 20 * len(words) > whole:  # then heads of numbers take two lines
        parts = [max(map(len, [*column.split(), ""])) for column in columns]
        widths = [min(width, max(most, part)) for width, most, part in zip(widths, longest, parts, strict=True)]
    room = (whole - sum(widths) - between) // max(len(words), 1)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column, width in zip(columns, widths, strict=True):
        if column in words:
            table.add_column(column, overflow="ellipsis", no_wrap=True, max_width=max(room, 6))
        else:
            table.add_column(column, justify="right", width=width)
    for line in lines:
        table.add_row(*line)
    Console(file=file or sys.stdout, width=whole, markup=False, emoji=False, highlight=False).print(table)


def table_width(file: TextIO | None = None) -> int:
    """How many characters a line to stdout, or to `file`, may have."""
    return shutil.get_terminal_size().columns if (file or sys.stdout).isatty() else _PIPE_WIDTH


def say(words: str = "") -> None:
    """Words for a person, to stderr."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()


def number(value: float) -> str:
    """A norm or the like in three figures.

    >>> number(5017.24), number(0.03127), number(float("nan"))
    ('5017', '0.0313', 'nan')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def counted(count: int, thing: str) -> str:
    """A number of things in words.

    >>> counted(1, "prompt"), counted(3, "row")
    ('1 prompt', '3 rows')
    """
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def size(count: int) -> str:
    """Bytes in words.

    >>> size(512), size(3_500_000)
    ('512 bytes', '3.5 MB')
    """
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count} bytes"


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spread, the first and the last among them.

    >>> spread(range(30), 4)
    [0, 10, 19, 29]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]
