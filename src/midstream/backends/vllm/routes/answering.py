"""What is added to the answer of a completion that asked for something: its rows, and what was done to them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.core.binding import bind
from midstream.core.capture import CaptureSpec
from midstream.core.errors import spec_error
from midstream.core.interventions import OpReceipt
from midstream.core.sites import Site, SiteLayout
from midstream.formats.activations import receipt_plain
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.held import Held
from midstream.taps.step import in_reach

from ..checks import captured
from ..requests import EngineRequest
from .engine import AsyncEngine
from .settling import Settled, Settling, Tapped
from .wishes import Asked, OwnWishes

ADDED = "midstream"
"""The field of an answer that says what was done, whatever was asked."""


@dataclass(frozen=True, eq=False)
class Wished(Tapped):
    """One completion that asks for something, whose own id for its rows the request has."""

    asked: Asked

    @property
    def tapped(self) -> bool:
        """Whether taps have anything to do with it."""
        return self.asked.capture is not None or self.asked.steering is not None


class Answering:
    """Of one engine. dtype: what its model computes in."""

    def __init__(self, engine: AsyncEngine, held: Held, registry: ArtifactRegistry, dtype: torch.dtype) -> None:
        self.engine, self.held, self.registry = engine, held, registry
        self._dtype = dtype
        self._settling = Settling(engine, dtype)

    # --- on the way in

    def begin(self, asked: Asked) -> Wished:
        """Check against the model what is asked; SpecError names what is wrong."""
        facts, own, steering = self.engine.facts, asked.own, asked.steering
        layouts = {} if asked.capture is None else captured(asked.capture, facts)
        request = EngineRequest(
            id=secrets.token_hex(16),
            prompt_len=own.prompt_len or 0,
            capture=asked.capture,
            steering=steering,
            decided=own.decided,
        )
        if steering is None:
            return Wished(request, (), layouts, asked)
        steering.canonical_json()
        return Wished(request, bind(steering, facts.layouts, facts.refused, self.registry.get), layouts, asked)

    def check(self, wishes: EngineRequest, prompt: Sequence[int], max_tokens: int) -> None:
        """What can be said once a prompt's tokens are there: SpecError for a capture that is too large to hold."""
        if wishes.prompt_len > len(prompt):
            message = f"is {wishes.prompt_len}, of a prompt of {len(prompt)} tokens"
            raise spec_error("E_BAD_PARAM", f"{OwnWishes.root}.prompt_len", message)
        if (capture := wishes.capture) is None:
            return
        count = in_reach(capture.select, prompt, wishes.prompt_len or len(prompt), max(max_tokens, 1))
        size = self._row_bytes(capture, captured(capture, self.engine.facts))
        if count * size > self.held.max_bytes:
            message = f"{count} rows of {size:,} bytes; this server holds {self.held.max_bytes:,} bytes, "
            raise spec_error("E_BAD_PARAM", "capture", f"{message}or {self.held.max_bytes // size} such rows")

    # --- on the way out

    async def finish(self, wished: Wished, prompt: Sequence[int], generated: Sequence[int]) -> dict[str, Any]:
        """The fields of an answer whose tokens are known. CaptureError: a row did not come, or was not steered."""
        if not wished.tapped:
            return self._added(0, (), {})
        async with self._settling.settled(wished, prompt, generated) as settled:
            added = self._added(settled.cached, settled.steering, settled.decided)
            if wished.asked.capture is not None:
                added["activations"] = await self._activations(wished, settled)
            return added

    def _added(self, cached: int, steering: Sequence[OpReceipt], decided: Mapping[str, bool]) -> dict[str, Any]:
        return {
            ADDED: {
                "model_fingerprint": self.engine.facts.fingerprint,
                "cached": cached,
                "steering": [receipt_plain(one) for one in steering],
                "decided": decided,
            }
        }

    async def _activations(self, wished: Wished, settled: Settled) -> dict[str, Any]:
        """What was captured, in the form and by the way that was asked for; room is taken before it is made."""
        asked = wished.asked
        assert asked.capture is not None
        room = len(settled.parts[0].position) * self._row_bytes(asked.capture, wished.layouts)
        await self.held.take(room)
        kept = False
        try:
            found = await self._settling.activations(wished, settled)
            handles: list[str] | None = None
            if asked.binary:
                handles = await self.held.keep([stack.tensor for stack in found.stacks], room)
                kept = True
            return await asyncio.to_thread(found.residual if asked.residual else found.plain, handles)
        finally:
            if not kept:
                await self.held.give_up(room)

    def _row_bytes(self, capture: CaptureSpec, layouts: Mapping[Site, Mapping[int, SiteLayout]]) -> int:
        """What a row takes, over all sites and layers."""
        kind = getattr(torch, capture.dtype) if capture.dtype else self._dtype
        return sum(layout.width for of in layouts.values() for layout in of.values()) * kind.itemsize

    def give_up(self, wished: Wished) -> None:
        """Nobody waits for a request any more."""
        if wished.tapped:
            self.engine.release(wished.request.id)
