"""Steerer: every request's ops applied to its rows of each pass, and the receipt of what was done.

What is changed is a Stream: a copy where a tensor may have other readers, an engine's own memory where it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.core.binding import BoundOp
from midstream.core.errors import CaptureError
from midstream.core.interventions import OpReceipt, acts_on
from midstream.core.sites import Site

from .evidence import Evidence, evidence_for, evidence_of
from .groups import Change, changes_of
from .ledger import Ledger
from .step import StepBatch, check_fired, whole_sequence
from .stream import Copied, Stream


class Steerer:
    """Applies each request's ops to its rows of every pass; `StepBatch.request` holds indices into `requests`.

    Requests with different ops go through one pass together: ops of one kind and shape are one call of its function.
    leaders: for each request, the one whose prompt rows it shares; None: each has its own. An engine whose requests
    come and go tells of them by `admit` and `dismiss`.
    """

    def __init__(self, requests: Sequence[Sequence[BoundOp]] = (), leaders: Sequence[int] | None = None) -> None:
        self.requests: list[Sequence[BoundOp]] = list(requests)
        self.ledger = Ledger(requests, range(len(requests)) if leaders is None else leaders)
        self._evidence = evidence_of(requests, self.ledger)
        self._step: StepBatch | None = None
        self._fired: set[tuple[Site, int]] = set()
        self._failed: set[int] = set()
        self._gather()

    def admit(self, request: int, ops: Sequence[BoundOp], decided: Mapping[int, bool] | None = None) -> None:
        """A request begins; its index is one that no running request has. decided: by its gates, before."""
        self.requests += [()] * (request + 1 - len(self.requests))
        self.requests[request] = ops
        self.ledger.admit(request, ops)
        for place, decision in (decided or {}).items():
            self.ledger.decide(request, place, decision)
        undecided = [one for one in ops if one.place not in (decided or {})]
        self._evidence += evidence_for(request, undecided, ops, self.ledger)
        self._stale = True

    def decided(self, request: int) -> dict[int, bool]:
        """What the gates of a request's ops decided so far, by the place of the op."""
        return self.ledger.decisions(request)

    def dismiss(self, request: int) -> None:
        """A request has ended: its counts are forgotten."""
        self.ledger.dismiss(request, self.requests[request])
        self.requests[request] = ()
        self._evidence = [one for one in self._evidence if one.request != request]
        self._stale = True

    def _gather(self) -> None:
        """Put the requests' ops together, in the order in which they apply at each place."""
        self._changes = changes_of(self.requests, self.ledger)
        self._work: dict[tuple[Site, int], list[Change | Evidence]] = {}
        for work in sorted([*self._evidence, *self._changes], key=lambda work: work.order):
            for layer in work.layers:
                self._work.setdefault((work.site, layer), []).append(work)
        self._stale = False

    @property
    def sites(self) -> dict[Site, tuple[int, ...]]:
        """Where something may be changed or read, by site."""
        found: dict[Site, set[int]] = {}
        for site, layer in self._work:
            found.setdefault(site, set()).add(layer)
        return {site: tuple(sorted(layers)) for site, layers in found.items()}

    @property
    def places(self) -> set[tuple[Site, int]]:
        """The sites and layers at which something may be changed or read."""
        return set(self._work)

    @property
    def gated(self) -> bool:
        """Whether some op waits for a decision at the end of its prompt."""
        return bool(self._evidence)

    # --- one forward pass

    def begin(self, step: StepBatch, device: torch.device) -> None:
        """Find, once for all layers, which rows of this pass each op may act on."""
        if self._stale:
            self._gather()
        masks: dict[object, NDArray[np.bool_]] = {}
        for work in (*self._changes, *self._evidence):
            work.begin(step, device, masks)
        self._step = step
        self._fired = set()

    def steer(self, site: Site, layer: int, values: Tensor) -> Tensor | None:
        """`values` `[..., width]`, whose leading axes are the pass's rows, changed; None where nothing is."""
        stream = Copied(values)
        self.change(site, layer, stream)
        return stream.changed

    def change(self, site: Site, layer: int, stream: Stream) -> None:
        """Change what stands in `stream` at a site and layer."""
        if self._step is None:
            raise CaptureError(f"{site} at layer {layer} fired outside a pass")
        check_fired(self._fired, (site, layer), stream.size, self._step.size)
        for work in self._work.get((site, layer), ()):
            if isinstance(work, Evidence):
                work.read(layer, stream)
            elif work.acts:
                work.apply(layer, stream)

    def end(self) -> None:
        """Close the pass; CaptureError when a module that an op acts on did not fire, or a gate could not decide."""
        if silent := sorted(set(self._work) - self._fired):
            site, layer = silent[0]
            raise CaptureError(f"{site} at layer {layer} did not fire: nothing was steered there")
        self._step = None
        for request, message in self.ledger.failures.items():
            raise CaptureError(f"request {request}: {message}")

    def fail(self, requests: Sequence[int]) -> None:
        """Give up some requests, also in the middle of their pass; the others stay."""
        self._step = None
        self._failed.update(requests)

    # --- the receipt

    def tally(self) -> list[OpReceipt]:
        """What each op did so far, over all requests, where nobody knows which rows are still to come."""
        return [receipt for request in range(len(self.requests)) for receipt in self.tally_of(request)]

    def tally_of(self, request: int) -> list[OpReceipt]:
        """What each op of one request did so far."""
        found: list[OpReceipt] = []
        for bound in self.requests[request]:
            skipped = bound.op.silent or self.ledger.closed(request, bound)
            for layer in bound.op.layers:
                count, relative = self.ledger.counts(request, bound, layer)
                at = (bound.place, bound.op.kind, bound.op.site, layer)
                found.append(OpReceipt(*at, count, count, relative=relative, skipped=skipped))
        return found

    def finish(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[tuple[OpReceipt, ...]]:
        """What each op did, per request; sequences: the ids that each request consumed, and its prompt's length.

        A request that shares its leader's prompt rows counts none of them. Raises CaptureError when an op's rows were
        not all steered, or more were.
        """
        receipts: list[tuple[OpReceipt, ...]] = []
        assert len(sequences) == len(self.requests), "one for each"
        for request, (ids, prompt_len) in enumerate(sequences):
            if request in self._failed:
                receipts.append(())
                continue
            rows = whole_sequence(ids, prompt_len)
            if self.ledger.leaders[request] != request:
                rows = rows.take(rows.position >= prompt_len)
            try:
                receipts.append(self.finish_one(request, rows))
            except CaptureError as error:
                raise CaptureError(f"request {request}, {error}") from None
        return receipts

    def finish_one(self, request: int, rows: StepBatch) -> tuple[OpReceipt, ...]:
        """The same of one request, whose rows these are."""
        found: list[OpReceipt] = []
        for bound in self.requests[request]:
            skipped = bound.op.silent or self.ledger.closed(request, bound)
            everywhere = 0 if skipped else int(acts_on(bound.op, rows).sum())
            for layer in bound.op.layers:
                selected = everywhere
                if bound.op.gate is not None and not skipped:  # its reach differs by layer
                    selected = int(acts_on(bound.op, rows, layer).sum())
                computed, relative = self.ledger.counts(request, bound, layer)
                if selected != computed:
                    what = f"op {bound.place} ({bound.op.kind}) at layer {layer}: {selected} rows were selected"
                    raise CaptureError(f"{what}, and {computed} steered")
                at = (bound.place, bound.op.kind, bound.op.site, layer)
                found.append(OpReceipt(*at, selected, computed, relative=relative, skipped=skipped))
        return tuple(found)
