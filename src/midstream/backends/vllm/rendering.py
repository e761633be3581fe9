"""GenerationParams as vLLM's SamplingParams, and what vLLM gives back as ours."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from midstream.core.errors import CaptureError, spec_error
from midstream.core.generation import FinishReason, GenerationParams, TokenLogprob

CONSTRAINTS: Final[Mapping[str, str]] = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
"""Our names of constraints, and vLLM's."""


def refuse_extra(params: GenerationParams) -> None:
    """E_UNKNOWN_KIND for what only the model's own `generate` takes."""
    if params.extra:
        name = sorted(params.extra)[0]
        raise spec_error("E_UNKNOWN_KIND", f"generation.extra.{name}", "vllm takes no extra: huggingface has it")


def sampling_fields(params: GenerationParams, *, seed: int | None, eos: frozenset[int]) -> dict[str, Any]:
    """One choice of one item in vLLM's names, the same in SamplingParams and over HTTP; all of GenerationParams is here
    but the constraint.

    vLLM stops at its tokenizer's EOS and at those of the generation_config; which ids are EOS is ours to say, so they
    travel as ids to stop at.
    """
    refuse_extra(params)
    greedy = params.is_greedy
    return {
        "n": 1,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": 0.0 if greedy else 1.0 if params.temperature is None else params.temperature,
        "top_p": 1.0 if greedy or params.top_p is None else params.top_p,
        "top_k": 0 if greedy or params.top_k is None else params.top_k,
        "repetition_penalty": 1.0 if params.repetition_penalty is None else params.repetition_penalty,
        "seed": None if greedy else seed,
        "stop": list(params.stop) or None,
        "stop_token_ids": sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos)}),
        "ignore_eos": True,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "skip_special_tokens": True,
    }


def structured_fields(constraint: dict[str, Any] | None) -> dict[str, Any] | None:
    """A constraint in vLLM's names."""
    if constraint is None:
        return None
    (kind, value), *_ = constraint.items()
    return {CONSTRAINTS[kind]: value}


def sampling_params(
    params: GenerationParams,
    *,
    seed: int | None,
    eos: frozenset[int],
    constraint: dict[str, Any] | None,
    text: str | None,
    delta: bool = False,
) -> Any:
    """One choice of one item as vLLM samples it. text: what `extra_args` holds for our plugin.

    delta: it is told of what is new each time, in place of all.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = structured_fields(constraint)
    return SamplingParams(
        **sampling_fields(params, seed=seed, eos=eos),
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.DELTA if delta else RequestOutputKind.CUMULATIVE,
        structured_outputs=None if structured is None else StructuredOutputsParams(**structured),
        extra_args=None if text is None else {"midstream": text},
    )


def finish_reason(output: Any, params: GenerationParams) -> FinishReason | None:
    """Ours of vLLM's: `stop` before `eos` before `length`; None for what was aborted, CaptureError for a failure."""
    reason, cause = output.finish_reason, output.stop_reason
    if reason == "error":
        raise CaptureError("the engine failed at this request")
    if reason in (None, "abort"):
        return None
    if reason == "length":
        return "length"
    if reason == "stop" and isinstance(cause, int) and cause not in params.stop_token_ids:
        return "eos"  # no other ids to stop at are given
    if reason == "stop" and cause is None:
        return "eos"
    return "stop"  # a stop string, an id to stop at, or a repetition


def token_logprobs(
    found: Sequence[Any] | None, ids: Sequence[int], count: int | None
) -> tuple[TokenLogprob, ...] | None:
    """vLLM's log-probabilities of sampled tokens as ours; None where none were asked for."""
    if count is None or found is None:
        return None
    return tuple(_token_logprob(one, token, count) for one, token in zip(found, ids, strict=True))


def prompt_logprobs(
    found: Sequence[Any] | None, ids: Sequence[int], count: int | None
) -> tuple[TokenLogprob | None, ...] | None:
    """The same of prompt tokens; the first has none."""
    if count is None or found is None:
        return None
    return tuple(
        None if one is None else _token_logprob(one, token, count) for one, token in zip(found, ids, strict=True)
    )


def _token_logprob(found: Mapping[int, Any], token: int, count: int) -> TokenLogprob:
    by_rank = sorted(found.items(), key=lambda pair: (pair[1].rank, pair[0]))
    top = tuple((int(one), float(of.logprob)) for one, of in by_rank[:count])
    return TokenLogprob(int(token), float(found[token].logprob), top)


def canonical_constraint(constraint: dict[str, Any] | None) -> dict[str, Any] | None:
    """A constraint in the form that vLLM reads: a schema as text or object, choices as a list of texts."""
    if constraint is None:
        return None
    (kind, value), *_ = constraint.items()
    if kind == "choice":
        value = list(value)
        if not value or not all(isinstance(one, str) for one in value):
            raise spec_error("E_CONSTRAINT", "constraint.choice", f"is a list of texts, got {value!r:.60}")
    elif kind == "json_schema" and not isinstance(value, str):
        value = json.dumps(value)
    elif kind != "json_schema" and not isinstance(value, str):
        raise spec_error("E_CONSTRAINT", f"constraint.{kind}", f"is a text, got {value!r:.60}")
    return {kind: value}
