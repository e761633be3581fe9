"""Reading a harvest: rows by sample, by shard, or all of one layer; mapped into memory, not loaded."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.core.capture import CaptureSpec
from midstream.core.errors import FileFormatError, MidstreamError, choices, spec_error
from midstream.core.narrow import is_int
from midstream.core.result import CaptureResult
from midstream.formats import capture_file
from midstream.formats.tensor_file import DTYPES

from .manifest import MANIFEST, Counts, Manifest, read_manifest
from .places import SAMPLES, Place, damaged, place_of, shard_file
from .shards import SCORES

if TYPE_CHECKING:
    import pyarrow as pa

    from .streaming import RowStream

_OPEN: Final = 256
"""Shards that are mapped at once."""


class MappedFile:
    """The tensors of one safetensors file, as views of the file."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                found: dict[str, Any] = json.loads(file.read(size))
                found.pop("__metadata__", None)
                self._header = dict(sorted(found.items(), key=lambda item: item[1]["data_offsets"]))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # what is written stays in memory
            self._start = 8 + size
            end = self._start + max((about["data_offsets"][1] for about in self._header.values()), default=0)
        except (ValueError, KeyError, OverflowError) as error:
            raise FileFormatError(f"{path} is damaged: {' '.join(str(error).split())}") from None
        if end != len(self._map):
            raise FileFormatError(f"{path} is damaged: it has {len(self._map):,} bytes, and {end:,} are due")

    @property
    def names(self) -> list[str]:
        """The tensors' names, in the order of their bytes."""
        return list(self._header)

    def tensor(self, name: str) -> Tensor:
        """One tensor, without reading it."""
        about = self._header[name]
        dtype, shape = DTYPES[about["dtype"]], about["shape"]
        start, stop = about["data_offsets"]
        if start == stop:
            return torch.empty(shape, dtype=dtype)
        count = (stop - start) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._start + start).view(shape)


