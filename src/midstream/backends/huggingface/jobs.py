"""Items made ready for one model: specs bound to it, grammars compiled, seeds derived; all before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from midstream.core.binding import BoundOp, bind
from midstream.core.errors import spec_error
from midstream.core.generation import GenerationParams
from midstream.core.interventions import IN_PROCESS, InterventionSpec
from midstream.core.items import (
    ConstraintEntry,
    GenerationItem,
    HookEntry,
    InterventionEntry,
    OutputEntry,
    ScoringItem,
    StackEntry,
    item_seeds,
    one_constraint,
    specs_of,
    steering_path,
)
from midstream.core.prompts import PreparedPrompt
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.locate import TapMap
from midstream.taps.step import whole_sequence

from .entries import checked_hooks
from .shaping import Shaping
from .structured import Constrainer


@dataclass(frozen=True, eq=False)
class Job:
    """One item, ready. seeds: one per choice. shaping: makes what shapes one sequence of it."""

    prompt: PreparedPrompt
    ops: tuple[BoundOp, ...]
    hooks: tuple[HookEntry, ...]
    seeds: tuple[int | None, ...]
    shaping: Callable[[], Shaping]

    @property
    def alone(self) -> bool:
        """Whether it cannot share a pass with others."""
        return bool(self.hooks or self.prompt.multi_modal_data)


@dataclass(frozen=True)
class Workshop:
    """What items are made ready with: the model's taps, the artifacts at hand, and its grammars."""

    taps: TapMap
    registry: ArtifactRegistry
    constrainer: Callable[[], Constrainer]

    def generation_jobs(self, items: Sequence[GenerationItem], params: GenerationParams, call: int) -> list[Job]:
        """Jobs of items, in order; SpecError for what the model cannot do, with the item's path."""
        jobs: list[Job] = []
        for index, (item, seeds) in enumerate(zip(items, item_seeds(items, params, call), strict=True)):
            jobs.append(
                Job(
                    item.prompt,
                    self.ops(specs_of(item.state_entries), item.prompt, steering_path(index, len(items))),
                    self._hooks(item),
                    seeds,
                    self._shaping(item.output_entries, params),
                )
            )
        return jobs

    def scoring_jobs(self, items: Sequence[ScoringItem]) -> list[Job]:
        """Jobs of items to score."""
        jobs: list[Job] = []
        for index, item in enumerate(items):
            ids = (*item.prompt.token_ids, *item.ref_output_ids)
            ops = self.ops(specs_of(item.state_entries), item.prompt, steering_path(index, len(items)), ids)
            shaping = self._shaping(item.output_entries, GenerationParams())
            jobs.append(Job(item.prompt, ops, self._hooks(item), (None,), shaping))
        return jobs

    def ops(
        self, spec: InterventionSpec | None, prompt: PreparedPrompt, path: str, ids: Sequence[int] = ()
    ) -> tuple[BoundOp, ...]:
        """A spec bound to the model for one prompt (`ids`: the whole sequence, where it is known)."""
        if spec is None:
            return ()
        if not any(op.kind in IN_PROCESS for op in spec.ops):
            spec.canonical_json()  # refuses what would be too large for any other backend
        spec = spec.lowered(whole_sequence(ids or prompt.token_ids, len(prompt.token_ids)), path)
        return bind(spec, self.taps.layouts, self.taps.refused, self.registry.get, path)

    def _hooks(self, item: GenerationItem | ScoringItem) -> tuple[HookEntry, ...]:
        """The item's plain hooks, which can all be registered."""
        hooks = hooks_of(item)
        checked_hooks(self.taps.anatomy.model, hooks)
        return hooks

    def _shaping(self, entries: Sequence[OutputEntry], params: GenerationParams) -> Callable[[], Shaping]:
        for entry in entries:
            if not isinstance(entry, ConstraintEntry | StackEntry):  # pyright: ignore[reportUnnecessaryIsInstance]
                message = f"no output entry {type(entry).__name__}; there are: ConstraintEntry, StackEntry"
                raise spec_error("E_UNKNOWN_KIND", "output_entries", message)
        stacks = [entry for entry in entries if isinstance(entry, StackEntry)]
        constraint = one_constraint(entries, params)
        processors = [one for entry in stacks for one in entry.logits_processors]
        criteria = [one for entry in stacks for one in entry.stopping_criteria]
        if constraint is None:
            return lambda: Shaping(processors, criteria)
        constrainer = self.constrainer()
        compiled = constrainer.compile(constraint)
        return lambda: Shaping(processors, criteria, constrainer.matcher(compiled))


def hooks_of(item: GenerationItem | ScoringItem) -> tuple[HookEntry, ...]:
    """The plain hooks among an item's entries; E_UNKNOWN_KIND for an entry of another kind."""
    for entry in item.state_entries:
        if not isinstance(entry, InterventionEntry | HookEntry):  # pyright: ignore[reportUnnecessaryIsInstance]
            message = f"no state entry {type(entry).__name__}; there are: InterventionEntry, HookEntry"
            raise spec_error("E_UNKNOWN_KIND", "state_entries", message)
    return tuple(entry for entry in item.state_entries if isinstance(entry, HookEntry))
