"""What is missing in a harvest's directory, planned, computed and written: each a shard ahead of the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

from midstream.core.errors import MidstreamError
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult

from .identity import Subject
from .inputs import Input, Scanned
from .manifest import ShardEntry
from .planning import PlannedShard, Planner
from .sequences import Cursor
from .writing import Writer

Bound = Literal["model", "disk", "input"]
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far a run is. records: of the input, with those before this run. tokens, bytes, seconds: of this run.

    bound: what the run waits for: the model, the disk, or the reading of the input. left: seconds, once known.
    """

    records: int
    records_total: int
    tokens: int
    bytes: int
    seconds: float
    bound: Bound
    left: float | None = None


Told = Callable[[Progress], None]


@dataclass(eq=False)
class Clock:
    """What a run has done, and for how long the model waited for what."""

    begun: float = field(default_factory=time.perf_counter)
    input: float = 0.0
    disk: float = 0.0
    tokens: int = 0

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.perf_counter() - self.begun

    @property
    def bound(self) -> Bound:
        """The disk or the input where the model waited for one of them a third of the time."""
        if max(self.input, self.disk) < self.seconds / 3:
            return "model"
        return "disk" if self.disk > self.input else "input"

    def waited(self, future: Future[T], what: Literal["input", "disk"]) -> T:
        """The result of a future, the wait for it noted."""
        begun = time.perf_counter()
        try:
            return future.result()
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - begun)


class _Task(NamedTuple):
    """A shard to compute, or (where that is whole) only its part of the sample table."""

    planned: PlannedShard
    computes: bool


@dataclass(eq=False)
class Pipeline:
    """One run on a directory; the writer works in a thread of its own."""

    subject: Subject
    planner: Planner
    given: Input
    scanned: Scanned
    writer: Writer
    compiled: bool = False
    clock: Clock = field(default_factory=Clock)
    _first: int | None = None

    def finish(self, trust: bool, told: Told | None) -> None:
        """Do what is missing, and leave the directory complete."""
        tasks = self._tasks(self.writer.begin(trust))
        with (
            ExitStack() as model,
            ThreadPoolExecutor(1, "midstream-plan") as reader,
            ThreadPoolExecutor(1, "midstream-write") as disk,
        ):
            ahead, writing = reader.submit(next, tasks, None), None
            while (task := self.clock.waited(ahead, "input")) is not None:
                ahead = reader.submit(next, tasks, None)
                if self.compiled and task.computes and not self.clock.tokens:  # not before there is something to do
                    session: Any = self.subject.lm.session
                    model.enter_context(session.compiled(self.planner.spec.capture))
                result = self._captured(task.planned, told) if task.computes else None
                if writing is not None:
                    self.clock.waited(writing, "disk")
                writing = disk.submit(self.writer.write, task.planned, result)
            if writing is not None:
                self.clock.waited(writing, "disk")
        self.writer.finish()

    # --- what is missing

    def _tasks(self, bad: set[str]) -> Iterator[_Task]:
        """What is to do, in order of shards; each run of neighbours is read in one go."""
        shards, complete = self.writer.manifest.shards, self.writer.complete
        going: Iterator[PlannedShard] = iter(())
        expected = -1
        for index, one in enumerate(shards):
            computes = one.file in bad
            if not computes and (complete or (one.part is not None and one.part.file not in bad)):
                continue
            if index != expected:
                going = self._planned(index, shards)
            planned, expected = next(going, None), index + 1
            if planned is None or planned.next != Cursor(*one.next):
                raise MidstreamError(f"{self.writer.place}/{one.file} would now hold other records than it did")
            yield _Task(planned, computes)
        last = Cursor(*shards[-1].next) if shards else Cursor()
        if last.record < self.scanned.records:
            rest = going if expected == len(shards) else self._planned(len(shards), shards)
            yield from (_Task(planned, True) for planned in rest)

    def _planned(self, index: int, shards: tuple[ShardEntry, ...]) -> Iterator[PlannedShard]:
        start = Cursor(*shards[index - 1].next) if index else Cursor()
        return self.planner.shards(self.given.after(start.record), index, start)

    # --- the model

    def _captured(self, planned: PlannedShard, told: Told | None) -> CaptureResult:
        prompts = [PreparedPrompt(one.token_ids) for one in planned.sequences]
        steering = self.subject.lm.default_steering()

        def progress(done: int, _: int) -> None:
            if told is not None:
                told(self._progress(planned, done))

        capture = self.planner.spec.capture
        result = self.subject.lm.session.capture(
            prompts,
            capture,
            per_prompt_select=planned.selects(capture.select),
            steering=None if steering is None else [steering] * len(prompts),
            call=0,
            progress=progress,
        )
        self.clock.tokens += planned.tokens
        return replace(result, model_ref=self.subject.name)

    def _progress(self, planned: PlannedShard, done: int) -> Progress:
        first, total, clock = planned.sequences[0].pieces[0].document.record, self.scanned.records, self.clock
        records = first + (planned.next.record - first) * done / max(planned.tokens, 1)
        self._first = first if self._first is None else self._first
        here = records - self._first
        left = clock.seconds * (total - records) / here if here > 0 else None
        return Progress(int(records), total, clock.tokens + done, self.writer.bytes, clock.seconds, clock.bound, left)
