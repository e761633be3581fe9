"""Recorder: the selected rows of each forward pass, off the device and into their final place.

Where each row will stand in the result is known before it is computed (samples in order, positions in order), so
rows go there directly: no second copy, and memory stays at what is captured. Rows are overwritten by position, so
recomputation after preemption or a cache miss is right for free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.core.capture import CaptureReceipt, Labels
from midstream.core.errors import CaptureError, MidstreamError
from midstream.core.select import SelectSpec, resolve
from midstream.core.sites import Site, SiteLayout

from .pages import PAGES
from .step import Ints, StepBatch, check_fired, resolve_each, whole_sequence
from .storage import copy_rows, counts_of, stored
from .stream import Index, index_of

_ELSEWHERE: Final[tuple[Site, int]] = ("resid_post", -1)

ABSENT = -1
"""The slot of a row that no spec can select."""


@dataclass(frozen=True)
class RecordedRequest:
    """One sequence to record. max_len: a bound on its rows (prompt + max_tokens − 1).

    with_prompt: false for choices after the first, whose prompt rows are the first one's.
    """

    sample: int
    choice: int
    prompt: Sequence[int]
    max_len: int
    select: SelectSpec | None = None
    with_prompt: bool = True


@dataclass(frozen=True)
class Recorded:
    """What a recorder hands over. receipts: one per sample; errors: sample → why it has no rows."""

    labels: Labels
    tensors: dict[tuple[Site, int], Tensor]
    receipt: CaptureReceipt
    receipts: list[CaptureReceipt]
    errors: dict[int, MidstreamError]


@dataclass
class _Pass:
    """The forward pass under way: which rows go (`source`), to which slots (`target`), and who has fired."""

    rows: int
    source: Index
    target: Index
    fired: set[tuple[Site, int]] = field(default_factory=set[tuple[Site, int]])
    # copies on their way from a GPU, with where they go; settled once the next pass is queued
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    events: list[torch.cuda.Event] = field(default_factory=list[torch.cuda.Event])


class _PassOfThread(local):
    """The forward pass under way in the calling thread."""

    now: _Pass | None = None


class Recorder:
    """Records `sites` (site → layers) for `requests`, given in order of sample, then choice.

    `StepBatch.request` holds indices into `requests`. `dtype` None keeps every bit.
    """

    def __init__(
        self, sites: Mapping[Site, Sequence[int]], requests: Sequence[RecordedRequest], dtype: torch.dtype | None = None
    ) -> None:
        self.sites: dict[Site, tuple[int, ...]] = {site: tuple(layers) for site, layers in sites.items()}
        self.requests = requests
        self.dtype = dtype
        self._expected = {(site, layer) for site, layers in self.sites.items() for layer in layers}
        self._out: dict[tuple[Site, int], Tensor] = {}
        self._passes = _PassOfThread()  # batches may run side by side, a pass in each thread
        self._allocating = Lock()
        self._unsettled: _Pass | None = None
        # per row, so that a recomputed one counts once: values that overflowed, rows that an integer cannot hold
        self._overflowed: dict[tuple[Site, int], Tensor] = {}
        self._unstorable: dict[tuple[Site, int], Tensor] = {}
        self._failed: dict[int, MidstreamError] = {}
        self._plan_slots()

    def _plan_slots(self) -> None:
        """Give each row that may be selected its place; `_slot[_offset[r] + position]` is −1 for the others."""
        lengths = np.array([request.max_len for request in self.requests], dtype=np.int64)
        self._offset = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        slots = np.full(int(self._offset[-1]), ABSENT, dtype=np.int64)
        self._spec_of = np.zeros(len(self.requests), dtype=np.int64)
        known: dict[SelectSpec | None, int] = {}
        certain = 0
        for index, request in enumerate(self.requests):
            self._spec_of[index] = known.setdefault(request.select, len(known))
            start, length = int(self._offset[index]), len(request.prompt)
            may = np.zeros(request.max_len, dtype=np.bool_)
            if request.with_prompt:
                may[:length] = resolve(request.select, whole_sequence(request.prompt, length, index))
            # generated ids are not known yet: any row of the phase may be selected
            may[length:] = request.select is None or "generation" in request.select.phases
            slots[start : start + request.max_len][may] = 0
            certain += int(may[:length].sum())
        self._specs: list[SelectSpec | None] = list(known)
        self.certain = certain  # rows of prompts, which will come
        chosen = slots == 0
        slots[chosen] = np.arange(int(chosen.sum()))
        self._slot = slots
        self.slots = int(chosen.sum())  # a bound: generated rows may not come
        self._seen = np.zeros(self.slots, dtype=np.bool_)
        self._reused = np.zeros(self.slots, dtype=np.bool_)
        self._token = np.zeros(self.slots, dtype=np.int64)

    # --- one forward pass

    def begin(self, step: StepBatch, device: torch.device) -> None:
        """Resolve, once for all layers, which rows of this pass are selected and where they go."""
        slot = self._slot[self._offset[step.request] + step.position]
        chosen = slot != ABSENT
        decoded = chosen & (step.position >= step.prompt_len)
        if decoded.any():  # prompt rows were resolved when slots were planned
            rows = step.take(decoded)
            chosen[decoded] = resolve_each(self._specs, self._spec_of[rows.request], rows)
        source, target = step.row[chosen], slot[chosen]
        self._seen[target] = True
        self._token[target] = step.token_id[chosen]
        if len(source) > 1 and not (np.diff(source) > 0).all():  # a prefix of several requests: computed for the first
            reused = np.ones(len(source), dtype=np.bool_)
            reused[np.unique(source, return_index=True)[1]] = False
            self._reused[target] = reused
        if step.again is not None:  # rows that another request's pass computed
            self._reused[target] = step.again[chosen]
        self._passes.now = _Pass(step.size, index_of(source, device), index_of(target, torch.device("cpu")))

    def record(self, site: Site, layer: int, values: Tensor) -> None:
        """Keep the selected rows of one tapped module's `values` `[..., width]`, whose leading axes are the rows."""
        now = self._passes.now
        if now is None:
            raise CaptureError(f"{site} at layer {layer} fired outside a pass")
        rows = values.detach().reshape(-1, values.shape[-1])
        check_fired(now.fired, (site, layer), len(rows), now.rows)
        source = now.source if isinstance(now.source, slice) else now.source.to(rows.device)
        picked = rows[source] if isinstance(source, slice) else rows.index_select(0, source)
        if not len(picked):
            return
        with self._allocating:
            out = self._out.get((site, layer))
            if out is None:
                out = self._out[site, layer] = self._allocate(rows)
        if self.dtype is not None and self.dtype != picked.dtype:
            picked = self._cast(picked, (site, layer), now)
        self._keep(now, out, picked)

    def _allocate(self, rows: Tensor) -> Tensor:
        """An ordinary tensor (not an inference tensor) with a place for each row that may come."""
        with torch.inference_mode(False):
            return PAGES.tensor((self.slots, rows.shape[1]), self.dtype or rows.dtype)

    def _keep(self, now: _Pass, out: Tensor, values: Tensor) -> None:
        """`out[target] = values`: at once on the CPU, else by a copy that goes on while the model does."""
        if values.is_cuda:
            now.pending.append((out, values.to("cpu", non_blocking=True)))  # lands in pinned memory
        else:
            _put(out, now.target, values.cpu())

    def _cast(self, picked: Tensor, key: tuple[Site, int], now: _Pass) -> Tensor:
        """To the storage type, on the device; what an integer cannot hold fails its own request."""
        assert self.dtype is not None
        made = stored(picked, self.dtype)
        if made.bad is not None:
            self._keep(now, counts_of(self._unstorable, key, self.slots, torch.bool), made.bad)
        if made.over is not None:
            self._keep(now, counts_of(self._overflowed, key, self.slots, torch.int32), made.over)
        return made.rows

    def count_overflows(self, step: StepBatch, counts: Ints) -> None:
        """Values of some rows that overflowed before they came here, `[owned]`."""
        if counts.any():
            slot = self._slot[self._offset[step.request] + step.position]
            total = counts_of(self._overflowed, _ELSEWHERE, self.slots, torch.int32)
            total[torch.as_tensor(slot)] = torch.as_tensor(counts).int()

    def end(self) -> None:
        """Close the pass; CaptureError when a tap did not fire."""
        now, self._passes.now = self._passes.now, None
        if now is None:
            raise CaptureError("a pass ended that had not begun")
        if silent := sorted(self._expected - now.fired):
            site, layer = silent[0]
            raise CaptureError(f"{site} at layer {layer} did not fire: the rows of this pass are lost")
        self._settle()
        if now.pending:
            for device in range(torch.cuda.device_count()):
                now.events.append(torch.cuda.Event())
                now.events[-1].record(torch.cuda.current_stream(device))
            self._unsettled = now

    def _settle(self) -> None:
        """Wait for the copies of the pass before, and put its rows in their place."""
        before, self._unsettled = self._unsettled, None
        if before is not None:
            for event in before.events:
                event.synchronize()
            for out, values in before.pending:
                _put(out, before.target, values)

    def fail(self, sample: int, error: MidstreamError) -> None:
        """Give up one sample, also in the middle of its pass; the others stay."""
        self._passes.now = None
        self._failed[sample] = error

    # --- the result

    def finish(self, generated: Sequence[Sequence[int]] | None = None) -> Recorded:
        """Check that every selected row is there, and hand all over.

        generated: each request's sampled ids, of which all but the last were consumed; None: only prompts ran.
        Raises CaptureError when rows are missing or were recorded beyond what was selected.
        """
        self._settle()
        labels, wanted = self._labels(generated or [()] * len(self.requests))
        failed = np.isin(labels.sample, list(self._failed))
        missing = int((wanted & ~self._seen & ~failed).sum())
        extra = int((self._seen & ~wanted & ~failed).sum())
        if missing or extra:
            raise CaptureError(f"{missing} selected rows did not arrive, and {extra} came that nobody selected")
        if not np.array_equal(self._token[wanted & ~failed], labels.token_id[wanted & ~failed]):
            raise CaptureError("a row consumed another token than its label says")
        for bad in self._unstorable.values():
            for sample in {int(sample) for sample in labels.sample[bad.numpy()]}:
                message = f"sample {sample} has values that are not finite or too large for {self.dtype}"
                self._failed.setdefault(sample, CaptureError(message))
        keep = wanted & ~np.isin(labels.sample, list(self._failed))
        with torch.inference_mode(False):  # a copy made under inference mode would be no ordinary tensor
            tensors = {key: _compact(out, keep) for key, out in self._out.items()} if keep.any() else {}
        receipts = self._receipts(labels, wanted)
        total = CaptureReceipt.total(receipts)
        return Recorded(labels.take(keep), tensors, total, receipts, dict(self._failed))

    def _receipts(self, labels: Labels, wanted: NDArray[np.bool_]) -> list[CaptureReceipt]:
        """One receipt per sample; a failed sample's says how much of it had been computed."""
        samples = 1 + max((request.sample for request in self.requests), default=-1)
        overflowed = np.zeros(self.slots, dtype=np.int64)
        for counts in self._overflowed.values():
            overflowed += counts.numpy()

        def per_sample(weights: NDArray[Any]) -> list[int]:
            return np.bincount(labels.sample, weights=weights, minlength=samples).astype(np.int64).tolist()

        columns = (wanted, wanted & self._seen & ~self._reused, wanted & self._seen & self._reused, overflowed)
        return [CaptureReceipt(*counts) for counts in zip(*map(per_sample, columns), strict=True)]

    def _labels(self, generated: Sequence[Sequence[int]]) -> tuple[Labels, NDArray[np.bool_]]:
        """The label of every slot, and which slots the specs select, read off the final ids alone."""
        size = self.slots
        columns = [np.zeros(size, dtype=np.int64) for _ in range(4)]
        sample, choice, position, token = columns
        in_generation, wanted = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
        for index, (request, tail) in enumerate(zip(self.requests, generated, strict=True)):
            prompt_len = len(request.prompt)
            rows = whole_sequence([*request.prompt, *tail[:-1]], prompt_len, index)
            slot = self._slot[self._offset[index] : self._offset[index] + len(rows)]
            selected = resolve(request.select, rows)
            if not request.with_prompt:
                selected[:prompt_len] = False
            wanted[slot[selected]] = True
            here = slot != ABSENT
            at, decoded = slot[here], rows.position[here] >= prompt_len
            sample[at], position[at], token[at] = request.sample, rows.position[here], rows.token_id[here]
            choice[at], in_generation[at] = np.where(decoded, request.choice, -1), decoded
        return Labels(sample, choice, position, token, in_generation), wanted


