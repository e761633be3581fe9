"""The table of samples: which rows of which shard are which document's, with that document's labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from midstream.formats.atomic import replacing

from .shards import Sample

SCHEMA: Final = pa.schema(
    {
        "record": pa.int64(),
        "start": pa.int64(),
        "tokens": pa.int32(),
        "shard": pa.int32(),
        "row_start": pa.int64(),
        "row_stop": pa.int64(),
        "sequence": pa.int32(),
        "position": pa.int32(),
        "dropped": pa.int64(),
        "nonfinite": pa.int64(),
        "error": pa.string(),
        "id": pa.string(),
        "labels": pa.string(),
    }
)
"""record: its number in the input, from 0. start: the sample's first token in it. tokens: how many. shard, row_start,
row_stop: where its rows are. sequence, position: the label of the sequence in the shard, and of its first token in
that. dropped: tokens of the document that were left out. nonfinite: values. id: the record's field of that name.
labels: its other fields, in JSON."""


def part_of(shard: int, samples: Sequence[Sample], nonfinite: Any) -> pa.Table:
    """A shard's part of the table. nonfinite: values of each of its rows, `[rows]`."""
    sums = np.concatenate([[0], np.cumsum(nonfinite)])
    return pa.Table.from_pylist([_row(shard, one, sums) for one in samples], SCHEMA)


def _row(shard: int, one: Sample, sums: Any) -> dict[str, Any]:
    document = one.piece.document
    labels = dict(document.labels)
    identity = labels.pop("id", None)
    return {
        "record": document.record,
        "start": one.piece.start,
        "tokens": one.piece.length,
        "shard": shard,
        "row_start": one.start,
        "row_stop": one.stop,
        "sequence": one.sequence,
        "position": one.piece.position,
        "dropped": one.dropped,
        "nonfinite": int(sums[one.stop] - sums[one.start]),
        "error": one.error,
        "id": identity if identity is None or isinstance(identity, str) else json.dumps(identity),
        "labels": json.dumps(labels, sort_keys=True, ensure_ascii=False, separators=(",", ":")),
    }


def write_part(path: Path, table: pa.Table) -> None:
    """Write a part, atomically."""
    with replacing(path) as temporary:
        parquet.write_table(table, temporary, compression="zstd")


def join_parts(path: Path, parts: Sequence[Path]) -> None:
    """All parts as one file, a row group each, atomically."""
    with replacing(path) as temporary, parquet.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        for one in parts:
            writer.write_table(parquet.read_table(one, schema=SCHEMA))
