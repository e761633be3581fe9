"""Every field of GenerationParams as vLLM samples it, and what it gives back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from midstream.backends.vllm.rendering import CONSTRAINTS, canonical_constraint, finish_reason, sampling_params
from midstream.core.errors import CaptureError, SpecError
from midstream.core.generation import CONSTRAINT_KINDS, GenerationParams

EOS = frozenset({2, 3})


def render(constraint: Any = None, **given: Any) -> Any:
    params = GenerationParams(**given)
    return sampling_params(params, seed=11, eos=EOS, constraint=constraint, text=None)


def test_every_field_is_rendered() -> None:
    """A field that this test does not know is a field that nobody rendered."""
    here = {
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "greedy", "n", "seed",
        "seed_scope", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "constraint", "extra",
    }  # fmt: skip
    assert set(GenerationParams.model_fields) == here


def test_unset_is_neutral_and_greedy() -> None:
    made = render(max_tokens=7)
    assert (made.n, made.max_tokens, made.min_tokens, made.temperature) == (1, 7, 0, 0.0)
    assert (made.top_p, made.top_k, made.repetition_penalty, made.seed) == (1.0, 0, 1.0, None)
    assert made.stop_token_ids == [2, 3]
    assert (made.logprobs, made.prompt_logprobs, made.structured_outputs) == (None, None, None)


def test_sampling() -> None:
    made = render(
        max_tokens=7, min_tokens=2, temperature=0.7, top_p=0.9, top_k=5, repetition_penalty=1.2, stop_token_ids=[9],
        logprobs=3, prompt_logprobs=0, ignore_eos=True, n=3, seed=4,
    )  # fmt: skip
    assert (made.n, made.min_tokens, made.temperature, made.top_p, made.top_k) == (1, 2, 0.7, 0.9, 5)
    assert (made.repetition_penalty, made.seed, made.stop_token_ids) == (1.2, 11, [9])
    assert (made.logprobs, made.prompt_logprobs) == (3, 0)
    assert render(top_p=0.9).temperature == 1.0
    assert render(temperature=0.0, top_p=0.9).temperature == 0.0


def test_extra_is_refused() -> None:
    with pytest.raises(SpecError, match=r"E_UNKNOWN_KIND at generation\.extra\.num_beams"):
        render(extra={"num_beams": 2})


@pytest.mark.parametrize("kind", CONSTRAINT_KINDS)
def test_every_constraint_has_vllms_name(kind: str) -> None:
    value: Any = {"choice": ["yes", "no"], "json_schema": {"type": "object"}}.get(kind, "a+")
    made = render(canonical_constraint({kind: value})).structured_outputs
    assert getattr(made, CONSTRAINTS[kind]) is not None


@pytest.mark.parametrize("bad", [{"choice": []}, {"choice": [1]}, {"regex": 3}])
def test_constraints_that_are_none(bad: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="E_CONSTRAINT"):
        canonical_constraint(bad)


@pytest.mark.parametrize(
    ("reason", "cause", "ours"),
    [
        ("stop", None, "eos"),
        ("stop", 2, "eos"),
        ("stop", 3, "eos"),
        ("stop", 9, "stop"),
        ("stop", "END", "stop"),
        ("length", None, "length"),
        ("abort", None, None),
        (None, None, None),
        ("repetition", None, "stop"),
    ],
)
def test_finish_reasons(reason: str | None, cause: Any, ours: str | None) -> None:
    output = SimpleNamespace(finish_reason=reason, stop_reason=cause)
    assert finish_reason(output, GenerationParams(stop_token_ids=[9])) == ours
    if cause == 2:
        assert finish_reason(output, GenerationParams(stop_token_ids=[2])) == "stop"


def test_an_engines_failure_is_raised() -> None:
    with pytest.raises(CaptureError, match="the engine failed"):
        finish_reason(SimpleNamespace(finish_reason="error", stop_reason=None), GenerationParams())
