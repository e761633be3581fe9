"""The writing side of a harvest: one shard after the other, each whole and known to the manifest before the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from midstream.core.errors import CaptureError
from midstream.core.probe import Probe
from midstream.core.result import CaptureResult

from .manifest import MANIFEST, Counts, Manifest, ShardEntry, check_same, read_manifest
from .places import SAMPLES, Place, damaged, part_file, shard_file, sweep
from .planning import PlannedShard
from .samples import join_parts, part_of, write_part
from .shards import Sample, nonfinite_of, pooled, read_shard, samples_of, stored_of, write_shard
from .spec import Pool


@dataclass(eq=False)
class Writer:
    """Writes shards where they lie; `manifest` is as it stands on the disk. made, bytes: of the shards written."""

    place: Place
    manifest: Manifest
    pool: Pool | None = None
    probes: tuple[Probe, ...] = ()
    refuse_nonfinite: bool = False
    made: int = 0
    bytes: int = 0

    @classmethod
    def on(cls, place: Place, identity: dict[str, Any], *how: Any) -> Writer:
        """On a place that is locked: with the manifest that is there, which must be of this identity, or a new one."""
        manifest = read_manifest(place)
        writer = cls(place, manifest or Manifest(identity=identity), *how)
        if manifest is None:
            writer._note(writer.manifest)
        check_same(writer.manifest.identity, identity, place)
        return writer

    @property
    def complete(self) -> bool:
        """Whether all of the harvest is there."""
        return self.manifest.samples is not None

    def begin(self, trust: bool) -> set[str]:
        """Take away what died runs left, and give the names of files that are damaged; trust: by their sizes alone.

        CaptureError where an earlier run kept values that are refused now.
        """
        shards, samples = self.manifest.shards, self.manifest.samples
        if self.refuse_nonfinite and (odd := [one for one in shards if one.counts.nonfinite]):
            raise CaptureError(
                f"{self.place}/{odd[0].file} has {odd[0].counts.nonfinite:,} values that are not finite, which an "
                "earlier run kept: leave out --refuse-nonfinite, or name another directory"
            )
        files = [*shards, *(one.part for one in shards if one.part is not None), *([samples] if samples else [])]
        bad = damaged(self.place, files, trust=trust)
        if samples is not None and samples.file in bad:
            self._note(self.manifest.model_copy(update={"samples": None}))
        self._sweep()
        return bad

    def write(self, planned: PlannedShard, result: CaptureResult | None) -> None:
        """Write a shard (None: it is whole), its part of the sample table, and the manifest that knows them.

        CaptureError for values that are not finite, where those are refused.
        """
        index, file = planned.index, shard_file(planned.index)
        if result is not None and self.pool is not None:
            result = pooled(planned, result, self.pool)
        stored = read_shard(self.place.fetch(file)) if result is None else stored_of(result, self.probes)
        samples, nonfinite = samples_of(planned, stored.labels, stored.errors), nonfinite_of(stored)
        if self.refuse_nonfinite:
            _check_finite(samples, nonfinite)
        if result is None:
            known = self.manifest.shards[index]
        else:
            written = self.place.put(file, lambda path: write_shard(path, result, stored, self.probes))
            after = planned.next.record, planned.next.token
            counts = _counts(planned, samples, nonfinite, result)
            known = ShardEntry(**written.model_dump(), next=after, counts=counts)
            self.made, self.bytes = self.made + 1, self.bytes + written.bytes
        if not self.complete:
            table = part_of(index, samples, nonfinite)
            part = self.place.put(part_file(index), lambda path: write_part(path, table))
            known = known.model_copy(update={"part": part})
        shards = (*self.manifest.shards[:index], known, *self.manifest.shards[index + 1 :])
        self._note(self.manifest.model_copy(update={"shards": shards}))

    def finish(self) -> None:
        """Make the directory complete: one table of samples, and nothing that the manifest does not know."""
        if not self.complete:
            shards = self.manifest.shards
            parts = (self.place.fetch(part_file(index)) for index in range(len(shards)))
            samples = self.place.put(SAMPLES, lambda path: join_parts(path, parts))
            without = tuple(one.model_copy(update={"part": None}) for one in shards)
            self._note(self.manifest.model_copy(update={"shards": without, "samples": samples}))
        self._sweep()

    def _note(self, manifest: Manifest) -> None:
        self.place.put(MANIFEST, manifest.write)
        self.manifest = manifest

    def _sweep(self) -> None:
        shards = self.manifest.shards
        known = {one.file for one in shards} | {one.part.file for one in shards if one.part}
        sweep(self.place, known.__contains__)


def _check_finite(samples: Sequence[Sample], nonfinite: Any) -> None:
    for one in samples:
        if count := int(nonfinite[one.start : one.stop].sum()):
            row = one.start + int(nonfinite[one.start : one.stop].nonzero()[0][0])
            raise CaptureError(
                f"{one.piece.document.source} has {count:,} values that are not finite, the first in row "
                f"{row - one.start} of it: leave out --refuse-nonfinite to keep them, counted"
            )


def _counts(planned: PlannedShard, samples: Sequence[Sample], nonfinite: Any, result: CaptureResult) -> Counts:
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
