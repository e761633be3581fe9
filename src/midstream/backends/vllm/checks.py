"""What is asked of an engine, checked against its model before it runs, and made ready as jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from midstream.backends.serving import ServedRequest
from midstream.core.backend import BackendCapabilities, Capability, ModelFacts
from midstream.core.binding import BoundOp, bind
from midstream.core.capture import CaptureSpec
from midstream.core.errors import PromptError, spec_error
from midstream.core.generation import GenerationParams
from midstream.core.interventions import InterventionSpec
from midstream.core.items import (
    ConstraintEntry,
    GenerationItem,
    InterventionEntry,
    OutputEntry,
    ScoringItem,
    item_seeds,
    one_constraint,
    specs_of,
    steering_path,
)
from midstream.core.prompts import PreparedPrompt
from midstream.core.sites import Site, SiteLayout, layouts_at, site_layers
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.step import whole_sequence

from .calls import Request
from .jobs import Job
from .rendering import canonical_constraint, refuse_extra


class Layouts(Protocol):
    """What an engine says of its model's sites."""

    @property
    def layouts(self) -> Mapping[Site, Mapping[int, SiteLayout]]:
        """Those that hold."""
        ...

    @property
    def refused(self) -> Mapping[Site, str]:
        """Why the others do not."""
        ...


class Known(Protocol):
    """An engine, as far as requests are checked against it."""

    @property
    def facts(self) -> Layouts:
        """What its self-test found."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has."""
        ...

    @property
    def has_tokenizer(self) -> bool:
        """Whether the engine itself can tell texts."""
        ...


def captured(capture: CaptureSpec, facts: Layouts) -> dict[Site, dict[int, SiteLayout]]:
    """What a capture is of; E_SITE and E_LAYER_RANGE for what a model has not."""
    sites = site_layers(capture.sites, capture.layers, facts.layouts, facts.refused, "capture.sites")
    return layouts_at(sites, facts.layouts)


@dataclass(frozen=True, eq=False)
class Checks:
    """Of one engine. registry: where artifacts are that a spec names."""

    engine: Known
    facts: ModelFacts
    capabilities: Callable[[], BackendCapabilities]
    registry: ArtifactRegistry

    def served(self, asked: ServedRequest) -> Request:
        """One request of a server, ready; SpecError and PromptError for what cannot be."""
        ids, params = asked.prompt.token_ids, asked.params
        if asked.prompt.multi_modal_data:
            raise PromptError("prompt 0: images and the like are not taken here: lm takes them")
        self.generation(params)
        self.prompts([asked.prompt], params.max_tokens)
        length = asked.prompt_len or len(ids)
        if length > len(ids):
            raise spec_error("E_BAD_PARAM", "prompt_len", f"is {length}, of a prompt of {len(ids)} tokens")
        if asked.capture is not None:
            captured(asked.capture, self.engine.facts)
        entries = () if asked.steering is None else (InterventionEntry(asked.steering),)
        item = GenerationItem(replace(asked.prompt, token_ids=ids[:length]), entries, seed=params.seed)
        spec, ops = self.spec(item, 0, 1, ids)
        (seeds,) = item_seeds([item], params, 0)
        job = Job(item.prompt, spec, ops, seeds, self.constraint((), params), ids[length:])
        return Request(job, 0, 0, asked.capture)

    def generation(self, params: GenerationParams) -> None:
        """SpecError for parameters that this engine cannot heed."""
        refuse_extra(params)
        if params.stop and not self.engine.has_tokenizer:
            message = "stop strings need a tokenizer of the engine's own: use stop_token_ids"
            raise spec_error("E_BAD_PARAM", "generation.stop", message)

    def spec(
        self, item: GenerationItem | ScoringItem, index: int, count: int, ids: Sequence[int]
    ) -> tuple[InterventionSpec | None, tuple[BoundOp, ...]]:
        """An item's spec for its prompt, and bound to the model: what is wrong is refused here."""
        capabilities = self.capabilities()
        if any(not isinstance(entry, InterventionEntry) for entry in item.state_entries):
            capabilities.require([Capability.IN_PROCESS_TORCH], f"items[{index}].state_entries")
        spec = specs_of(item.state_entries)
        if spec is None:
            return None, ()
        path = steering_path(index, count)
        capabilities.require_spec(spec, path)
        spec = spec.lowered(whole_sequence(ids, len(item.prompt.token_ids)), path)
        spec.canonical_json()
        facts = self.engine.facts
        return spec, bind(spec, facts.layouts, facts.refused, self.registry.get, path)

    def constraint(self, entries: Sequence[OutputEntry], params: GenerationParams) -> dict[str, Any] | None:
        """The constraint of an item, as the engine reads it."""
        if any(not isinstance(entry, ConstraintEntry) for entry in entries):
            self.capabilities().require([Capability.IN_PROCESS_TORCH], "output_entries")
        found = one_constraint(entries, params)
        if found is not None and not self.engine.has_tokenizer:
            message = "needs a tokenizer, and this engine was loaded without one"
            raise spec_error("E_CONSTRAINT", "generation.constraint", message)
        return canonical_constraint(found)

    def prompts(self, prompts: Sequence[PreparedPrompt], max_tokens: int) -> None:
        """PromptError for ids that the model has not, and for what does not fit into its context."""
        vocabulary, context = self.engine.vocabulary, self.facts.context_length
        for index, prompt in enumerate(prompts):
            length = len(prompt.token_ids)
            largest = max(*prompt.token_ids, -1)
            if largest >= vocabulary:
                raise PromptError(f"prompt {index} has token id {largest}; the model has ids 0 to {vocabulary - 1}")
            if context is not None and length + max_tokens > context:
                raise PromptError(
                    f"prompt {index} has {length} tokens and max_tokens is {max_tokens}, and the engine's "
                    f"max_model_len is {context}: shorten it, or load with a larger one"
                )
