"""Job: one item of a call, ready for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.core.binding import BoundOp
from midstream.core.interventions import InterventionSpec
from midstream.core.prompts import PreparedPrompt


@dataclass(frozen=True, eq=False)
class Job:
    """One item, ready. seeds: one per choice. ops: its spec, bound to the model."""

    prompt: PreparedPrompt
    spec: InterventionSpec | None
    ops: tuple[BoundOp, ...]
    seeds: tuple[int | None, ...]
    constraint: dict[str, Any] | None = None
    reference: tuple[int, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """What the engine takes as its prompt."""
        return (*self.prompt.token_ids, *self.reference)

    @property
    def engine_prompt(self) -> dict[str, Any]:
        """What is submitted."""
        salt = {} if self.prompt.cache_salt is None else {"cache_salt": self.prompt.cache_salt}
        return {"prompt_token_ids": list(self.ids), **salt}
