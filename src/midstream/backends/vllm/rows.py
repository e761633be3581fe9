"""Rows that workers have put down, from their segments into a recorder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import deserialize
from torch import Tensor

from midstream.core.errors import CaptureError, MidstreamError, spec_error
from midstream.taps.pages import PAGES
from midstream.taps.recorder import Recorder
from midstream.taps.segments import Column, Place, mapped
from midstream.taps.step import Ints, StepBatch

from .requests import LINES

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Collected:
    """What one worker says of some requests: a line per row, and how each request went.

    request: the place of its owner among those that were asked for.
    """

    request: Ints
    position: Ints
    token_id: Ints
    segment: Ints
    row: Ints
    overflowed: Ints
    described: Sequence[Mapping[str, Any]]
    segments: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, data: bytes) -> Collected:
        """What RunningRequests.collect wrote."""
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        columns = {name: np.frombuffer(one["data"], dtype="<i8") for name, one in deserialize(data)}
        return cls(**columns, described=json.loads(header["requests"]), segments=json.loads(header["segments"]))

    def take(self, lines: np.ndarray[Any, np.dtype[np.bool_]], owner: int | None = None) -> Collected:
        """Some lines, by mask, and the segments that they are in; owner: who owns them, if it is not who did."""
        columns = {name: getattr(self, name)[lines] for name in LINES}
        if owner is not None:
            columns["request"] = np.full(int(lines.sum()), owner, dtype=np.int64)
        used = np.unique(columns["segment"])
        return replace(self, segments=[one for one in self.segments if one["number"] in used], **columns)


def error_of(described: Mapping[str, Any]) -> MidstreamError | None:
    """Why a request failed in its worker; None where it did not."""
    found = described["error"]
    if found is None:
        return None
    if "code" in found:
        return spec_error(found["code"], found["path"], found["message"])
    return CaptureError(found["message"])


class Segmented:
    """The segments of every rank, mapped once each."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._mapped: dict[tuple[int, str], tuple[Any, dict[Place, Tensor]]] = {}

    def tensors(self, rank: int, plain: Mapping[str, Any]) -> Mapping[Place, Tensor]:
        """The tensors of a segment that a rank described."""
        key = (rank, plain["file"])
        form = (plain["capacity"], plain["columns"])
        known = self._mapped.get(key)
        if known is None or known[0] != form:
            columns = [Column.read(one) for one in plain["columns"]]
            known = (form, mapped(self._folders[rank] / plain["file"], columns, plain["capacity"]))
            self._mapped[key] = known
        return known[1]

    def forget_removed(self) -> None:
        """Let go of segments whose files are gone: mapped, they would take memory for nothing."""
        for rank, name in list(self._mapped):
            if not (self._folders[rank] / name).exists():
                del self._mapped[rank, name]

    def deliver(
        self, parts: Sequence[Collected], owners: Sequence[Owner], recorder: Recorder, reused: bool = False
    ) -> None:
        """Put the rows of requests that have ended where they belong; parts: of every rank.

        reused: they were computed for another request.
        """
        first = parts[0]
        owner = np.array([one.request for one in owners], dtype=np.int64)[first.request]
        ends = np.array([len(one.token_ids) for one in owners], dtype=np.int64)[first.request]
        prompt_len = np.array([one.prompt_len for one in owners], dtype=np.int64)[first.request]
        kept = first.position < ends  # an engine may run a step too far
        token_id = np.where(first.token_id < 0, _ids(owners, first, kept), first.token_id)
        again = np.ones(len(owner), dtype=np.bool_) if reused else None
        whole = StepBatch(0, first.row, owner, first.position, token_id, prompt_len, again)
        if len(parts) > 1:
            self._deliver_ranks(parts, whole, kept, recorder)
            return
        for plain in first.segments:
            rows = whole.take(kept & (first.segment == plain["number"]))
            if len(rows):
                tensors = self.tensors(0, plain)
                _record(recorder, replace(rows, size=plain["capacity"]), tensors)
        recorder.count_overflows(whole.take(kept), first.overflowed[kept])

    def _deliver_ranks(
        self, parts: Sequence[Collected], whole: StepBatch, kept: np.ndarray[Any, Any], recorder: Recorder
    ) -> None:
        """Rows that lie on several ranks: each rank's part of a row, side by side in the order of the ranks."""
        if not len(parts[0].row):
            return
        gathered: dict[Place, list[Tensor]] = {}
        for rank, part in enumerate(parts):
            for place, rows in self._gathered(rank, part).items():
                gathered.setdefault(place, []).append(rows)
        rows = whole.take(kept)
        step = replace(rows, size=len(whole), row=np.flatnonzero(kept))
        _record(recorder, step, {place: torch.cat(found, 1) for place, found in gathered.items()})
        overflowed = sum(part.overflowed for part in parts if len(part.overflowed))
        recorder.count_overflows(rows, np.asarray(overflowed)[kept])

    def _gathered(self, rank: int, part: Collected) -> dict[Place, Tensor]:
        """All rows of one rank, in the order of its lines."""
        found: dict[Place, Tensor] = {}
        for plain in part.segments:
            of = np.flatnonzero(part.segment == plain["number"])
            for place, tensor in self.tensors(rank, plain).items():
                if place not in found:
                    found[place] = PAGES.tensor((len(part.row), tensor.shape[1]), tensor.dtype)
                found[place][torch.as_tensor(of)] = tensor[torch.as_tensor(part.row[of])]
        return found


@dataclass(frozen=True)
class Owner:
    """Whose rows some are. request: its index in the recorder. token_ids: what it consumed."""

    request: int
    prompt_len: int
    token_ids: Sequence[int]


def _ids(owners: Sequence[Owner], part: Collected, kept: np.ndarray[Any, Any]) -> Ints:
    """The ids that were consumed at some rows, from what was generated."""
    out = np.full(len(part.position), -1, dtype=np.int64)
    for place, owner in enumerate(owners):
        of = np.flatnonzero(kept & (part.request == place))
        out[of] = np.asarray(owner.token_ids, dtype=np.int64)[part.position[of]]
    return out


def _record(recorder: Recorder, step: StepBatch, tensors: Mapping[Place, Tensor]) -> None:
    recorder.begin(step, _CPU)
    for (site, layer), values in tensors.items():
        recorder.record(site, layer, values)
    recorder.end()
