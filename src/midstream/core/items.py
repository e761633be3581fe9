"""What a session generates from and scores: items, and the entries that steer or shape one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import PromptError, spec_error
from .generation import GenerationParams, choice_seed, derive_seed
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


def check_references(items: Sequence[ScoringItem], vocabulary: int) -> int:
    """The one length of all references; E_BAD_PARAM names the first that differs, PromptError ids of no token."""
    lengths = [len(item.ref_output_ids) for item in items]
    for index, length in enumerate(lengths):
        if length != lengths[0]:
            message = f"reference {index} has {length} tokens and reference 0 has {lengths[0]}: score them apart"
            raise spec_error("E_BAD_PARAM", "references", message)
        wrong = next((token for token in items[index].ref_output_ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise PromptError(f"reference {index} has token id {wrong}; the model has ids 0 to {vocabulary - 1}")
    return lengths[0]


def item_seeds(items: Sequence[GenerationItem], params: GenerationParams, call: int) -> list[tuple[int | None, ...]]:
    """The seeds of each item's choices: derived from the call's, unless an item has its own.

    >>> items = [GenerationItem(PreparedPrompt((1,)), seed=seed) for seed in (None, 7)]
    >>> item_seeds(items, GenerationParams(), call=0)
    [(None,), (7,)]
    """
    own = any(item.seed is not None for item in items)
    found: list[tuple[int | None, ...]] = []
    for index, item in enumerate(items):
        place = 0 if params.seed_scope == "dispatch" and not own else index
        found.append(
            tuple(
                derive_seed(params.seed, call, place, choice) if item.seed is None else choice_seed(item.seed, choice)
                for choice in range(params.n)
            )
        )
    return found


def steered_items(
    prompts: Sequence[PreparedPrompt], steering: Sequence[InterventionSpec | None] | None
) -> list[GenerationItem]:
    """An item for each prompt, steered by the spec in its place."""
    return [
        GenerationItem(prompt, () if spec is None else (InterventionEntry(spec),))
        for prompt, spec in zip(prompts, steering or [None] * len(prompts), strict=True)
    ]


def one_constraint(entries: Sequence[OutputEntry], params: GenerationParams) -> dict[str, Any] | None:
    """The one constraint of an item or of its call; E_CONSTRAINT for several, and where nothing may end it."""
    found = [entry.constraint for entry in entries if isinstance(entry, ConstraintEntry)]
    found += [params.constraint] if params.constraint is not None else []
    if len(found) > 1:
        raise spec_error("E_CONSTRAINT", "output_entries", f"{len(found)} constraints on one item: give one")
    if found and params.ignore_eos:
        message = "ignore_eos with a constraint: past its end nothing but EOS may come"
        raise spec_error("E_CONSTRAINT", "generation.ignore_eos", message)
    return found[0] if found else None


def check_scored(items: Sequence[ScoringItem], params: GenerationParams) -> None:
    """Refuse parameters of sampling, which a score has none of, and constraints, which a reference does not obey."""
    if (set_ := params.model_fields_set - {"extra"}) and params != GenerationParams(extra=params.extra):
        name = sorted(set_)[0]
        raise spec_error("E_UNKNOWN_KIND", f"generation.{name}", f"a score takes no {name}: it samples nothing")
    for index, item in enumerate(items):
        if any(isinstance(entry, ConstraintEntry) for entry in item.output_entries):
            raise spec_error("E_CONSTRAINT", f"items[{index}].output_entries", "a score takes no constraint")


def steering_path(index: int, count: int) -> str:
    """Where the spec of an item stands, for an error: of one item, `steering`."""
    return "steering" if count == 1 else f"steering[{index}]"
