"""What a session generates from and scores: items, and the entries that steer or shape one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import spec_error
from .interventions import InterventionSpec
from .prompts import PreparedPrompt


@dataclass(frozen=True)
class InterventionEntry:
    """A spec that acts on the item's rows."""

    spec: InterventionSpec


@dataclass(frozen=True)
class HookEntry:
    """Plain PyTorch hooks for the item's passes, in process: kind → `{"module": …, "hook_func": …}`, in order.

    Kinds: `pre` (called with args and kwargs), `forward` (with kwargs, and the output), `backward`.
    """

    hooks: Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class ConstraintEntry:
    """A constraint for one item: as `GenerationParams.constraint`."""

    constraint: dict[str, Any]


@dataclass(frozen=True)
class StackEntry:
    """A caller's own logits processors and stopping criteria, in process, as transformers calls them.

    They see one sequence at a time: ids `[1, tokens]` and scores `[1, vocabulary]`; with `extra`, what the model's own
    `generate` shows them.
    """

    logits_processors: Sequence[Callable[..., Any]] = ()
    stopping_criteria: Sequence[Callable[..., Any]] = ()


StateEntry = InterventionEntry | HookEntry
OutputEntry = ConstraintEntry | StackEntry


@dataclass(frozen=True)
class GenerationItem:
    """One prompt to go on from, what acts on its rows, what shapes its output, and its own seed, which samples."""

    prompt: PreparedPrompt
    state_entries: Sequence[StateEntry] = ()
    output_entries: Sequence[OutputEntry] = ()
    seed: int | None = None


@dataclass(frozen=True)
class ScoringItem:
    """One prompt and the ids of a reference after it, whose log-probabilities are asked for."""

    prompt: PreparedPrompt
    ref_output_ids: Sequence[int] = field(default_factory=tuple[int, ...])
    state_entries: Sequence[StateEntry] = ()
    output_entries: Sequence[OutputEntry] = ()


def specs_of(entries: Sequence[StateEntry]) -> InterventionSpec | None:
    """The interventions among an item's entries, as one spec in their order."""
    specs = [entry.spec for entry in entries if isinstance(entry, InterventionEntry)]
    if not specs:
        return None
    return InterventionSpec(ops=tuple(op for spec in specs for op in spec.ops))


def check_references(items: Sequence[ScoringItem]) -> int:
    """The one length of all references; E_BAD_PARAM names the first that differs."""
    lengths = [len(item.ref_output_ids) for item in items]
    for index, length in enumerate(lengths):
        if length != lengths[0]:
            message = f"reference {index} has {length} tokens and reference 0 has {lengths[0]}: score them apart"
            raise spec_error("E_BAD_PARAM", "references", message)
    return lengths[0]
