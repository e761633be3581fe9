"""manifest.json: what a harvest is of, and which of its shards are done. No time, host or path stands in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from midstream.core.errors import FileFormatError, MidstreamError, SpecError
from midstream.core.narrow import is_mapping
from midstream.core.wire import Int, Wire
from midstream.formats.atomic import replacing

if TYPE_CHECKING:
    from .places import Place

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"


class Counts(Wire):
    """What is in a shard, or in all. sequences: what the model read. samples: documents, or the parts of them.

    tokens: that the model read. rows: that are kept. split: samples that do not begin their document. truncated:
    documents that were cut. dropped: their tokens that were left out. failed: samples without rows. nonfinite: values
    that are NaN or infinite. overflowed: those of them that a narrower storage type made so.
    """

    sequences: Int = 0
    samples: Int = 0
    tokens: Int = 0
    rows: Int = 0
    split: Int = 0
    truncated: Int = 0
    dropped: Int = 0
    failed: Int = 0
    nonfinite: Int = 0
    overflowed: Int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in Counts.model_fields})


class FileEntry(Wire):
    """One whole file of the directory."""

    file: str
    bytes: Int
    sha256: str


class ShardEntry(FileEntry):
    """One finished shard. next: the record, and its token, with which the shard after it begins.

    part: its part of the sample table, until that is complete.
    """

    next: tuple[Int, Int]
    counts: Counts
    part: FileEntry | None = None


class Manifest(Wire):
    """What stands in manifest.json. identity: all that the shards' bytes follow from."""

    root: ClassVar[str] = "manifest"

    format: Int = FORMAT
    identity: dict[str, Any]
    shards: tuple[ShardEntry, ...] = ()
    samples: FileEntry | None = None
    """samples.parquet of a complete harvest; None while it is not."""

    @property
    def counts(self) -> Counts:
        """Of all shards together."""
        return sum((one.counts for one in self.shards), Counts())

    def write(self, path: Path) -> None:
        """Into its file, atomically."""
        text = json.dumps(self.model_dump(mode="json", exclude_none=True), indent=1, sort_keys=True)
        with replacing(path) as temporary:
            temporary.write_text(text + "\n")


def read_manifest(place: Place) -> Manifest | None:
    """The manifest of a harvest, None where there is none; FileFormatError for one that is damaged or newer."""
    path = f"{place}/{MANIFEST}"
    try:
        found = json.loads(place.fetch(MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is no manifest of a harvest: {' '.join(str(error).split())}") from None
    version = found.get("format") if is_mapping(found) else None
    if version != FORMAT:
        raise FileFormatError(f"{path} has the format {version!r:.40}; this midstream reads {FORMAT}")
    try:
        return Manifest.of(found)
    except SpecError as error:
        raise FileFormatError(f"{path} is damaged: {error}") from None


class OtherHarvestError(MidstreamError):
    """A directory that holds another harvest than the one that was asked for."""


def check_same(stored: Mapping[str, Any], asked: Mapping[str, Any], place: Place) -> None:
    """OtherHarvestError, naming the first differences, unless two identities are one."""
    found = list(_differences(json.loads(json.dumps(stored)), json.loads(json.dumps(asked)), ""))
    if found:
        words = "; ".join(f"{path} was {_shown(old)}, and is {_shown(new)}" for path, old, new in found[:3])
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise OtherHarvestError(f"{place} holds another harvest: {words}{more}: name another directory")


_NONE: Final = object()


def _differences(old: Any, new: Any, path: str) -> Any:
    if is_mapping(old) and is_mapping(new):
        for name in sorted({*old, *new}):
            yield from _differences(old.get(name, _NONE), new.get(name, _NONE), f"{path}.{name}" if path else name)
    elif old != new or type(old) is not type(new):
        yield path, old, new


def _shown(value: Any) -> str:
    return "not set" if value is _NONE else f"{json.dumps(value):.60}"
