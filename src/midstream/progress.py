"""How far a capture is, for a person at a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def token_progress(what: str = "capturing") -> Iterator[Callable[[int, int], None]]:
    """A callback `(tokens done, tokens in all)` that draws a bar with rate and remaining time on stderr.

    Where stderr is no terminal nothing is drawn, and one line says at the end how many tokens there were and how
    fast they went. A capture that fails leaves no such line.
    """
    if sys.stderr.isatty():
        with _bar(what) as show:
            yield show
        return
    began, seen = time.monotonic(), 0

    def count(done: int, total: int) -> None:
        nonlocal seen
        seen = done

    yield count
    if seen:
        seconds = max(time.monotonic() - began, 1e-9)
        sys.stderr.write(f"{what}: {seen:,} tokens in {seconds:.1f} s ({seen / seconds:,.0f} tokens/s)\n")


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Task as BarTask
    from rich.text import Text

    class Rate(ProgressColumn):
        """Tokens per second so far."""

        def render(self, task: BarTask) -> Text:
            seconds = task.finished_time or task.elapsed or 0
            speed = f"{task.completed / seconds:,.0f} tokens/s" if seconds and task.completed else ""
            return Text(speed, style="progress.data.speed")

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield show
