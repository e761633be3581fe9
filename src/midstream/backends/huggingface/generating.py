"""Jobs through the decode loop: those that can share a pass together, the others one by one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from midstream.core.capture import CaptureReceipt
from midstream.core.errors import MidstreamError, PromptError
from midstream.core.generation import Completion, GenerationParams
from midstream.core.interventions import OpReceipt, receipts_together
from midstream.core.text import Decode, decoder, text_of
from midstream.taps.locate import TapMap
from midstream.taps.passes import Passes
from midstream.taps.steerer import Steerer

from .choosing import Growing, Stopping
from .decoding import DECODE_BUDGET, LOGIT_BUDGET, DecodeLoop, decode_batches, model_eos_ids
from .entries import hooked
from .forward import Done, rotary_boundary, split_at
from .jobs import Job


def steerer_of(jobs: Sequence[Job], n: int = 1) -> Steerer | None:
    """One steerer for all choices of all jobs; None when nothing is steered."""
    if not any(job.ops for job in jobs):
        return None
    leaders = [index * n for index in range(len(jobs)) for _ in range(n)]
    return Steerer([job.ops for job in jobs for _ in range(n)], leaders)


def growing(jobs: Sequence[Job], n: int) -> list[list[Growing]]:
    """The sequences of every job, one per choice, still empty."""
    return [
        [
            Growing(index * n + choice, job.prompt.token_ids, seed, job.shaping())
            for choice, seed in enumerate(job.seeds)
        ]
        for index, job in enumerate(jobs)
    ]


def decode_loop(taps: TapMap, passes: Passes, params: GenerationParams, tokenizer: Any, done: Done) -> DecodeLoop:
    """A loop that stops as the parameters and the model's EOS ids say."""
    return DecodeLoop(
        taps, passes, params, Stopping(params, model_eos_ids(taps.anatomy.model), decoder(tokenizer)), done
    )


def decode_jobs(taps: TapMap, jobs: Sequence[Job], grown: Sequence[list[Growing]], loop: DecodeLoop) -> dict[int, Any]:
    """Fill in what is generated after each job's prompt. Returns index → the error of a job that failed alone."""
    params, errors = loop.params, dict[int, MidstreamError]()
    together = {index: job.prompt.token_ids for index, job in enumerate(jobs) if not job.alone}
    budget = DECODE_BUDGET if params.prompt_logprobs is None else LOGIT_BUDGET
    for part in split_at(rotary_boundary(taps.anatomy.model), together):
        for batch in decode_batches(part, params.n, loop.padded, budget):
            loop.run([grown[index] for index in batch])
    for index, job in enumerate(jobs):
        if job.alone:
            requests = [one.request for one in grown[index]]
            inputs = dict(job.prompt.multi_modal_data) or None
            with failing_alone(index, requests, loop.passes, errors, inputs), hooked(taps.anatomy.model, job.hooks):
                loop.run([grown[index]], inputs)
    return errors


@contextmanager
def failing_alone(
    sample: int, requests: Sequence[int], passes: Passes, errors: dict[int, MidstreamError], inputs: Any
) -> Generator[None]:
    """What a model says of one prompt's images or the like fails that prompt; the others stay."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        if inputs is None:  # a caller's hook: its error is the caller's
            raise
        said = str(error).strip().splitlines() or [type(error).__name__]
        refused = PromptError(f"prompt {sample}: the model refuses it: {said[-1]:.200}")
        refused.__cause__ = error
        errors[sample] = refused
        passes.fail(sample, requests, refused)


def steering_receipts(steerer: Steerer | None, grown: Sequence[list[Growing]]) -> list[tuple[OpReceipt, ...]]:
    """What each op did, per job, over its choices; CaptureError when a selected row was not steered."""
    if steerer is None:
        return [()] * len(grown)
    every = [one for choices in grown for one in choices]
    consumed = [([*one.prompt, *one.token_ids[:-1]], len(one.prompt)) for one in every]
    receipts = iter(steerer.finish(consumed))
    return [receipts_together([next(receipts) for _ in choices]) for choices in grown]


def completions(
    grown: Sequence[list[Growing]],
    params: GenerationParams,
    tokenizer: Any,
    *,
    steering: Sequence[tuple[OpReceipt, ...]],
    receipts: Sequence[CaptureReceipt] | None = None,
    errors: dict[int, MidstreamError] | None = None,
) -> list[Completion]:
    """One Completion per job, with its choices where n > 1."""
    decode = decoder(tokenizer)
    found: list[Completion] = []
    for index, choices in enumerate(grown):
        done = [_completion(one, params, decode) for one in choices]
        first = replace(
            done[0],
            steering=steering[index],
            receipt=None if receipts is None else receipts[index],
            error=(errors or {}).get(index) or next((one.error for one in choices if one.error), None),
        )
        found.append(replace(first, choices=tuple(done)) if params.n > 1 else first)
    return found


def _completion(one: Growing, params: GenerationParams, decode: Decode | None) -> Completion:
    return Completion(
        prompt_token_ids=one.prompt,
        token_ids=tuple(one.token_ids),
        text=None if decode is None else text_of(one.token_ids, one.finish_reason, params, decode),
        finish_reason=one.finish_reason,
        logprobs=None if params.logprobs is None else tuple(one.logprobs),
        prompt_logprobs=None if params.prompt_logprobs is None else tuple(one.prompt_logprobs),
    )
