"""`extra`: a job through the model's own `generate`, beams included; its passes are followed and steered."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from midstream.core.errors import spec_error
from midstream.core.generation import GenerationParams
from midstream.core.interventions import OpReceipt
from midstream.core.op import Op
from midstream.core.sites import Site
from midstream.taps.locate import TapMap

from .choosing import Growing, Stopping
from .decoding import model_eos_ids
from .entries import Follower, hooked
from .forward import fresh_positions, input_device, moved
from .jobs import Job
from .shaping import Shaping

_OURS: Final = {
    **dict.fromkeys(
        ("input_ids", "inputs", "inputs_embeds", "attention_mask", "generation_config", "return_dict_in_generate",
         "num_beams_groups"),
        "is set by midstream: leave it out",
    ),
    "logits_processor": "give a StackEntry",
    "stopping_criteria": "give a StackEntry",
    "num_return_sequences": "give n",
    "max_new_tokens": "give max_tokens",
    "max_length": "give max_tokens",
    "min_new_tokens": "give min_tokens",
    "min_length": "give min_tokens",
    "eos_token_id": "give stop_token_ids",
    **{name: f"give {name} itself" for name in ("temperature", "top_p", "top_k", "repetition_penalty")},
    "do_sample": "give a temperature, or greedy=True",
}  # fmt: skip
"""Arguments of `generate` that would contradict what we give or read, and what to give instead."""


def check_extra(model: Any, params: GenerationParams) -> None:
    """Refuse what `model.generate` does not take, would not give us, or would be given twice."""
    from transformers import GenerationConfig

    takes = {*inspect.signature(model.generate).parameters, *inspect.signature(model.forward).parameters}
    takes |= set(vars(GenerationConfig())) | {"assistant_model", "streamer", "tokenizer"}
    for name in params.extra:
        if name in _OURS:
            raise spec_error("E_BAD_PARAM", f"generation.extra.{name}", _OURS[name])
        if name not in takes or name in ("kwargs", "self"):
            message = f"{type(model).__name__}.generate takes no {name!r:.60}: see transformers' GenerationConfig"
            raise spec_error("E_UNKNOWN_FIELD", f"generation.extra.{name}", message)
    for name in ("logprobs", "prompt_logprobs", "constraint"):
        if getattr(params, name) is not None:
            raise spec_error(
                "E_UNKNOWN_KIND", f"generation.{name}", "with extra the model's own generate runs: no such"
            )
    if params.stop:
        message = "with extra the model's own generate runs: use stop_token_ids, or extra's stop_strings and tokenizer"
        raise spec_error("E_UNKNOWN_KIND", "generation.stop", message)


def generate_alone(
    taps: TapMap, job: Job, choices: Sequence[Growing], params: GenerationParams
) -> tuple[OpReceipt, ...]:
    """Fill in the choices of one job by `model.generate(**extra)`. Returns what its ops did."""
    model: Any = taps.anatomy.model
    shaping = job.shaping()
    ids = torch.tensor([list(job.prompt.token_ids)], device=input_device(model))
    sites = steered_sites([one.op for one in job.ops])
    follower = Follower(taps, sites, lambda _: job.ops, job.prompt.token_ids)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(fresh_positions(model))
        stack.enter_context(_neutral_config(model, params))
        stack.enter_context(_seeded(choices[0].seed))
        stack.enter_context(hooked(model, job.hooks))
        if job.ops:
            stack.enter_context(follower.following())
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=list(shaping.processors),
            stopping_criteria=list(shaping.criteria),
            **moved(model, job.prompt.multi_modal_data),
            **params.extra,
        )
    stopping = Stopping(params, model_eos_ids(model), None)
    for one, row in zip(choices, output.tolist(), strict=True):
        one.shaping = Shaping()  # a caller's criteria have been asked
        _cut(one, row[len(job.prompt.token_ids) :], stopping)
    return follower.receipts()


def steered_sites(ops: Sequence[Op]) -> dict[Site, list[int]]:
    """Where ops change or read something, by site."""
    found: dict[Site, set[int]] = {}
    for one in [*ops, *(op.gate for op in ops if op.gate is not None)]:
        found.setdefault(one.site, set()).update(one.layers)
    return {site: sorted(layers) for site, layers in found.items()}


def _cut(one: Growing, tokens: list[int], stopping: Stopping) -> None:
    """Token by token, to the place where the sequence ended: `generate` pads what ends early."""
    for token in tokens:
        one.token_ids.append(token)
        one.finish_reason = stopping.reason(one, torch.empty(0))
        if one.finish_reason is not None:
            return
    one.finish_reason = "stop"  # one of the caller's criteria


@contextmanager
def _neutral_config(model: Any, params: GenerationParams) -> Generator[None]:
    """With a generation_config of our parameters alone in the place of the model's, which is put back."""
    from transformers import GenerationConfig

    ends = {*params.stop_token_ids, *(() if params.ignore_eos else model_eos_ids(model))}
    config = GenerationConfig(
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        do_sample=not params.is_greedy,
        temperature=None if params.is_greedy else params.temperature,
        top_p=None if params.is_greedy else params.top_p,
        top_k=None if params.is_greedy else params.top_k or 0,
        repetition_penalty=params.repetition_penalty,
        num_return_sequences=params.n,
        eos_token_id=sorted(ends) or None,
        pad_token_id=min(ends, default=0),
    )
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _seeded(seed: int | None) -> Generator[None]:
    """torch's global generators at a seed for a while; the caller's state is put back."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
