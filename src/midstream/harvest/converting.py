"""A harvest as others take it: a data set of `datasets`, hidden-states files of vLLM, and a harvest made of those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midstream.core.capture import CaptureReceipt, CaptureSpec, Labels
from midstream.core.errors import MidstreamError, PromptError, spec_error
from midstream.core.result import CaptureResult
from midstream.formats import hidden_states_file

from .identity import named
from .places import hash_of, place_of, shard_file
from .planning import PlannedShard
from .reading import Harvest
from .reading import open as open_harvest
from .sequences import Cursor, Document, Piece, Sequenced
from .spec import SHARD_BYTES
from .writing import Writer


def to_dataset(harvest: Harvest, layer: int | None = None, site: str | None = None) -> Any:
    """A `datasets.Dataset` with one line for each sample: id, record, labels (JSON), positions, token_ids and rows.

    rows are `[rows, width]` of one layer, or with None the scores of probes; bfloat16, which Arrow has not, as
    float32. MidstreamError where `datasets` is not installed.
    """
    try:
        from datasets import Array2D, Dataset, Features, Sequence, Value
    except ImportError:
        raise MidstreamError("this needs datasets; type: pip install datasets") from None
    column = harvest.scores if layer is None else harvest.rows(layer, site)
    dtype = "float32" if column.dtype == torch.bfloat16 else str(column.dtype).removeprefix("torch.")
    features = Features(
        {
            "id": Value("string"),
            "record": Value("int64"),
            "labels": Value("string"),
            "positions": Sequence(Value("int64")),
            "token_ids": Sequence(Value("int64")),
            "rows": Array2D((None, column.shape[1]), dtype),
        }
    )

    def lines(where: str) -> Iterator[dict[str, Any]]:
        # opened again: what is handed over is hashed and may go to another process
        of = open_harvest(where)
        rows = of.scores if layer is None else of.rows(layer, site)
        positions, token_ids = of.row_labels("position"), of.row_labels("token_id")
        for one, (start, stop) in zip(of.samples.to_pylist(), of.spans.tolist(), strict=True):
            kept = rows[start:stop]
            yield {
                **{name: one[name] for name in ("id", "record", "labels")},
                "positions": positions[start:stop],
                "token_ids": token_ids[start:stop],
                "rows": (kept.float() if kept.dtype == torch.bfloat16 else kept).numpy(),
            }

    return Dataset.from_generator(lines, features=features, gen_kwargs={"where": str(harvest.place)})


def to_hidden_states(harvest: Harvest, directory: str | PathLike[str]) -> list[Path]:
    """One of vLLM's hidden-states files for each sequence, as `CaptureResult.save_hidden_states` writes them.

    E_SITE or E_SELECTION, before anything is written, where the harvest has not every row of the residual stream.
    """
    spec = harvest.manifest.identity["spec"]
    if harvest.probes or spec.get("pool") or harvest.capture.select is not None:
        raise spec_error(
            "E_SELECTION", "harvest", "a hidden-states file holds every row, and this harvest some of them"
        )
    written: list[Path] = []
    first = 0
    for place in range(len(harvest.manifest.shards)):
        written += hidden_states_file.save_capture(harvest.shard(place), directory, first=first)
        first += harvest.manifest.shards[place].counts.sequences
    return written


def from_hidden_states(
    files: str | PathLike[str] | Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    *,
    layer_ids: Sequence[int] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Harvest:
    """A harvest made of hidden-states files, or of all in a directory by name; each is a sample, with its name as id.

    layer_ids: vLLM's aux ids, for files that do not say theirs. Run again, it goes on. PromptError where there is no
    file, or two are of different layers; what is no such file is refused by name.
    """
    paths = sorted(Path(files).glob("*.safetensors")) if isinstance(files, str | PathLike) else [*map(Path, files)]
    if not paths:
        raise PromptError(f"{files} holds no hidden-states files")
    place = place_of(out)
    with place.locked():
        first = _capture(paths[0], layer_ids)
        writer = Writer.on(place, _identity(paths, first))
        bad, known = writer.begin(trust=False), {one.file for one in writer.manifest.shards}
        for index, start, stop in _groups(paths, shard_bytes):
            whole = shard_file(index) in known and shard_file(index) not in bad
            if not whole or not writer.complete:
                planned, result = _shard(paths, index, start, stop, layer_ids, first)
                writer.write(planned, None if whole else result)
        writer.finish()
    return open_harvest(out)


def _capture(path: Path, layer_ids: Sequence[int] | None) -> CaptureResult:
    found = hidden_states_file.as_capture(hidden_states_file.read(path), layer_ids)
    if not found.labelled:
        raise MidstreamError(f"{path} has no token ids, and a harvest's rows have labels")
    return found


def _identity(paths: Sequence[Path], first: CaptureResult) -> dict[str, Any]:
    digest = sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(f"{path.stem} {hash_of(file)}\n".encode())
    return {
        "model": {"name": named(first.model_ref), "fingerprint": first.model_fingerprint},
        "spec": {"capture": CaptureSpec(sites=first.sites, layers=first.layer_ids).canonical()},
        "probes": [],
        "input": {"records": len(paths), "sha256": f"sha256:{digest.hexdigest()}"},
        "execution": {"backend": "hidden-states files"},
    }


def _groups(paths: Sequence[Path], shard_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Shards: their number, and the files from one to before another that they are made of."""
    index = start = size = 0
    for place, path in enumerate(paths):
        size += path.stat().st_size
        if size >= shard_bytes or place == len(paths) - 1:
            yield index, start, place + 1
            index, start, size = index + 1, place + 1, 0


def _shard(
    paths: Sequence[Path], index: int, start: int, stop: int, layer_ids: Sequence[int] | None, first: CaptureResult
) -> tuple[PlannedShard, CaptureResult]:
    """Some files as one shard, and its sequences."""
    results = [_capture(path, layer_ids) for path in paths[start:stop]]
    sequences: list[Sequenced] = []
    for place, (path, one) in enumerate(zip(paths[start:stop], results, strict=True), start):
        if [*one.tensors] != [*first.tensors] or one.layouts != first.layouts:
            have, want = ([f"{site}.{layer}" for site, layer in of.tensors] for of in (one, first))
            raise PromptError(f"{path} holds {', '.join(have)}; {paths[0]} holds {', '.join(want)}")
        ids = tuple(one.labels.token_id.tolist())
        if not np.array_equal(one.labels.position, np.arange(len(ids))):
            raise PromptError(f"{path} holds some rows of its sequence, and a harvest of such files is of whole ones")
        document = Document(place, ids, str(path), {"id": path.stem})
        sequences.append(Sequenced(ids, (Piece(document, 0, 0, len(ids)),)))
    return PlannedShard(index, tuple(sequences), Cursor(stop)), _joined(results)


def _joined(results: Sequence[CaptureResult]) -> CaptureResult:
    """Captures of one sample each as one of all."""
    first = results[0]
    columns = [
        np.concatenate([getattr(one.labels, name) for one in results])
        for name in ("choice", "position", "token_id", "generated")
    ]
    sample = np.repeat(np.arange(len(results)), [len(one.labels) for one in results])
    return replace(
        first,
        labels=Labels(sample, *columns),
        tensors={key: torch.cat([one.tensors[key] for one in results]) for key in first.tensors},
        outputs=[one.outputs[0] for one in results],
        receipt=CaptureReceipt.total([one.receipt for one in results]),
        model_ref=named(first.model_ref),
    )
