"""GenerationParams, when it is greedy, and the seeds of items."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.errors import SpecError
from midstream.core.generation import Completion, GenerationParams, derive_seed

FIELDS = {
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "greedy", "n", "seed",
    "seed_scope", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "constraint",
    "extra",
}  # fmt: skip


def refusal(**fields: Any) -> SpecError:
    with pytest.raises(SpecError) as by_name:
        GenerationParams(**fields)
    with pytest.raises(SpecError) as from_object:
        GenerationParams.of(fields)
    assert str(by_name.value) == str(from_object.value)
    return by_name.value


def test_the_fields() -> None:
    assert set(GenerationParams.model_fields) == FIELDS
    json.dumps(GenerationParams.model_json_schema())


def test_unset_is_neutral() -> None:
    params = GenerationParams()
    assert params.max_tokens == 1
    assert (params.min_tokens, params.n, params.seed_scope) == (0, 1, "item")
    unset = (
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "seed",
        "logprobs",
        "prompt_logprobs",
        "constraint",
    )
    assert all(getattr(params, name) is None for name in unset)
    assert not params.ignore_eos
    assert (params.stop, params.stop_token_ids, params.extra) == ((), (), {})
    assert params.is_greedy


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("max_tokens", [1, np.int64(7)]),
        ("min_tokens", [0]),
        ("temperature", [0, 0.0, 0.7, 2, np.float32(1)]),
        ("top_p", [1, 0.1]),
        ("top_k", [1, 50]),
        ("repetition_penalty", [0.5, 1, 1.3]),
        ("n", [1, 4]),
        ("seed", [0, 2**63 - 1]),
        ("seed_scope", ["item", "dispatch"]),
        ("stop", ["a", ["a", "b"], ("a",)]),
        ("stop_token_ids", [[0, 5], [np.int32(3)]]),
        ("logprobs", [0, 5]),
        ("prompt_logprobs", [0]),
        ("constraint", [{"regex": "a+"}, {"json_schema": {"type": "object"}}, {"choice": ["a", "b"]}]),
        ("extra", [{"num_beams": 2}]),
    ],
)
def test_accepted(name: str, good: list[Any]) -> None:
    for value in good:
        assert GenerationParams(**{name: value}) == GenerationParams.of({name: value})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("max_tokens", [0, -1, 1.5, True, "8", None]),
        ("min_tokens", [-1, 0.5, True]),
        ("temperature", [-0.1, float("nan"), float("inf"), "hot", [1]]),
        ("top_p", [0, -0.5, 1.01, float("nan")]),
        ("top_k", [0, -1, 1.5, True]),
        ("repetition_penalty", [0, -1, float("inf"), float("nan")]),
        ("greedy", ["maybe", 2]),
        ("n", [0, -1, 2.0, True]),
        ("seed", [-1, 1.5, True, "1"]),
        ("seed_scope", ["call", None, 1]),
        ("stop", ["", ["a", ""], [1], 5]),
        ("stop_token_ids", [[-1], [True], [1.0], ["a"]]),
        ("ignore_eos", ["maybe", None]),
        ("logprobs", [-1, 1.5, True]),
        ("prompt_logprobs", [-1, True]),
        ("constraint", ["a+", 5, ["regex"]]),
        ("extra", [None, "beams", [("num_beams", 2)]]),
    ],
)
def test_refused_with_its_path(name: str, bad: list[Any]) -> None:
    for value in bad:
        error = refusal(**{name: value})
        assert error.code == "E_BAD_PARAM", value
        assert error.path == f"generation.{name}" or error.path.startswith(f"generation.{name}["), value


@pytest.mark.parametrize("name", ["max_new_tokens", "do_sample", "generation", "self"])
def test_an_unknown_field_is_refused(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        GenerationParams.of({name: 1})
    assert (caught.value.code, caught.value.path) == ("E_UNKNOWN_FIELD", f"generation.{name}")
    assert "max_tokens" in caught.value.message


def test_contradictions_are_refused() -> None:
    error = refusal(greedy=True, temperature=0.7)
    assert (error.code, error.path) == ("E_BAD_PARAM", "generation.temperature")
    error = refusal(min_tokens=5, max_tokens=4)
    assert (error.code, error.path) == ("E_BAD_PARAM", "generation.min_tokens")
    assert GenerationParams(greedy=True, temperature=0).is_greedy
    assert GenerationParams(min_tokens=4, max_tokens=4)


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, True),
        ({"max_tokens": 9, "n": 2, "repetition_penalty": 1.2, "stop": "x", "logprobs": 3}, True),
        ({"temperature": 1.0}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"seed": 0}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0, "seed": 1}, True),
        ({"greedy": True}, True),
        ({"greedy": True, "seed": 3, "top_p": 0.5}, True),
        ({"greedy": False}, False),
    ],
)
def test_greedy_unless_sampling_is_asked_for(fields: dict[str, Any], greedy: bool) -> None:
    assert GenerationParams(**fields).is_greedy is greedy


# --- seeds


@settings(deadline=None)
@given(st.integers(0, 2**64), st.integers(0, 99), st.integers(0, 99), st.integers(0, 9))
def test_seeds_follow_the_formula(seed: int, call: int, index: int, choice: int) -> None:
    text = f"{seed}:generate-{call}:{index}" if choice == 0 else f"{seed}:generate-{call}:{index}:{choice}"
    expected = int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "big") & (2**63 - 1)
    assert derive_seed(seed, call, index, choice) == expected
    assert 0 <= expected < 2**63


def test_a_seed_by_hand() -> None:
    """sha256("7:generate-0:0") begins with these bytes."""
    first = bytes.fromhex(hashlib.sha256(b"7:generate-0:0").hexdigest()[:16])
    assert derive_seed(7, 0, 0) == int.from_bytes(first, "big") % 2**63


def test_unseeded_stays_none_and_others_differ() -> None:
    assert derive_seed(None, 3, 1, 2) is None
    seeds = {derive_seed(7, call, index, choice) for call in (0, 1) for index in (0, 1) for choice in (0, 1)}
    assert len(seeds) == 8
    assert derive_seed(7, 1, 2) != derive_seed(7, 12, 0)


def test_completion() -> None:
    completion = Completion(prompt_token_ids=(1, 2))
    assert (completion.token_ids, completion.text, completion.finish_reason) == ((), None, None)
    assert completion.choices == ()


@pytest.mark.parametrize("params", [{"top_p": 5e-324}, {"temperature": 5e-324}, {"temperature": 1e-40, "top_p": 1e-40}])
def test_no_parameter_is_too_small_for_a_token(params: dict[str, float]) -> None:
    torch = pytest.importorskip("torch")
    from midstream.backends.huggingface.sampling import generator_for, pick_tokens

    scores = torch.tensor([[1.0, 900.0, 3.0], [-2.0, -5e4, -9.0]])
    generators = [generator_for(place, scores.device) for place in range(2)]
    assert pick_tokens(scores, GenerationParams(max_tokens=1, **params), generators) == [1, 0]


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e40, 1.7e308])
def test_no_penalty_is_too_large_or_small_for_a_token(penalty: float) -> None:
    torch = pytest.importorskip("torch")
    from midstream.backends.huggingface.sampling import penalised

    scores = torch.tensor([[1.0, -2.0, 0.0, -torch.inf]])
    found = penalised(scores, penalty, [[0, 1, 2, 3]])[0]
    assert found[:3].isfinite().all()
    assert found[3] == -torch.inf
    assert found.argmax() == (0 if penalty < 1 or found[0] > 0 else 2)
