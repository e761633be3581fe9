"""The table of samples: which rows of which shard are which document's, with that document's labels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from midstream.formats.atomic import replacing

from .shards import Sample

COLUMNS: Final = {
    "record": (pa.int64(), "the number of its record in the input, from 0"),
    "start": (pa.int64(), "its first token in the record"),
    "tokens": (pa.int32(), "how many tokens of the record it has"),
    "shard": (pa.int32(), "the shard that its rows are in"),
    "row_start": (pa.int64(), "its first row there"),
    "row_stop": (pa.int64(), "the row after its last"),
    "sequence": (pa.int32(), "the label `sample` of its rows: which sequence of the shard it is in"),
    "position": (pa.int32(), "the position of its first token in that sequence"),
    "dropped": (pa.int64(), "tokens of the record that were left out"),
    "nonfinite": (pa.int64(), "values of its rows that are NaN or infinite"),
    "error": (pa.string(), "why it has no rows, or null"),
    "id": (pa.string(), "the field `id` of the record, or null"),
    "labels": (pa.string(), "its other fields, as a JSON object"),
}
"""Of the table: column → its type, and what stands there."""
SCHEMA: Final = pa.schema({name: kind for name, (kind, _) in COLUMNS.items()})


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


def join_parts(path: Path, parts: Iterable[Path]) -> None:
    """All parts as one file, a row group each, atomically."""
    with replacing(path) as temporary, parquet.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
        for one in parts:
            writer.write_table(parquet.read_table(one, schema=SCHEMA))
