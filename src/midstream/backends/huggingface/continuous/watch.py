"""What requests want of an engine's passes: their rows steered and kept, by hooks that only such passes have."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from midstream.core.errors import CaptureError, MidstreamError
from midstream.core.interventions import OpReceipt
from midstream.core.sites import Site
from midstream.taps.locate import TapMap
from midstream.taps.segments import Place
from midstream.taps.steerer import Steerer
from midstream.taps.step import StepBatch, whole_sequence
from midstream.taps.stream import Copied
from midstream.taps.tape import Tape, Taping

from ..calling import Caller
from ..forward import fresh_positions, input_device, new_cache
from ..hooks import steered, tapped
from ..selftest import probe_ids
from .rows import OwnSegments, Rows
from .served import Served

_FAULTS: Final = (CaptureError, RuntimeError, ValueError, IndexError, TypeError, OSError)
"""What a tap may raise in the middle of a pass: it fails the requests that have taps there, never the others."""


def shown(taps: TapMap) -> tuple[dict[Place, torch.dtype], int]:
    """What the rows of each place are made of (a router may compute in another type), and the cache's bytes per token.

    Seen in a tiny pass.
    """
    found: dict[Place, torch.dtype] = {}
    model = taps.anatomy.model
    cache, ids = new_cache(model), probe_ids(model, (1, 3))

    def see(site: Site, layer: int, rows: Tensor) -> None:
        found[site, layer] = rows.dtype

    with tapped(taps, taps.sites, see), fresh_positions(model):
        Caller(taps)(ids, torch.ones_like(ids), cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.is_initialized)
    return found, max(1, kept // ids.numel())


class Watch:
    """The taps of requests that come and go; `fits` says whether the rows of one more can be held.

    failures: request's number → what went wrong with it alone, in the pass that has ended.
    """

    def __init__(self, taps: TapMap, row_bytes: int) -> None:
        self._taps = taps
        self._device = input_device(taps.anatomy.model)
        self._row_bytes = row_bytes
        self._segments = OwnSegments(row_bytes)
        self._tape = Tape(self._segments)
        self._steerer = Steerer()
        self._steered: set[int] = set()
        self._reserved: dict[int | str, int] = {}  # by number; once ended, by reader
        self._readers = 0
        self._broken: Exception | None = None
        self.failures: dict[int, MidstreamError] = {}

    # --- requests

    def fits(self, one: Served) -> bool:
        """Whether there is room for all rows that a request may come to keep."""
        if one.keeping is None or not self._reserved:
            return True
        # rows of some hold segments in which others' are dead: what is really taken counts too
        return max(sum(self._reserved.values()) + one.keeping.nbytes, self._segments.nbytes) <= self._row_bytes

    def admit(self, one: Served) -> None:
        """A request begins, under its number."""
        if one.keeping is not None:
            self._reserved[one.request] = one.keeping.nbytes
            self._tape.admit(one.request, Taping(one.keeping.columns, one.keeping.select, one.reach + 1))
        if one.ops:
            self._steerer.admit(one.request, one.ops)
            self._steered.add(one.request)

    def dismiss(self, one: Served, reader: str | None = None) -> None:
        """A request has ended. Its rows stay until `release(reader)`; without a reader they are forgotten."""
        if one.keeping is not None:
            self._tape.dismiss(one.request, reader)
            self._reserved.pop(one.request)
        if one.ops:
            self._steerer.dismiss(one.request)
            self._steered.discard(one.request)

    def finish(self, one: Served) -> tuple[tuple[OpReceipt, ...], Rows | None]:
        """What was done to a request that has ended, and its rows; dismisses it, rows wait for `release`.

        CaptureError: a row that was selected did not come, or was not steered; then nothing waits.
        """
        reader: str | None = None
        try:
            sequence = whole_sequence([*one.prompt, *one.token_ids[:-1]], one.prompt_len)
            receipts = self._steerer.finish_one(one.request, sequence) if one.ops else ()
            if one.keeping is None:
                return receipts, None
            taken = self._tape.taken(one.request)
            if (error := self._tape.failures.pop(one.request, None)) is not None:
                raise error
            segments = {number: self._segments[number] for number in np.unique(taken.segment).tolist()}
            rows = Rows(f"rows {self._readers}", taken, segments, one.keeping.columns, sequence)
            rows.check(one.keeping.select)
            reader = rows.reader
            self._readers += 1
            self._reserved[reader] = len(taken.position) * one.keeping.row_bytes
            return receipts, rows
        finally:
            self.dismiss(one, reader)

    def release(self, reader: str) -> None:
        """Rows have been read, or nobody will read them."""
        self._tape.release(reader)
        self._reserved.pop(reader, None)

    # --- a pass

    @contextmanager
    def passing(self, step: StepBatch) -> Generator[None]:
        """While open, one forward of this thread runs over these rows, of requests that have taps."""
        self._broken, self.failures = None, {}
        changed = step.take(np.isin(step.request, sorted(self._steered)))
        kept: dict[Site, list[int]] = {}
        try:
            self._tape.begin(step, self._device)
            if len(changed):
                self._steerer.begin(changed, self._device)
            for site, layer in sorted(self._tape.places):
                kept.setdefault(site, []).append(layer)
        except _FAULTS as error:
            self._broken = error
        with ExitStack() as hooks:
            if len(changed) and self._broken is None:
                hooks.enter_context(steered(self._taps, self))
            hooks.enter_context(tapped(self._taps, kept, self._record))
            yield
        self._close(step, len(changed) > 0)

    @property
    def sites(self) -> dict[Site, tuple[int, ...]]:
        """Where the pass under way may change something."""
        return self._steerer.sites

    def steer(self, site: Site, layer: int, values: Tensor) -> Tensor | None:
        """See hooks.Steers."""
        if self._broken is None:
            try:
                return self._steerer.steer(site, layer, values)
            except _FAULTS as error:
                self._broken = error
        return None

    def _record(self, site: Site, layer: int, rows: Tensor) -> None:
        if self._broken is None:
            try:
                self._tape.record((site, layer), Copied(rows))
            except _FAULTS as error:
                self._broken = error

    def _close(self, step: StepBatch, steers: bool) -> None:
        """Note what failed: all requests of the pass that have taps, where a tap did; else one by one."""
        if self._broken is None:
            try:
                if steers:
                    self._steerer.end()
            except CaptureError as error:
                if not self._steerer.ledger.failures:
                    self._broken = error
            self._tape.end()
        own = self._steerer.ledger.failures
        self.failures = {number: CaptureError(message) for number, message in own.items()} | self._tape.failures
        own.clear()
        self._tape.failures.clear()
        if self._broken is not None:
            said = (str(self._broken).strip().splitlines() or [type(self._broken).__name__])[-1]
            numbers: Sequence[int] = np.unique(step.request).tolist()
            self.failures = {number: CaptureError(f"a tap failed in its pass: {said:.200}") for number in numbers}
