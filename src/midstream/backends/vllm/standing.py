"""A capture that stands: of every request that comes to an engine, whoever submits it, until it is stopped."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from midstream.core.backend import ModelFacts
from midstream.core.capture import CaptureSpec
from midstream.core.errors import CaptureError
from midstream.core.generation import Completion
from midstream.core.result import CaptureResult
from midstream.core.sites import layouts_at, site_layers
from midstream.taps.recorder import RecordedRequest, Recorder

from .engine import Engine
from .plugin.admission import ADMISSION, Admission
from .rows import Collected, Owner, Segmented, error_of

_SUFFIX: Final = re.compile(r"-[0-9a-f]{8}$")


@dataclass(frozen=True)
class _Choice:
    """One sequence of a request that has ended. engine_id: vLLM's own name of it."""

    engine_id: str
    sample: int
    choice: int


@dataclass(eq=False)
class Standing:
    """Begins at once. before: the requests that were running then, of which rows are missing.

    outputs: the last that vLLM said of requests that have ended. tokens: what was sampled, by choice.
    """

    engine: Engine
    facts: ModelFacts
    segmented: Segmented
    spec: CaptureSpec
    outputs: dict[str, Any] = field(default_factory=dict[str, Any])
    tokens: dict[str, dict[int, list[int]]] = field(default_factory=dict[str, dict[int, list[int]]])
    before: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        llm_engine = self.engine.llm.llm_engine
        self._admission: Admission = getattr(llm_engine.input_processor, ADMISSION)
        facts = self.engine.facts
        self._sites = site_layers(self.spec.sites, self.spec.layers, facts.layouts, facts.refused)
        self.before |= {state.external_req_id for state in llm_engine.output_processor.request_states.values()}
        self._admission.seen.clear()
        self._admission.standing = self.spec
        self._step = llm_engine.step
        llm_engine.step = self._heard

    def _heard(self) -> list[Any]:
        found = self._step()
        for output in found:
            one = output.request_id
            if one not in self._admission.seen:
                continue
            tokens = self.tokens.setdefault(one, {})
            for choice in output.outputs:
                of = tokens.setdefault(choice.index, [])
                if not self._admission.seen[one]:  # each output has them all
                    of.clear()
                of.extend(choice.token_ids)
            if output.finished:
                self.outputs[one] = output
        return found

    @property
    def known(self) -> list[str]:
        """The ids of all requests since the last `clear`, in the order in which they came."""
        return [*self.before, *self._admission.seen]

    @property
    def on(self) -> bool:
        """Whether it was not stopped."""
        return self._admission.standing is self.spec

    def stop(self) -> None:
        """Capture no further request; what was captured, or is being, can still be fetched. Idempotent."""
        if self.on:
            self._admission.standing = None

    def end(self) -> None:
        """Stop, forget everything, and leave the engine as it was."""
        self.stop()
        self.clear()
        self.engine.llm.llm_engine.step = self._step

    def fetch(self, req_ids: Sequence[str] | None = None, *, clear: bool = True) -> tuple[CaptureResult, list[Any]]:
        """The rows of requests that have ended, and what vLLM said of each; CaptureError names one that is incomplete.

        req_ids: vLLM's (`RequestOutput.request_id`); None: all since the last clear. clear: forget what was fetched.
        """
        asked = self.known if req_ids is None else list(dict.fromkeys(req_ids))
        for one in asked:
            if (why := self._missing(one)) is not None:
                raise CaptureError(f"request {one!r} {why}: fetch the others with req_ids=, or clear_captured")
        outputs = [self.outputs[one] for one in asked]
        choices = self._choices(asked)
        ids = [one.engine_id for one in choices]
        parts = [Collected.read(data) for data in self.engine.call("collect", ids, True)]
        for place, one in enumerate(choices):
            for part in parts:
                if (error := error_of(part.described[place])) is not None:
                    raise CaptureError(f"request {asked[one.sample]!r}: {error}") from error
        result = self._result(asked, outputs, choices, parts)
        if clear:
            self._forget(asked, ids)
        return result, outputs

    def clear(self) -> None:
        """Forget what was captured, and what went wrong."""
        self._forget(self.known, self.engine.call("standing")[0])
        self.before.clear()

    def _forget(self, asked: Sequence[str], ids: Sequence[str]) -> None:
        self.engine.call("release", list(ids))
        for one in asked:
            self._admission.seen.pop(one, None)
            self.outputs.pop(one, None)
            self.tokens.pop(one, None)

    def _missing(self, one: str) -> str | None:
        """Why a request's rows are not all there; None where they are."""
        if one in self.before:
            return "was running when the capture began"
        if one not in self._admission.seen:
            return "is not known here: it came before the capture began, or was fetched"
        if one in self.outputs:
            return None
        states = self.engine.llm.llm_engine.output_processor.request_states.values()
        return "still runs" if any(state.external_req_id == one for state in states) else "was aborted"

    def _choices(self, asked: Sequence[str]) -> list[_Choice]:
        """vLLM's own names of what was asked for: `<id>-<8 hex digits>`, with n > 1 `<choice>_` before it."""
        sample_of = {one: sample for sample, one in enumerate(asked)}
        found: dict[tuple[int, int], str] = {}
        for engine_id in self.engine.call("standing")[0]:
            name = _SUFFIX.sub("", engine_id)
            choice, _, rest = name.partition("_")
            where = (sample_of[name], 0) if name in sample_of else None
            if where is None and choice.isdigit() and rest in sample_of:
                where = (sample_of[rest], int(choice))
            if where is None:
                continue
            if where in found:
                raise CaptureError(f"two requests have the id {asked[where[0]]!r}: their rows cannot be told apart")
            found[where] = engine_id
        due = [(i, j) for i, one in enumerate(asked) for j in sorted(self.tokens[one])]
        if lost := [asked[i] for i, j in due if (i, j) not in found]:
            raise CaptureError(f"request {lost[0]!r}: its rows are gone: too many requests ended that nobody fetched")
        return [_Choice(found[where], *where) for where in due]

    def _result(
        self, asked: Sequence[str], outputs: Sequence[Any], choices: Sequence[_Choice], parts: Sequence[Collected]
    ) -> CaptureResult:
        recorded: list[RecordedRequest] = []
        owners: list[Owner] = []
        generated: list[tuple[int, ...]] = []
        for place, one in enumerate(choices):
            prompt = tuple(outputs[one.sample].prompt_token_ids)
            made = tuple(self.tokens[asked[one.sample]][one.choice])
            bound = len(prompt) + max(len(made) - 1, 0)
            recorded.append(RecordedRequest(one.sample, one.choice, prompt, bound, self.spec.select, one.choice == 0))
            owners.append(Owner(place, len(prompt), (*prompt, *made[:-1])))
            generated.append(made)
        recorder = Recorder(self._sites, recorded)
        # the prompt's rows of choices after the first are those of the first
        later = np.array([one.choice > 0 for one in choices], dtype=np.bool_)
        ends = np.array([len(one.prompt) for one in recorded], dtype=np.int64)
        kept = [part.take(~(later[part.request] & (part.position < ends[part.request]))) for part in parts]
        self.segmented.deliver(kept, owners, recorder)
        done = recorder.finish(generated)
        completions = [
            Completion(tuple(one.prompt_token_ids), tuple(self.tokens[name][0]), receipt=receipt, engine_output=one)
            for name, one, receipt in zip(asked, outputs, done.receipts, strict=True)
        ]
        return CaptureResult(
            done.labels,
            done.tensors,
            layouts_at(self._sites, self.engine.facts.layouts),
            completions,
            done.receipt,
            self.spec,
            self.facts.model_ref,
            self.facts.model_fingerprint,
            done.errors,
        )