def _put(out: Tensor, target: Index, rows: Tensor) -> None:
    """`out[target] = rows`."""
    if isinstance(target, slice) and out.dim() == 2:
        copy_rows(out[target], rows)
    elif isinstance(target, slice) or out.dim() == 1:
        out[target] = rows
    elif out.shape[1] * out.itemsize % 8 == 0 and rows.storage_offset() * rows.itemsize % 8 == 0:
        # the same bytes as 64-bit words: torch's copy by index costs a step per element, not per byte
        out.view(torch.int64).index_copy_(0, target, rows.contiguous().view(torch.int64))
    else:
        out.index_copy_(0, target, rows)


def _compact(out: Tensor, keep: NDArray[np.bool_]) -> Tensor:
    """The kept rows moved to the front of `out`, in place: run by run, since a row only ever moves forward."""
    if keep.all():
        return out
    edges = np.flatnonzero(np.diff(np.concatenate([[False], keep, [False]]).astype(np.int8)))
    place = 0
    for start, stop in edges.reshape(-1, 2).tolist():
        if place != start:
            out[place : place + stop - start] = out[start:stop].clone()
        place += stop - start
    # a view of much more would hold memory that nobody asked for; of a little more, a copy would cost more
    return out[:place].clone() if place < 0.75 * len(out) else out[:place]


def check_memory(rows: int, layouts: Mapping[Site, Mapping[int, SiteLayout]], dtype: str) -> None:
    """CaptureError when `rows` rows of every site and layer are more than this machine's memory."""
    width = sum(layout.width for layers in layouts.values() for layout in layers.values())
    needed = rows * width * getattr(torch, dtype).itemsize
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > have:
        raise CaptureError(
            f"{rows} rows of {width} values are {needed / 2**30:.1f} GiB, and this machine has {have / 2**30:.1f}: "
            "choose fewer rows or layers, or fewer prompts a call"
        )
