"""Job: one item of a call, ready for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.core.binding import BoundOp
from midstream.core.interventions import InterventionSpec
from midstream.core.prompts import PreparedPrompt


@dataclass(frozen=True, eq=False)
class Rendered:
    """What vLLM's processor made of a prompt: its `EngineInput`, whose ids are the prompt's."""

    engine_input: dict[str, Any]

    @property
    def content(self) -> str:
        """What the images are, beside the ids: rows and cache blocks of other images are not these."""
        return repr(sorted((name, tuple(of)) for name, of in self.engine_input["mm_hashes"].items()))


@dataclass(frozen=True, eq=False)
class Job:
    """One item, ready. seeds: one per choice. ops: its spec, bound to the model. rendered: of a prompt with images."""

    prompt: PreparedPrompt
    spec: InterventionSpec | None
    ops: tuple[BoundOp, ...]
    seeds: tuple[int | None, ...]
    constraint: dict[str, Any] | None = None
    reference: tuple[int, ...] = ()
    rendered: Rendered | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """What the engine takes as its prompt."""
        return (*self.prompt.token_ids, *self.reference)

    @property
    def salt(self) -> str | None:
        """What tells its rows from those of the same ids: the caller's salt, and images."""
        return self.prompt.cache_salt if self.rendered is None else f"{self.prompt.cache_salt}:{self.rendered.content}"

    @property
    def engine_prompt(self) -> dict[str, Any]:
        """What is submitted."""
        base: dict[str, Any] = {} if self.rendered is None else self.rendered.engine_input
        salt = {} if self.prompt.cache_salt is None else {"cache_salt": self.prompt.cache_salt}
        return {**base, "prompt_token_ids": list(self.ids), **salt}
