"""The requests of one engine that have wishes, and the passes over their rows."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor

from midstream.core.binding import BoundOp, bind
from midstream.core.errors import CaptureError, MidstreamError, SpecError, spec_error
from midstream.core.interventions import InterventionSpec
from midstream.core.sites import Site, site_layers
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.fixed import FixedTaps, plain_add
from midstream.taps.segments import Column, Segments
from midstream.taps.steerer import Steerer
from midstream.taps.step import Ints, StepBatch
from midstream.taps.stream import Copied, Fused
from midstream.taps.stretches import Stretches
from midstream.taps.tape import Tape, Taping

from ..requests import LINES, EngineRequest, FileWishes, text_of
from .examine import Examined
from .one_request import Running, Wanted, plain_error
from .places import Place
from .streams import stream_at
from .tap_op import at_work

_SPECS: Final = 256
"""Specs that are kept bound to the model."""
_KEPT: Final = 4096
"""Requests that ended and whose rows nobody has asked for; past these the oldest is forgotten."""
_FAULTS: Final = (CaptureError, RuntimeError, ValueError, IndexError, TypeError, OSError)
"""What a tap may raise in the middle of a pass: it fails the requests that have taps, never the engine."""


class RunningRequests:
    """What is asked of one worker's passes, and what came of it."""

    def __init__(self, examined: Examined, folder: Path, row_bytes: int, registry: ArtifactRegistry) -> None:
        self.examined = examined
        self.segments = Segments(folder, row_bytes)
        self.registry = registry
        self.number_of: dict[str, int] = {}
        self._tape = Tape(self.segments)
        self._steerer = Steerer()
        self._requests: dict[int, Running] = {}
        self._by_id: dict[str, int] = {}
        self._asking: dict[str, Running] = {}
        self._given_up: set[str] = set()
        self._free: list[int] = []
        self._bound: dict[str, tuple[BoundOp, ...]] = {}
        self._seen_at = Stretches()
        self._seen = np.zeros(0, dtype=np.bool_)
        self._steered: set[int] = set()
        self._active: Mapping[int, Place] = {}
        self._taping: set[tuple[Site, int]] = set()
        self._steering: set[tuple[Site, int]] = set()
        self._broken: Exception | None = None

    # --- requests come and go

    def scheduled(self, output: Any) -> None:
        """A step is about to run: what vLLM's scheduler says of requests that begin and that have ended."""
        for engine_id in output.finished_req_ids:
            self._ended(engine_id)
        for new in output.scheduled_new_reqs:
            if (text := text_of(new.sampling_params)) is not None:
                self._begins(new, text)
        resumed = output.scheduled_cached_reqs
        for engine_id, computed in zip(resumed.req_ids, resumed.num_computed_tokens, strict=True):
            if engine_id in resumed.resumed_req_ids:
                self._resumes(engine_id, computed)

    def _resumes(self, engine_id: str, computed: int) -> None:
        """A request that was preempted goes on, perhaps on blocks that another with the same keys has computed."""
        number = self.number_of.get(engine_id)
        if number is not None:
            running = self._requests[number]
            running.cached = max(running.cached, computed)

    def _begins(self, new: Any, text: str) -> None:
        engine_id, prompt, cached = new.req_id, new.prompt_token_ids, new.num_computed_tokens
        try:
            wishes = EngineRequest.read(text).settled(engine_id, len(prompt or ()), new.sampling_params.max_tokens)
        except SpecError:
            return  # its id is not known either: whoever sent it finds no answer, and says so
        if wishes.id in self._by_id:
            # runner V2 is told of a preempted request again; another with the same id has no rows of its own
            if self._requests[self._by_id[wishes.id]].engine_id == engine_id:
                self._resumes(engine_id, cached)
            return
        number = self._free.pop() if self._free else len(self._requests)
        running = Running(number, engine_id, wishes, (), prompt or (), cached, False)
        self._requests[number] = running
        self._by_id[wishes.id] = number
        try:
            if not prompt:
                raise CaptureError("prompt embeddings have no token ids to label rows by")
            if wishes.max_len < (needed := len(prompt) + (new.sampling_params.max_tokens or 0)):
                raise CaptureError(f"max_len is {wishes.max_len}, and {needed} positions may come")
            ops, columns = self._ops(wishes), self._columns(wishes)
        except (MidstreamError, OSError) as error:
            running.error = error if isinstance(error, MidstreamError) else CaptureError(str(error))
            return
        running.ops = ops
        self._asking[engine_id] = running
        if columns:
            self._tape.admit(number, Taping(columns, wishes.select, wishes.max_len, wishes.first))
            running.taped = True
        if running.ops:
            self._steerer.admit(number, running.ops, {int(at): of for at, of in (wishes.decided or {}).items()})
            self._steered.add(number)
            self._seen_at.admit(number, wishes.max_len)
            if self._seen_at.size > len(self._seen):
                self._seen = np.concatenate([self._seen, np.zeros(self._seen_at.size, dtype=np.bool_)])
            self._seen[self._seen_at.of(number, wishes.max_len)] = False
        if running.taped or running.ops:
            self.number_of[engine_id] = number

    def _ops(self, wishes: EngineRequest) -> tuple[BoundOp, ...]:
        """The ops of a spec, bound once for all requests that have it."""
        if wishes.steering is None:
            return ()
        spec: InterventionSpec = wishes.steering
        if spec.digest not in self._bound:
            if len(self._bound) >= _SPECS:
                self._bound.pop(next(iter(self._bound)))
            examined = self.examined
            self._bound[spec.digest] = bind(spec, examined.whole_layouts, examined.refused, self.registry.get)
        return self._bound[spec.digest]

    def _columns(self, wishes: EngineRequest) -> tuple[Column, ...]:
        """What this rank keeps of a request's rows; SpecError for a site or layer that the model has not."""
        examined, dtype = self.examined, None
        places: Sequence[tuple[Site, int]]
        if wishes.file is not None:
            places = wishes.file.places if wishes.file.source == "taps" else ()
            if absent := [layer for site, layer in places if layer not in examined.whole_layouts.get(site, ())]:
                message = f"the model has no layer {absent[0]}"
                raise spec_error("E_LAYER_RANGE", "kv_transfer_params.aux_layer_ids", message)
        elif wishes.capture is not None:
            capture = wishes.capture
            dtype = getattr(torch, capture.dtype) if capture.dtype else None
            sites = site_layers(capture.sites, capture.layers, examined.whole_layouts, examined.refused)
            places = [(site, layer) for site, layers in sites.items() for layer in layers]
        else:
            return ()
        found: list[Column] = []
        for site, layer in places:
            if examined.keeps(site):
                width, own = examined.widths[site, layer]
                found.append(Column(site, layer, width, dtype or own))
        return tuple(found)

    def _ended(self, engine_id: str) -> None:
        self.number_of.pop(engine_id, None)
        self._asking.pop(engine_id, None)
        if self._given_up:
            mine = [one for one in self._given_up if self._requests[self._by_id[one]].engine_id == engine_id]
            self._given_up.difference_update(mine)
            self.release(mine)
        number = self._by_id.get(engine_id)
        if self.examined.rank and number is not None and self._requests[number].wishes.file is not None:
            self.release([engine_id])  # the first rank writes it
        if len(self._requests) > _KEPT:
            running = set(self.number_of.values())
            oldest = next((one for number, one in self._requests.items() if number not in running), None)
            if oldest is not None:
                self.release([oldest.wishes.id])

    def _forget(self, running: Running, reader: str | None) -> None:
        self.number_of.pop(running.engine_id, None)
        self._asking.pop(running.engine_id, None)
        if running.taped:
            self._tape.dismiss(running.number, reader)
        if running.ops:
            self._steerer.dismiss(running.number)
            self._steered.discard(running.number)
            self._seen_at.dismiss(running.number)
        del self._requests[running.number], self._by_id[running.wishes.id]
        self._free.append(running.number)

    def prompt_len(self, number: int) -> int:
        """How many positions of a request are prompt."""
        return self._requests[number].wishes.prompt_len

    def prompt_of(self, number: int) -> Sequence[int]:
        """The ids that a request began with."""
        return self._requests[number].prompt

    # --- a pass

    def wanted(self, scheduled: Mapping[str, int]) -> Wanted:
        """What the requests of a step want of it. scheduled: the engine's id → how many rows it has."""
        sites: set[Site] = set()
        rows, plain = 0, True
        for engine_id, count in scheduled.items():
            running = self._asking.get(engine_id)
            if running is not None:
                rows += count
                sites |= running.wishes.sites
                plain = plain and all(plain_add(one.op) for one in running.ops)
        return Wanted(sites, rows, plain)

    @contextmanager
    def passing(self, step: StepBatch, device: torch.device, fixed: FixedTaps | None = None) -> Generator[None]:
        """While open, a forward pass runs over these rows. fixed: it is a replay, on these buffers."""
        self._broken = None
        read = np.unique(step.row)
        if fixed is not None:  # its rows are seen among those that it reads, not among all of the pass
            step = replace(step, size=len(read), row=np.searchsorted(read, step.row))
        self._taping, self._steering = set(), set()
        steered = step.take(np.isin(step.request, sorted(self._steered)))
        try:
            self._tape.begin(step, device)
            if len(steered):
                again = self._seen[self._seen_at.at(steered.request, steered.position)]
                self._steerer.begin(replace(steered, again=again if again.any() else None), device)
                self._steering = self._steerer.places
            self._taping = self._tape.places
        except _FAULTS as error:
            self._broken, self._steering = error, set()
        wanted = self._taping | self._steering
        self._active = {self.examined.chosen[place].number: self.examined.chosen[place] for place in wanted}
        try:
            if fixed is None:
                with at_work(self) if self._active else nullcontext():
                    yield
            else:
                self._tell(fixed, read, steered, device)
                yield
                self._read_back(fixed)
            self._close(step, steered)
        finally:
            self._active = {}

    @property
    def active_sites(self) -> set[Site]:
        """The sites that the pass under way looks at or changes."""
        return {place.site for place in self._active.values()}

    def at(self, place: int, delta: Tensor, residual: Tensor | None) -> None:
        """See tap_op."""
        found = self._active.get(place)
        if found is None:
            return
        where = found.where
        try:
            if where in self._steering:
                self._steerer.change(*where, stream_at(found, delta, residual, whole=True))
            if where in self._taping:
                self._tape.record(where, stream_at(found, delta, residual))
        except _FAULTS as error:
            self._broken, self._active = error, {}

    def _tell(self, fixed: FixedTaps, read: Ints, steered: StepBatch, device: torch.device) -> None:
        """Write down what a replay reads, and what it adds: what the ops make of rows of zeros."""
        try:
            fixed.fill(read, self._added(steered, device) if self._broken is None and len(steered) else {})
        except _FAULTS as error:
            self._broken, self._active = error, {}
            fixed.fill(read[:0], {})

    def _added(self, steered: StepBatch, device: torch.device) -> dict[int, Tensor]:
        """Place → what ops add to each row that is read, `[rows, width]`."""
        found: dict[int, Tensor] = {}
        numbers = range(max(self._steered) + 1)  # of requests that ended, some are free
        adding = Steerer([self._requests[one].ops if one in self._steered else () for one in numbers])
        adding.begin(steered, device)
        for where in sorted(adding.places):
            zeros = torch.zeros((steered.size, self.examined.widths[where][0]), device=device)
            if (changed := adding.steer(*where, zeros)) is not None:
                found[self.examined.chosen[where].number] = changed
        return found

    def _read_back(self, fixed: FixedTaps) -> None:
        """After a replay: count what was added, and keep what was left."""
        try:
            for place in self._active.values():
                where, left = place.where, fixed.left(place.number)
                if where in self._steering:  # on a copy of the rows as they were: the replay has changed them itself
                    self._steerer.change(*where, Copied(left - fixed.added(place.number)))
                if where in self._taping:
                    self._tape.record(where, Fused(left))
        except _FAULTS as error:
            self._broken = error

    def _close(self, step: StepBatch, steered: StepBatch) -> None:
        """Note what failed in a pass: all that have taps, where a tap did; else one by one."""
        if self._broken is None and len(steered):
            try:
                self._steerer.end()
            except CaptureError as error:
                if not self._steerer.ledger.failures:
                    self._broken = error
        if self._broken is not None:
            said = str(self._broken).strip().splitlines() or [type(self._broken).__name__]
            for number in np.unique(step.request).tolist():
                self._fail(number, CaptureError(f"a tap failed in its pass: {said[-1]:.200}"))
            self._steerer.fail(())
        self._tape.end()
        for number, message in self._steerer.ledger.failures.items():
            self._fail(number, CaptureError(message))
        self._steerer.ledger.failures.clear()
        for number, error in self._tape.failures.items():
            self._fail(number, error)
        self._tape.failures.clear()
        self._seen[self._seen_at.at(steered.request, steered.position)] = True

    def _fail(self, number: int, error: MidstreamError) -> None:
        if (running := self._requests.get(number)) is not None and running.error is None:
            running.error = error

    # --- what came of it

    def collect(self, ids: Sequence[str], keep: bool = False) -> bytes:
        """Where the rows of some requests are, and what was done to them. The rows stay until `release`.

        keep: so do the requests, which can be collected again.

        A safetensors file: LINES, int64 `[rows]`, request being the place in `ids`; metadata, in JSON: requests,
        segments.
        """
        columns: dict[str, list[Any]] = {name: [] for name in LINES}
        described: list[dict[str, Any]] = []
        used: set[int] = set()
        for place, one in enumerate(ids):
            number = self._by_id.get(one)
            if number is None:
                described.append({"id": one, "error": plain_error(CaptureError("the engine does not know it"))})
                continue
            running = self._requests[number]
            if running.taped:
                taken = self._tape.taken(number)
                columns["request"].append(np.full(len(taken.position), place, dtype=np.int64))
                for name in LINES[1:]:
                    columns[name].append(getattr(taken, name))
                used.update(np.unique(taken.segment).tolist())
                if number in self._tape.failures:
                    self._fail(number, self._tape.failures.pop(number))
            steered = bool(running.ops)
            tally = self._steerer.tally_of(number) if steered else []
            described.append(running.plain(tally, self._steerer.decided(number) if steered else {}))
        segments = [self.segments[number].plain() for number in sorted(used)]
        metadata = {"requests": json.dumps(described), "segments": json.dumps(segments)}
        for one in () if keep else ids:
            if one in self._by_id:
                self._forget(self._requests[self._by_id[one]], reader=one)
        empty = np.zeros(0, dtype=np.int64)
        return save({name: np.concatenate([empty, *parts]) for name, parts in columns.items()}, metadata)

    def file_of(self, one: str) -> FileWishes:
        """The file that a request gets, which has ended; CaptureError: it failed, or is not known any more."""
        if (number := self._by_id.get(one)) is None:
            raise CaptureError("its rows are gone: too many requests ended that nobody asked for")
        running = self._requests[number]
        if running.error is not None:
            raise running.error
        assert running.wishes.file is not None
        return running.wishes.file

    def take(self, one: str) -> tuple[Ints, Tensor]:
        """The rows of a request that gets a file: their positions, and `[rows, layers, width]`, a copy."""
        places = self.file_of(one).places
        taken = self._tape.taken(self._by_id[one])
        if not len(taken.position):
            width, dtype = self.examined.widths[places[0]]
            return taken.position, torch.empty((0, len(places), width), dtype=dtype)
        return taken.position, self.segments.rows(taken.segment, taken.row, places)

    def standing(self) -> list[str]:
        """vLLM's ids of the requests that have no id of ours, and whose rows wait for whoever asks."""
        return [
            one.wishes.id
            for one in self._requests.values()
            if one.wishes.id == one.engine_id and one.wishes.capture is not None
        ]

    def release(self, ids: Sequence[str]) -> None:
        """The rows of some requests have been read, or nobody will read them: their room is used again."""
        for one in ids:
            if (number := self._by_id.get(one)) is not None:
                if self._requests[number].engine_id in self._asking:  # it still runs: once it has ended
                    self._given_up.add(one)
                    continue
                self._forget(self._requests[number], reader=None)
            self._tape.release(one)

    def close(self) -> None:
        """Remove every file."""
        self.segments.clear()
