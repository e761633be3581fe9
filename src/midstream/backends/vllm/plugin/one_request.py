"""One request that has wishes, as a worker sees it, and what is said of it in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.core.binding import BoundOp
from midstream.core.errors import MidstreamError, SpecError
from midstream.core.interventions import OpReceipt
from midstream.core.sites import Site

from ..requests import EngineRequest


@dataclass(eq=False)
class Running:
    """One request. engine_id: vLLM's own. cached: how many of its rows came from the prefix cache at its start."""

    number: int
    engine_id: str
    wishes: EngineRequest
    ops: tuple[BoundOp, ...]
    prompt: Sequence[int]
    cached: int
    taped: bool
    error: MidstreamError | None = None

    def plain(self, tally: Sequence[OpReceipt], decided: Mapping[int, bool]) -> dict[str, Any]:
        """How it went, as JSON has it."""
        return {
            "id": self.wishes.id,
            "cached": self.cached,
            "steering": [_plain_receipt(receipt) for receipt in tally],
            "decided": {str(place): one for place, one in decided.items()},
            "error": None if self.error is None else plain_error(self.error),
        }


@dataclass(frozen=True)
class Wanted:
    """What a step is asked for: sites, on how many rows, and whether its ops are plain adds."""

    sites: set[Site]
    rows: int
    plain: bool


def plain_error(error: MidstreamError) -> dict[str, Any]:
    """An error as JSON has it."""
    if isinstance(error, SpecError):
        return {"code": error.code, "path": error.path, "message": error.message}
    return {"message": str(error)}


def _plain_receipt(receipt: OpReceipt) -> list[Any]:
    """What an op did at a layer: op, kind, site, layer, rows, how much of their norm, and why it did nothing."""
    return [
        receipt.op, receipt.kind, receipt.site, receipt.layer, receipt.computed, receipt.relative, receipt.skipped,
    ]  # fmt: skip
