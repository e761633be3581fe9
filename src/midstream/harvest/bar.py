"""How far a harvest is, for a person at a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .pipeline import Progress, Told

_BOUND: Final = {"model": "the model", "disk": "the disk", "input": "reading the input"}


@contextmanager
def shown() -> Iterator[Told]:
    """A callback that draws a bar on stderr: records, tokens/s, MB/s, what the run waits for, and the time left.

    Where stderr is no terminal, a line says the same once a minute, and one at the end.
    """
    if sys.stderr.isatty():
        with _bar() as draw:
            yield draw
        return
    last: Progress | None = None
    said = time.monotonic()

    def told(progress: Progress) -> None:
        nonlocal last, said
        last = progress
        if time.monotonic() - said >= 60:
            said = time.monotonic()
            sys.stderr.write(f"harvesting: {in_words(progress)}\n")

    yield told
    if last is not None:
        sys.stderr.write(f"harvested: {last.tokens:,} tokens in {last.seconds:.1f} s, {_speed(last)}\n")


def in_words(progress: Progress) -> str:
    """One line.

    >>> in_words(Progress(50, 200, 9000, 18_000_000, 3.0, "model", 10.0))
    '50 of 200 records, 3,000 tokens/s, 6.0 MB/s, bound by the model, 10 s left'
    """
    left = "" if progress.left is None else f", {_span(progress.left)} left"
    return (
        f"{progress.records:,} of {progress.records_total:,} records, {_speed(progress)}, "
        f"bound by {_BOUND[progress.bound]}{left}"
    )


def _speed(progress: Progress) -> str:
    seconds = max(progress.seconds, 1e-9)
    return f"{progress.tokens / seconds:,.0f} tokens/s, {progress.bytes / 1e6 / seconds:,.1f} MB/s"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def _bar() -> Iterator[Told]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    with Bar(BarColumn(), TextColumn("{task.description}", markup=False), console=Console(stderr=True)) as bar:
        task = bar.add_task("reading the input", total=None)

        def told(progress: Progress) -> None:
            bar.update(task, completed=progress.records, total=progress.records_total, description=in_words(progress))

        yield told
