"""What stands in a shard: a capture, pooled where that was asked, or the scores of probes; and its sample table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from midstream.core.capture import Labels
from midstream.core.errors import FileFormatError
from midstream.core.probe import Probe
from midstream.core.result import CaptureResult
from midstream.formats import capture_file
from midstream.formats.tensor_file import opened, owned, read_json, write

from .planning import PlannedShard
from .sequences import Piece
from .spec import Pool

SCORES: Final = "scores"
_KEY: Final = "midstream-scores"
_WHAT: Final = "a shard of a harvest"


@dataclass(frozen=True, eq=False)
class Stored:
    """The content of a shard. tensors: by name, each of as many rows as there are labels. errors: by sequence."""

    labels: Labels
    tensors: Mapping[str, Tensor]
    errors: Mapping[int, str]


@dataclass(frozen=True)
class Sample:
    """The rows, `[start, stop)` of the shard, of one document or a part of it. error: why there are none."""

    piece: Piece
    sequence: int
    start: int
    stop: int
    dropped: int = 0
    error: str | None = None


def samples_of(planned: PlannedShard, labels: Labels, errors: Mapping[int, str]) -> list[Sample]:
    """Where the samples of a shard stand, by its labels."""
    found: list[Sample] = []
    bounds = np.searchsorted(labels.sample, np.arange(len(planned.sequences) + 1))
    for index, one in enumerate(planned.sequences):
        first, positions = int(bounds[index]), labels.position[bounds[index] : bounds[index + 1]]
        for piece in one.pieces:
            if piece.position + piece.length > one.fresh:
                edges = np.searchsorted(positions, [piece.position, piece.position + piece.length])
                start, stop = (first + int(edge) for edge in edges)
                found.append(Sample(piece, index, start, stop, one.dropped, errors.get(index)))
    return found


def pooled(planned: PlannedShard, result: CaptureResult, pool: Pool) -> CaptureResult:
    """One row for each sample that has some, the mean of them or the last, under the label of its last."""
    having = [one for one in samples_of(planned, result.labels, {}) if one.stop > one.start]
    last = torch.tensor([one.stop - 1 for one in having], dtype=torch.long)
    tensors = {key: rows[last] if pool == "last" else _means(rows, having) for key, rows in result.tensors.items()}
    return replace(result, labels=result.labels.take(last.numpy()), tensors=tensors if having else {})


def _means(rows: Tensor, samples: Sequence[Sample]) -> Tensor:
    """The mean of each sample's rows, in float32, back in their type."""
    out = rows.new_empty((len(samples), rows.shape[1]))
    for place, one in enumerate(samples):
        out[place] = rows[one.start : one.stop].float().mean(0).to(rows.dtype)
    return out


def stored_of(result: CaptureResult, probes: Sequence[Probe]) -> Stored:
    """What a shard holds of a capture: its rows, or with probes their scores."""
    errors = {sample: " ".join(str(error).split()) for sample, error in result.errors.items()}
    if probes:
        return Stored(result.labels, {SCORES: _scores(result, probes)}, errors)
    return Stored(result.labels, {f"{site}.{layer}": rows for (site, layer), rows in result.tensors.items()}, errors)


def write_shard(path: Path, result: CaptureResult, stored: Stored, probes: Sequence[Probe]) -> None:
    """Write a shard, atomically: a capture file, or with probes their scores beside the same labels."""
    if not probes:
        capture_file.save(result, path)
        return
    about = {"format": 1, "probes": [one.described() for one in probes], "errors": stored.errors}
    write(path, {**stored.tensors, **capture_file.label_tensors(result)}, {_KEY: about})


def _scores(result: CaptureResult, probes: Sequence[Probe]) -> Tensor:
    """What each probe makes of each row, `[rows, probes]`, float32."""
    if not result.tensors:
        return torch.empty((0, len(probes)))
    return torch.stack([one.score(result.rows(one.layer, one.site)) for one in probes], dim=1)


def read_shard(path: Path) -> Stored:
    """A shard as it was written; FileFormatError for a file that is none."""
    with opened(path, _WHAT) as file:
        names = set(file.keys())
        if "labels.sample" not in names:
            raise FileFormatError(f"{path} is not {_WHAT}: it has no labels")
        about = read_json(file, _KEY if SCORES in names else capture_file.KEY, path) or {}
        tensors = {name: owned(file, name) for name in sorted(names) if not name.startswith(("labels.", "prompts."))}
        columns = {name: owned(file, f"labels.{name}").numpy() for name in capture_file.LABELS}
    sample, choice, position, token_id = (columns[name] for name in capture_file.LABELS[:-1])
    labels = Labels(sample, choice, position, token_id, columns["phase"] == 1)
    return Stored(labels, tensors, {int(sample): words for sample, words in about.get("errors", {}).items()})


def nonfinite_of(stored: Stored) -> Any:
    """How many values of each row are NaN or infinite, over all tensors, `[rows]`."""
    count = np.zeros(len(stored.labels), dtype=np.int64)
    for tensor in stored.tensors.values():
        if tensor.is_floating_point():
            # a sum is finite only where all of its terms are: the first look, a tenth of the time of one at all values
            sums = tensor.sum(1, dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
            odd = (~torch.isfinite(sums)).nonzero()[:, 0]
            count[odd.numpy()] += (~torch.isfinite(tensor[odd])).sum(1).numpy()
    return count
