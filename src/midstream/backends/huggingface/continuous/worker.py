"""The thread that owns the model: who waits, who runs, one pass after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Final

import torch
from torch import Tensor

from midstream.backends.serving import Grown
from midstream.core.errors import EngineError, MidstreamError
from midstream.taps.locate import TapMap
from midstream.taps.step import step_of

from ..calling import Caller
from ..choosing import Way, choose
from ..forward import fresh_positions, new_cache, token_budget
from ..sampling import generator_for, likeliest
from .batches import Batch, Pass, Prefill, prefills
from .line import Line, table_for
from .served import Event, Finished, Served
from .watch import Watch

_LISTENS: Final = 0.1
"""Of the time of a pass: how long an idle engine listens whether one more request comes, to run them together."""
_BATCH: Final = "room in the batch"
_ROWS: Final = "room for rows"
Tell = Callable[[list[tuple[Served, Event]]], None]


@dataclass(frozen=True)
class Limits:
    """max_batch: sequences that run at once. max_tokens_in_batch: tokens that they may come to hold, see table_for.

    prefill_chunk: columns of a prompt in one pass. row_bytes: of captured rows that wait to be read.
    """

    max_batch: int
    max_tokens_in_batch: int
    prefill_chunk: int
    row_bytes: int


class Worker:
    """Runs what is submitted; `tell` is called in its thread, with what was done to whom."""

    def __init__(self, taps: TapMap, limits: Limits, tell: Tell) -> None:
        self._taps, self._limits, self._tell = taps, limits, tell
        self._call = Caller(taps)
        self._watch = Watch(taps, limits.row_bytes)
        self._line = Line[Served](lambda one: (_BATCH,) if one.keeping is None else (_BATCH, _ROWS))
        self._running: dict[int, Served] = {}  # by number
        self._prefills: deque[Prefill] = deque()
        self._batches: list[Batch] = []
        self._news: list[tuple[Served, Event]] = []
        self._pass_seconds = 0.02  # of the last pass of a batch; a guess before the first
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open = True
        self._lock = Lock()  # whoever is let in before the end is told of it
        self._thread = Thread(target=self._run, name="midstream-engine", daemon=True)
        self._thread.start()

    # --- from other threads

    @property
    def counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        return len(self._running), len(self._line)

    @property
    def well(self) -> bool:
        """Whether what is submitted is answered."""
        return self._open and self._thread.is_alive()

    def submit(self, one: Served) -> None:
        """One more request; EngineError: the engine has ended."""
        with self._lock:
            if not self._open:
                raise EngineError("the engine was closed, or has died: start it again")
            self._inbox.put(partial(self._line.add, one))

    def leave(self, one: Served) -> None:
        """Nobody waits for a request any more, nor reads its rows."""
        self._inbox.put(partial(self._left, one))

    def close(self) -> None:
        """End the thread after the pass under way; what runs is told. Idempotent."""
        self._inbox.put(self._end)
        self._thread.join()

    # --- the loop

    def _end(self) -> None:
        self._open = False

    def _run(self) -> None:
        error = EngineError("the engine was closed")
        try:
            with torch.inference_mode(), fresh_positions(self._call.model):
                while self._open:
                    self._drain(together=not self._running)
                    self._admit()
                    if not self._running and self._open:
                        self._inbox.get()()
                    if self._prefills:
                        self._prefill()
                        self._report()
                    for batch in self._batches:
                        if batch.rows:
                            self._decode(batch)
                    self._batches = [batch for batch in self._batches if batch.rows]
                    self._report()
        except Exception as found:  # of ours: whoever waits is told
            error = _fault(found)
        finally:
            with self._lock:
                self._open = False
            self._drain()
            waiting = list(iter(partial(self._line.take, lambda _: None), None))
            self._news += [(one, EngineError(str(error))) for one in [*self._running.values(), *waiting]]
            self._report()

    def _drain(self, together: bool = False) -> None:
        """Do what others have said. together: what begins now waits a moment for what comes with it."""
        moment = _LISTENS * self._pass_seconds if together else 0
        with suppress(Empty):
            while True:
                self._inbox.get(timeout=moment if len(self._line) < self._limits.max_batch else 0)()

    def _report(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self._tell(news)

    # --- requests come and go

    def _admit(self) -> None:
        entered: list[Served] = []
        while len(self._running) < self._limits.max_batch and (one := self._next()) is not None:
            one.request = next(number for number in range(len(self._running) + 1) if number not in self._running)
            self._running[one.request] = one
            self._watch.admit(one)
            entered.append(one)
        if entered:
            chunks = self._taps.shares_prefix  # else a prompt is not the same after a part of it from the cache
            budget, padded = token_budget(self._call.device), self._call.padded
            self._prefills += prefills(
                entered, budget, self._limits.prefill_chunk, padded, lambda one: one.past or not chunks
            )

    def _next(self) -> Served | None:
        """The next for whom there is room, with a table to sit at."""
        tables: dict[tuple[bool, int], tuple[int, int]] = {}
        for one in self._running.values():
            count, longest = tables.get(one.table, (0, 0))
            tables[one.table] = count + 1, max(longest, one.reach)

        def lacks(one: Served) -> str | None:
            alike = {number: of for (past, number), of in tables.items() if past == one.past}
            apart = sum(count * longest for (past, _), (count, longest) in tables.items() if past != one.past)
            number = table_for(alike, one.reach, self._limits.max_tokens_in_batch - apart)
            if number is None:
                return _BATCH
            one.table = one.past, number
            return None if self._watch.fits(one) else _ROWS

        return self._line.take(lacks)

    def _left(self, one: Served) -> None:
        if one.reader is not None:
            self._watch.release(one.reader)
        if self._line.remove(one) or self._running.get(one.request) is not one:
            return
        self._dismiss(one)
        for prefill in self._prefills:
            prefill.rows = [other for other in prefill.rows if other is not one]
        self._prefills = deque(prefill for prefill in self._prefills if prefill.rows)
        for batch in self._batches:
            if one in batch.rows:
                with self._failing(batch):
                    batch.keep(lambda other: other is not one)
        self._batches = [batch for batch in self._batches if batch.rows]

    def _dismiss(self, one: Served) -> None:
        del self._running[one.request]
        self._watch.dismiss(one)

    def _fail(self, one: Served, error: MidstreamError) -> None:
        if self._running.get(one.request) is one:
            self._dismiss(one)
            self._news.append((one, error))

    def _finish(self, one: Served) -> None:
        del self._running[one.request]
        try:
            steering, rows = self._watch.finish(one)
        except MidstreamError as error:
            self._news.append((one, error))
            return
        one.reader = None if rows is None else rows.reader
        noted = None if one.stopping.params.prompt_logprobs is None else tuple(one.prompt_logprobs)
        assert one.finish_reason is not None, "called for those that have ended"
        self._news.append((one, Finished(one.finish_reason, noted, steering, rows)))

    # --- passes

    def _prefill(self) -> None:
        """The next chunk of the prompts whose turn it is."""
        prefill = self._prefills.popleft()
        with self._failing(prefill):
            start, step = prefill.done, prefill.next()
            prefill.cache = new_cache(self._call.model) if prefill.cache is None else prefill.cache
            logits = self._pass(prefill.rows, step, prefill.cache, every=prefill.noted)
            if prefill.noted:
                _note(prefill.rows[0], start, logits[0])
            if prefill.ended:
                batch = prefill.batch()
                for one in batch.rows:
                    one.way = Way(one.stopping, generator_for(one.seed, logits.device))
                self._sample(batch, logits[:, -1])
                self._seat(batch)
                return
        for one in prefill.rows:
            if one.error is not None:
                self._fail(one, one.error)
        if any(one.request in self._running for one in prefill.rows):
            self._prefills.append(prefill)

    def _seat(self, batch: Batch) -> None:
        """Let a batch go on with one that runs, where rows may share a pass."""
        if not batch.rows:
            return
        alike = (home for home in self._batches if home.rows and home.table == batch.table)
        home = next((home for home in alike if self._call.padded or home.columns == batch.columns), None)
        if home is None:
            self._batches.append(batch)
            return
        with self._failing(home, batch):
            home.join(batch)

    def _decode(self, batch: Batch) -> None:
        """One more token for each sequence of a batch."""
        with self._failing(batch):
            begun = time.perf_counter()
            logits = self._pass(batch.rows, batch.next(), batch.cache)
            self._sample(batch, logits[:, -1])
            self._pass_seconds = time.perf_counter() - begun

    def _pass(self, rows: Sequence[Served], step: Pass, cache: Any, every: bool = False) -> Tensor:
        """One forward, with the taps that its rows want."""
        if not step.runs:
            return self._call(step.ids, step.mask, cache, every=every)
        with self._watch.passing(step_of(step.runs, step.ids.numel())):
            logits = self._call(step.ids, step.mask, cache, every=every)
        for one in rows:
            one.error = self._watch.failures.get(one.request)
        return logits

    def _sample(self, batch: Batch, logits: Tensor) -> None:
        """Give everyone the next token; those that end, or fail, leave."""
        choose(batch.rows, [one.way for one in batch.rows if one.way is not None], logits)
        for one in batch.rows:
            if one.error is not None:
                self._fail(one, one.error)
                continue
            noted = None if one.stopping.params.logprobs is None else tuple(one.logprobs[-1:])
            self._news.append((one, Grown(tuple(one.token_ids[-1:]), noted)))
            if one.finish_reason is not None:
                self._finish(one)
        batch.keep(lambda one: not one.ended)

    @contextmanager
    def _failing(self, *parts: Prefill | Batch) -> Generator[None]:
        """A fault in here is one of all who share it, and of nobody else."""
        try:
            yield
        except Exception as found:
            for part in parts:
                for one in part.rows:
                    self._fail(one, _fault(found))
                part.rows = []


def _note(one: Served, start: int, logits: Tensor) -> None:
    """Log-probabilities of the prompt's tokens after `start`, of logits `[tokens, vocabulary]`; the first has none."""
    count = one.stopping.params.prompt_logprobs
    assert count is not None, "asked for by the caller"
    if not start:
        one.prompt_logprobs.append(None)
    if targets := one.prompt[start + 1 : start + 1 + len(logits)]:
        one.prompt_logprobs += likeliest(logits[: len(targets)].float().log_softmax(-1), targets, count)


def _fault(found: Exception) -> EngineError:
    """What a request is told of a fault that was not its own, in one line."""
    said = str(found).strip().splitlines() or [type(found).__name__]
    error = EngineError(f"the model failed in the pass of this request: {said[0]:.200}")
    error.__cause__ = found.with_traceback(None)  # which would keep a pass's tensors
    return error