@dataclass(frozen=True, eq=False)
class Column:
    """One tensor of every shard as if it were one, `[rows, width]`: sliced and indexed, and read only then.

    starts: the first row of each shard, and at the end the number of all, `[shards + 1]`.
    """

    harvest: Harvest
    name: str
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def _like(self) -> Tensor:
        for place in range(len(self.starts) - 1):
            if self.starts[place] < self.starts[place + 1]:
                return self._shard(place)[:0]
        return torch.empty((0, 0))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        return len(self), self._like.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """As it is stored."""
        return self._like.dtype

    def _shard(self, place: int) -> Tensor:
        return self.harvest.mapped(place).tensor(self.name)

    def __getitem__(self, rows: slice | int | Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Rows as an ordinary tensor: `[rows, width]`, and `[width]` for one number."""
        if is_int(rows):
            return self[range(len(self))[rows : rows + 1 or None]][0]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._between(start, max(start, stop))
            rows = range(start, stop, step)
        return self.take(np.asarray(rows, dtype=np.int64))

    def _between(self, start: int, stop: int) -> Tensor:
        first, last = np.searchsorted(self.starts, [start, stop], side="right") - 1
        parts = [
            self._shard(place)[max(start - int(self.starts[place]), 0) : stop - int(self.starts[place])]
            for place in range(int(first), min(int(last), len(self.starts) - 2) + 1)
            if self.starts[place] < self.starts[place + 1] and self.starts[place] < stop
        ]
        return torch.cat(parts) if parts else self._like.clone()

    def take(self, rows: NDArray[np.int64]) -> Tensor:
        """Rows by number, in that order; IndexError for one that is not there."""
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"there are {len(self):,} rows, and one of those asked for is not among them")
        out = self._like.new_empty((len(rows), self.shape[1]))
        places = np.searchsorted(self.starts, rows, side="right") - 1
        for place in np.unique(places):
            at = np.flatnonzero(places == place)
            index = torch.from_numpy(rows[at] - self.starts[place])
            out[torch.from_numpy(at)] = self._shard(int(place)).index_select(0, index)
        return out

    def numpy(self) -> NDArray[Any]:
        """All rows; bfloat16, which NumPy has not, as float32."""
        rows = self[:]
        return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()


class Harvest:
    """A harvest, open for reading. manifest: what stands in it. complete: whether all of it is there.

    >>> from midstream import harvest
    >>> with_rows = harvest.open("acts/")                                     # doctest: +SKIP
    >>> with_rows.rows(12)[:4096].shape                                       # doctest: +SKIP
    torch.Size([4096, 576])
    """

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self.place, self.manifest = place, manifest
        self.mapped = lru_cache(_OPEN)(self._mapped)

    def __reduce__(self) -> Any:
        """Opened again in another process, as a worker of a DataLoader may be."""
        return open, (str(self.place),)

    def __len__(self) -> int:
        """The number of samples: documents, or parts of them."""
        return self.counts.samples

    def __repr__(self) -> str:
        counts = self.counts
        return f"Harvest({str(self.place)!r}: {counts.samples:,} samples, {counts.rows:,} rows)"

    @property
    def complete(self) -> bool:
        """Whether the run that made it has ended."""
        return self.manifest.samples is not None

    @cached_property
    def counts(self) -> Counts:
        """Of samples, rows, tokens and what was noticed, over all shards."""
        return self.manifest.counts

    @cached_property
    def capture(self) -> CaptureSpec:
        """What was captured."""
        return CaptureSpec.of(self.manifest.identity["spec"]["capture"])

    @property
    def probes(self) -> list[Mapping[str, Any]]:
        """The probes whose scores are stored in place of rows, in the order of their columns; none for rows."""
        return self.manifest.identity["probes"]

    def _mapped(self, place: int) -> MappedFile:
        return MappedFile(self.place.fetch(shard_file(place)))

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum([one.counts.rows for one in self.manifest.shards])]).astype(np.int64)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of what is stored for each row: `<site>.<layer>`, or `scores`."""
        if self.probes:
            return (SCORES,)
        for place, one in enumerate(self.manifest.shards):
            if one.counts.rows:
                header = self.mapped(place)
                return tuple(name for name in header.names if not name.startswith(("labels.", "prompts.")))
        return ()

    def rows(self, layer: int, site: str | None = None) -> Column:
        """The rows of one layer over all shards, in the order of the input. E_SITE, E_LAYER_RANGE: there are none."""
        sites = self.capture.sites
        if self.probes:
            raise spec_error(
                "E_SITE", "site", "this harvest holds scores of probes, and no rows: harvest.scores has them"
            )
        if site is None and len(sites) > 1:
            raise spec_error("E_SITE", "site", f"which site? This harvest has: {choices(list(sites))}")
        name = f"{site or next(iter(sites))}.{layer}"
        if self.counts.rows and name not in self.columns:
            raise spec_error("E_LAYER_RANGE", "layer", f"no {name} in this harvest; there are: {choices(self.columns)}")
        return Column(self, name, self._starts)

    @property
    def scores(self) -> Column:
        """The scores of the probes, `[rows, probes]`."""
        if not self.probes:
            raise spec_error("E_SITE", "site", "this harvest holds rows, and no scores: harvest.rows(layer) has them")
        return Column(self, SCORES, self._starts)

    def shard(self, place: int) -> CaptureResult:
        """One shard as a capture of its sequences; scores of probes are none."""
        return capture_file.load(self.place.fetch(shard_file(place)))

    @cached_property
    def samples(self) -> pa.Table:
        """The table of samples (samples.SCHEMA), in the order of the input; MidstreamError while there is none."""
        if not self.complete:
            raise MidstreamError(f"{self.place} is not complete: run the same harvest again, which goes on with it")
        from pyarrow import parquet

        return parquet.read_table(self.place.fetch(SAMPLES), memory_map=True)

    def sample(self, index: int) -> dict[str, Tensor]:
        """The rows of one sample by name of column, `[rows, width]`; IndexError where there is no such sample."""
        start, stop = self.span(index)
        return {name: Column(self, name, self._starts)[start:stop] for name in self.columns}

    def labels(self, index: int) -> dict[str, Any]:
        """What the record of a sample held beside its prompt."""
        found = self.samples.slice(index, 1).to_pylist()[0]
        return json.loads(found["labels"]) | ({} if found["id"] is None else {"id": found["id"]})

    def span(self, index: int) -> tuple[int, int]:
        """The rows of one sample in a column: from which, and before which. IndexError: there is no such sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"no sample {index}; there are {len(self):,}")
        start, stop = self.spans[index].tolist()
        return start, stop

    @cached_property
    def spans(self) -> NDArray[np.int64]:
        """The rows of every sample in a column, `[samples, 2]`: from which, and before which."""
        shard, *ends = (self.samples.column(name).to_numpy() for name in ("shard", "row_start", "row_stop"))
        return self._starts[shard][:, None] + np.stack(ends, axis=1)

    def row_labels(self, name: str) -> NDArray[Any]:
        """One label of every row: `sample` (the sequence in its shard), `position`, `token_id` or `phase`, `[rows]`."""
        parts = [self.mapped(place).tensor(f"labels.{name}").numpy() for place in range(len(self.manifest.shards))]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def stream(self, layer: int | None = None, **options: Any) -> RowStream:
        """Its rows in shuffled batches: see RowStream. layer: None is the scores."""
        from .streaming import RowStream

        return RowStream(self, layer, **options)

    def to_dataset(self, layer: int | None = None, site: str | None = None) -> Any:
        """See converting.to_dataset."""
        from .converting import to_dataset

        return to_dataset(self, layer, site)

    def to_hidden_states(self, directory: str | PathLike[str]) -> list[Path]:
        """See converting.to_hidden_states."""
        from .converting import to_hidden_states

        return to_hidden_states(self, directory)

    def verify(self) -> list[str]:
        """The names of files that are missing or altered."""
        files = [*self.manifest.shards, *([self.manifest.samples] if self.manifest.samples else [])]
        return sorted(damaged(self.place, files, trust=False))


def open(path: str | PathLike[str]) -> Harvest:
    """The harvest in a directory, also of a run that is not complete. FileNotFoundError or FileFormatError: none."""
    place = place_of(path)
    manifest = read_manifest(place)
    if manifest is None:
        raise FileNotFoundError(f"no harvest in {place}: it has no {MANIFEST}")
    if len({one.file for one in manifest.shards}) != len(manifest.shards):
        raise FileFormatError(f"{place}/{MANIFEST} is damaged: two shards are one file")
    return Harvest(place, manifest)
