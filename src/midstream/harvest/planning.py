"""Which records make which shard: from the input and the spec alone, whatever was done before and wherever it died."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from midstream.core.select import SelectSpec, resolve
from midstream.formats.records import Record
from midstream.taps.step import whole_sequence

from .sequences import Cursor, Document, Ids, Sequenced, Window, fresh_select, windows
from .spec import HarvestSpec


@dataclass(frozen=True)
class PlannedShard:
    """Sequences of one shard, and where the input goes on after it."""

    index: int
    sequences: tuple[Sequenced, ...]
    next: Cursor

    @property
    def tokens(self) -> int:
        """What the model has to read for it."""
        return sum(len(one.token_ids) for one in self.sequences)

    def selects(self, select: SelectSpec | None) -> list[SelectSpec | None]:
        """The selection of each sequence: without rows that the one before it gives."""
        return [fresh_select(select, one.fresh) for one in self.sequences]


@dataclass(frozen=True)
class Planner:
    """Plans shards. prepare: a record as token ids. context: of the longest sequence. row_bytes: of all sites."""

    spec: HarvestSpec
    prepare: Callable[[Record], Ids]
    context: int
    row_bytes: int

    def documents(self, records: Iterable[Record], first: int) -> Iterator[Document]:
        """Records from number `first` on as token ids."""
        for number, one in enumerate(records, first):
            yield Document(number, self.prepare(one), one.source, one.labels)

    def shards(self, records: Iterable[Record], index: int, start: Cursor) -> Iterator[PlannedShard]:
        """The shards from number `index` on, which begins at `start`; `records` begin with its record."""
        held: list[Window] = []
        tokens = size = 0
        for one in windows(self.documents(records, start.record), self.spec, self.context, start):
            held.append(one)
            tokens += sum(len(sequence.token_ids) for sequence in one.sequences)
            size += sum(self._rows(sequence) for sequence in one.sequences) * self.row_bytes
            if tokens >= self.spec.shard_tokens or size >= self.spec.shard_bytes:
                yield _shard(index, held)
                held, tokens, size, index = [], 0, 0, index + 1
        if held:
            yield _shard(index, held)

    def _rows(self, sequence: Sequenced) -> int:
        select = fresh_select(self.spec.capture.select, sequence.fresh)
        if select is None:
            return len(sequence.token_ids)
        return int(resolve(select, whole_sequence(sequence.token_ids, len(sequence.token_ids))).sum())


def _shard(index: int, held: list[Window]) -> PlannedShard:
    return PlannedShard(index, tuple(sequence for one in held for sequence in one.sequences), held[-1].next)
