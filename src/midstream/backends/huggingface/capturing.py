"""Captures: rows of prompts alone, or also of what is generated after them, steered or not."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.core.capture import CaptureSpec
from midstream.core.errors import MidstreamError
from midstream.core.generation import Completion, GenerationParams
from midstream.core.interventions import InterventionSpec
from midstream.core.result import CaptureResult
from midstream.core.select import SelectSpec, each_select
from midstream.core.sites import Site, SiteLayout, layouts_at, site_layers
from midstream.core.text import token_texts
from midstream.taps.locate import TapMap
from midstream.taps.passes import Passes
from midstream.taps.recorder import Recorded, RecordedRequest, Recorder, check_memory

from .choosing import Growing
from .facts import compute_dtype, fingerprint
from .forward import Done, run_multimodal, run_prompts
from .generating import completions, failing_alone, steering_receipts
from .jobs import Job


def samples(params: GenerationParams) -> bool:
    """Whether a capture with these parameters samples tokens: else only the prompts run, and no logits are computed."""
    shaped = (params.logprobs, params.prompt_logprobs, params.constraint)
    return params.max_tokens > 1 or params.n > 1 or any(one is not None for one in shaped)


@dataclass(frozen=True, eq=False)
class Capturing:
    """One capture under way: what is recorded of which model, and what the result says of it."""

    taps: TapMap
    spec: CaptureSpec
    sites: dict[Site, tuple[int, ...]]
    recorder: Recorder
    params: GenerationParams
    model_ref: str
    tokenizer: Any

    @classmethod
    def of(
        cls,
        taps: TapMap,
        spec: CaptureSpec,
        jobs: Sequence[Job],
        each: Sequence[SelectSpec | None] | None,
        params: GenerationParams,
        model_ref: str,
        tokenizer: Any,
    ) -> Capturing:
        """Plan a capture of `jobs`; raises what the model cannot give, before it runs."""
        sites = site_layers(spec.sites, spec.layers, taps.layouts, taps.refused)
        selects = each_select(spec.select, each, len(jobs))
        requests = [
            RecordedRequest(
                index,
                choice,
                job.prompt.token_ids,
                len(job.prompt.token_ids) + params.max_tokens - 1,
                select,
                with_prompt=choice == 0,
            )
            for index, (job, select) in enumerate(zip(jobs, selects, strict=True))
            for choice in range(params.n)
        ]
        recorder = Recorder(sites, requests, getattr(torch, spec.dtype) if spec.dtype else None)
        planned = cls(taps, spec, sites, recorder, params, model_ref, tokenizer)
        check_memory(recorder.certain, planned.layouts, spec.dtype or compute_dtype(taps.anatomy.model))
        return planned

    @property
    def layouts(self) -> dict[Site, dict[int, SiteLayout]]:
        """The layout of every captured site and layer."""
        return layouts_at(self.sites, self.taps.layouts)

    def read_prompts(self, jobs: Sequence[Job], passes: Passes, done: Done, *, compiled: bool = False) -> CaptureResult:
        """Run the prompts alone. compiled: on compiled blocks, which are in place."""
        plain = {index: job.prompt.token_ids for index, job in enumerate(jobs) if not job.prompt.multi_modal_data}
        run_prompts(self.taps, passes, plain, done, compiled=compiled)
        errors: dict[int, MidstreamError] = {}
        for index, job in enumerate(jobs):
            if inputs := job.prompt.multi_modal_data:
                with failing_alone(index, [index], passes, errors, inputs):
                    run_multimodal(self.taps.anatomy, passes, index, job.prompt.token_ids, inputs)
                done(len(job.prompt.token_ids))
        grown = [[Growing(index, job.prompt.token_ids, None)] for index, job in enumerate(jobs)]
        recorded = self.recorder.finish()
        steering = steering_receipts(passes.steerer, grown)
        outputs = [
            Completion(job.prompt.token_ids, receipt=receipt, steering=of)
            for job, receipt, of in zip(jobs, recorded.receipts, steering, strict=True)
        ]
        return self._result(recorded, outputs, jobs)

    def after_decoding(self, jobs: Sequence[Job], grown: Sequence[list[Growing]], passes: Passes) -> CaptureResult:
        """The result, once every sequence of `grown` has ended."""
        recorded = self.recorder.finish([one.token_ids for choices in grown for one in choices])
        steering = steering_receipts(passes.steerer, grown)
        outputs = completions(
            grown, self.params, self.tokenizer, steering=steering, receipts=recorded.receipts, errors=recorded.errors
        )
        return self._result(recorded, outputs, jobs)

    def _result(self, recorded: Recorded, outputs: Sequence[Completion], jobs: Sequence[Job]) -> CaptureResult:
        if not recorded.receipt.selected:
            warnings.warn(f"no row was selected by {self.spec.select or 'the per-prompt rows'}", stacklevel=4)
        return CaptureResult(
            recorded.labels,
            recorded.tensors,
            self.layouts,
            list(outputs),
            recorded.receipt,
            self.spec,
            self.model_ref,
            fingerprint(self.taps.anatomy.model),
            recorded.errors,
            token_texts(self.tokenizer),
            [_described(job) for job in jobs] if any(job.ops for job in jobs) else (),
        )


def _described(job: Job) -> dict[str, Any] | None:
    """What was done to a job's rows, in JSON."""
    return InterventionSpec(ops=tuple(one.op for one in job.ops)).described() if job.ops else None
