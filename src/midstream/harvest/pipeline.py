"""What is missing in a harvest's directory, planned, computed and written: each a shard ahead of the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from midstream.core.errors import CaptureError, MidstreamError
from midstream.core.probe import Probe
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult

from .directory import SAMPLES, damaged, entry, part_file, shard_file, sweep
from .identity import Subject
from .inputs import Input, Scanned
from .manifest import Counts, Manifest, ShardEntry
from .planning import PlannedShard, Planner
from .samples import join_parts, part_of, write_part
from .sequences import Cursor
from .shards import Sample, nonfinite_of, pooled, read_shard, samples_of, stored_of, write_shard
from .spec import HarvestSpec

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
    bytes: int = 0

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
    """One run on a directory; `manifest` is as it stands on the disk, and changes in the writer's thread alone."""

    subject: Subject
    spec: HarvestSpec
    probes: tuple[Probe, ...]
    planner: Planner
    given: Input
    scanned: Scanned
    directory: Path
    manifest: Manifest
    refuse_nonfinite: bool
    clock: Clock = field(default_factory=Clock)
    made: int = 0
    _first: int | None = None

    def finish(self, trust: bool, told: Told | None) -> None:
        """Do what is missing, and leave the directory complete."""
        stands = [*self.manifest.shards, *(one.part for one in self.manifest.shards if one.part is not None)]
        samples = self.manifest.samples
        bad = damaged(self.directory, [*stands, *([samples] if samples else [])], trust=trust)
        if samples is not None and samples.file in bad:
            self._note(self.manifest.model_copy(update={"samples": None}))
        self._sweep()
        with ThreadPoolExecutor(1, "midstream-plan") as reader, ThreadPoolExecutor(1, "midstream-write") as writer:
            tasks = self._tasks(bad)
            ahead, writing = reader.submit(next, tasks, None), None
            while (task := self.clock.waited(ahead, "input")) is not None:
                ahead = reader.submit(next, tasks, None)
                result = self._captured(task.planned, told) if task.computes else None
                if writing is not None:
                    self.clock.waited(writing, "disk")
                writing = writer.submit(self._write, task.planned, result)
            if writing is not None:
                self.clock.waited(writing, "disk")
        if self.manifest.samples is None:
            self._complete()
        self._sweep()

    # --- what is missing

    def _tasks(self, bad: set[str]) -> Iterator[_Task]:
        """What is to do, in order of shards; each run of neighbours is read in one go."""
        shards, complete = self.manifest.shards, self.manifest.samples is not None
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
                raise MidstreamError(f"{self.directory / one.file} would now hold other records than it did")
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

        capture = self.spec.capture
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
        return Progress(int(records), total, clock.tokens + done, clock.bytes, clock.seconds, clock.bound, left)

    # --- the disk

    def _write(self, planned: PlannedShard, result: CaptureResult | None) -> None:
        """Write a shard, its part of the sample table, and the manifest that knows them."""
        index = planned.index
        file = shard_file(index)
        if result is not None and self.spec.pool is not None:
            result = pooled(planned, result, self.spec.pool)
        stored = read_shard(self.directory / file) if result is None else stored_of(result, self.probes)
        samples, nonfinite = samples_of(planned, stored.labels, stored.errors), nonfinite_of(stored)
        if self.refuse_nonfinite:
            _check_finite(samples, nonfinite)
        if result is None:
            known = self.manifest.shards[index]
        else:
            write_shard(self.directory / file, result, stored, self.probes)
            counts = _counts(planned, samples, nonfinite, result)
            known = ShardEntry(
                **entry(self.directory, file).model_dump(),
                next=(planned.next.record, planned.next.token),
                counts=counts,
                part=None,
            )
            self.made, self.clock.bytes = self.made + 1, self.clock.bytes + known.bytes
        if self.manifest.samples is None:
            write_part(self.directory / part_file(index), part_of(index, samples, nonfinite))
            known = known.model_copy(update={"part": entry(self.directory, part_file(index))})
        shards = (*self.manifest.shards[:index], known, *self.manifest.shards[index + 1 :])
        self._note(self.manifest.model_copy(update={"shards": shards}))

    def _note(self, manifest: Manifest) -> None:
        manifest.write(self.directory)
        self.manifest = manifest

    def _complete(self) -> None:
        shards = self.manifest.shards
        join_parts(self.directory / SAMPLES, [self.directory / part_file(index) for index in range(len(shards))])
        without = tuple(one.model_copy(update={"part": None}) for one in shards)
        samples = entry(self.directory, SAMPLES)
        self._note(self.manifest.model_copy(update={"shards": without, "samples": samples}))

    def _sweep(self) -> None:
        """Leave only what the manifest knows."""
        manifest = self.manifest
        known = {one.file for one in manifest.shards} | {one.part.file for one in manifest.shards if one.part}
        sweep(self.directory, known.__contains__)


def _check_finite(samples: list[Sample], nonfinite: Any) -> None:
    for one in samples:
        if count := int(nonfinite[one.start : one.stop].sum()):
            row = one.start + int(nonfinite[one.start : one.stop].nonzero()[0][0])
            raise CaptureError(
                f"{one.piece.document.source} has {count:,} values that are not finite, the first in row "
                f"{row - one.start} of it: leave out --refuse-nonfinite to keep them, counted"
            )


def _counts(planned: PlannedShard, samples: list[Sample], nonfinite: Any, result: CaptureResult) -> Counts:
    return Counts(
        sequences=len(planned.sequences),
        samples=len(samples),
        tokens=planned.tokens,
        rows=len(result.labels),
        split=sum(one.piece.start > 0 for one in samples),
        truncated=sum(one.dropped > 0 for one in samples),
        dropped=sum(one.dropped for one in samples),
        failed=sum(one.error is not None for one in samples),
        nonfinite=int(nonfinite.sum()),
        overflowed=result.receipt.overflowed,
    )
