"""Hidden-states files, written by the worker that has the rows."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import torch

from midstream.core.errors import CaptureError, MidstreamError
from midstream.core.select import resolve
from midstream.formats.hidden_states_file import HiddenStatesFile, locked, write_file
from midstream.taps.step import Ints, whole_sequence

from .extraction import Extraction
from .file_settings import FileSettings
from .running import RunningRequests

_LOG: Final = logging.getLogger("midstream.files")
_WAITING_BYTES: Final = 1 << 30
"""Of rows that wait for the disk; past it the engine waits too."""


@dataclass(frozen=True)
class Ended:
    """A request that has ended, and whose file is due. token_ids: all of it, prompt and output.

    blocks: those of vLLM's cache that have its states, until the next pass.
    """

    id: str
    token_ids: Sequence[int]
    prompt_len: int
    blocks: Sequence[int]


@dataclass
class FileNews:
    """What a step of the scheduler has to say of files. begun: request → its path; dropped: those that were aborted."""

    begun: dict[str, str] = field(default_factory=dict[str, str])
    ended: list[Ended] = field(default_factory=list[Ended])
    dropped: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class _Open:
    """A file that is due. lock: the descriptor that holds its lock."""

    path: Path
    lock: int | None


class Files:
    """The files of one engine. about: model and fingerprint, which every file names."""

    def __init__(
        self,
        running: RunningRequests,
        settings: FileSettings,
        about: Mapping[str, str],
        extraction: Extraction | None = None,
    ) -> None:
        self._running, self._settings, self._about, self._extraction = running, settings, about, extraction
        self._open: dict[str, _Open] = {}
        self._pool = ThreadPoolExecutor(settings.num_writer_threads, thread_name_prefix="midstream-files")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._written: deque[tuple[Path, int]] = deque()
        self._bytes = 0
        self._counting = Lock()

    def follow(self, news: FileNews) -> None:
        """Locks before anybody has a path, then files, and nothing of what was aborted."""
        for one, path in news.begun.items():
            self._begin(one, Path(path))
        for ended in news.ended:
            self.write(ended)
        self.drop(news.dropped)

    def _begin(self, one: str, path: Path) -> None:
        if one in self._open:
            return
        try:
            path.unlink(missing_ok=True)  # of an earlier request with this id
            lock = locked(path) if self._settings.use_synchronization_lock else None
        except OSError as error:
            _LOG.error("no lock for %s: %s: it gets no file", path, error)
            return
        self._open[one] = _Open(path, lock)

    def write(self, ended: Ended) -> None:
        """Take a request's rows, and write them beside what the engine does next."""
        due = self._open.pop(ended.id, None)
        if due is None:
            self._running.release([ended.id])
            return
        try:
            file = self._file_of(ended)
        except (MidstreamError, RuntimeError, OSError, ValueError, IndexError) as error:  # the engine goes on
            self._give_up(due, error)
            return
        finally:
            self._running.release([ended.id])
        size = file.hidden_states.nbytes
        while self._waiting and (
            self._waiting[0][0].done() or sum(nbytes for _, nbytes in self._waiting) + size > _WAITING_BYTES
        ):
            wait([self._waiting.popleft()[0]])
        self._waiting.append((self._pool.submit(self._put, due, file), size))

    def _file_of(self, ended: Ended) -> HiddenStatesFile:
        file = self._running.file_of(ended.id)
        rows = whole_sequence(ended.token_ids[:-1], ended.prompt_len)  # the last token was only sampled
        positions = np.flatnonzero(resolve(file.select, rows))
        if file.source == "cache":
            assert self._extraction is not None, "admission refuses it"
            states = self._extraction.rows(ended.blocks, positions, file.aux_layer_ids)
        else:
            states = self._taped(ended.id, positions, len(rows))
        whole = np.array_equal(positions, np.arange(len(positions)))
        return HiddenStatesFile(
            states,
            torch.from_numpy(rows.token_id[positions]),
            file.aux_layer_ids,
            self._about["model"],
            self._about["fingerprint"],
            ended.prompt_len,
            tuple(ended.token_ids[ended.prompt_len :]),
            None if whole else torch.from_numpy(positions),
        )

    def _taped(self, one: str, wanted: Ints, length: int) -> torch.Tensor:
        """What taps have of a request, `[rows, layers, hidden]`: the wanted rows, or CaptureError."""
        positions, states = self._running.take(one)
        kept = positions < length  # an engine may run a step too far
        if not np.array_equal(positions[kept], wanted):
            raise CaptureError(f"{len(wanted)} rows were selected, and {int(kept.sum())} came")
        return states if kept.all() else states[torch.as_tensor(kept)]

    def _put(self, due: _Open, file: HiddenStatesFile) -> None:
        """In a thread of its own: write one file, and let its reader go on, whatever happens."""
        try:
            write_file(due.path, file, durable=False)
        except (OSError, MidstreamError, RuntimeError, ValueError) as error:
            self._give_up(due, error)
            return
        if due.lock is not None:
            os.close(due.lock)
        self._collect(due.path, file.hidden_states.nbytes)

    def _give_up(self, due: _Open, error: Exception) -> None:
        """Say why there is no file, and leave nothing that looks like one."""
        _LOG.error("%s is not written: %s", due.path, error)
        self._let_go(due)

    def drop(self, ids: Collection[str]) -> None:
        """Requests that were aborted have no file."""
        for one in ids:
            if (due := self._open.pop(one, None)) is not None:
                self._let_go(due)
            self._running.release([one])

    @staticmethod
    def _let_go(due: _Open) -> None:
        if due.lock is not None:  # whoever waits for it finds no file
            Path(f"{due.path}.lock").unlink(missing_ok=True)
            os.close(due.lock)

    def _collect(self, path: Path, size: int) -> None:
        """Remove the oldest files past the bound, if there is one."""
        if self._settings.max_storage_bytes is None:
            return
        with self._counting:
            self._written.append((path, size))
            self._bytes += size
            while self._bytes > self._settings.max_storage_bytes and len(self._written) > 1:
                oldest, nbytes = self._written.popleft()
                oldest.unlink(missing_ok=True)
                Path(f"{oldest}.lock").unlink(missing_ok=True)
                self._bytes -= nbytes

    def close(self) -> None:
        """Finish what is being written, and let go of what never was."""
        self._pool.shutdown(wait=True)
        for due in self._open.values():
            self._let_go(due)
        self._open.clear()


def news_of(scheduler_output: Any) -> FileNews | None:
    """What our connector's half in the scheduler says with a step."""
    said = getattr(scheduler_output, "kv_connector_metadata", None)
    return getattr(said, "news", None)
