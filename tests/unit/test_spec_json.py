"""Specs with their tensors inside."""

from __future__ import annotations

import json

import numpy as np
import pytest

from midstream.core.errors import SpecError
from midstream.core.interventions import InterventionSpec
from midstream.formats.spec_json import decode_spec, encode_spec

GATE = {"layers": 2, "readout": {"kind": "cosine", "d": [1.0, 0.0]}, "rule": {"kind": "sum"}}
OPS = [
    {"kind": "add", "layers": [1, 2], "vector": np.arange(4.0).reshape(2, 2), "gate": GATE},
    {"kind": "low_rank", "layers": 1, "P": np.ones((1, 2)), "Q": np.ones((2, 1)), "strength": -0.5},
    {"kind": "router", "layers": 1, "on": 3},
]


def test_a_round_trip_through_json_keeps_every_tensor() -> None:
    spec = InterventionSpec(ops=OPS)
    back = decode_spec(json.loads(json.dumps(encode_spec(spec))))
    assert back.digest == spec.digest
    assert all(artifact.array is not None for artifact in back.artifacts().values())


def test_ids_stay_ids() -> None:
    spec = InterventionSpec(ops=OPS)
    back = decode_spec(spec.canonical())
    assert back.canonical_json() == spec.canonical_json()
    assert all(artifact.array is None for artifact in back.artifacts().values())
    assert encode_spec(back) == spec.canonical()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": "?"}, "E_BAD_PARAM at steering.ops[0].vector.data"),
        ({"extra": 1}, "E_UNKNOWN_FIELD at steering.ops[0].vector.extra"),
        ({"shape": [3]}, "E_BAD_PARAM at steering.ops[0].vector.data"),
    ],
)
def test_a_broken_tensor_is_named_by_its_path(change: dict[str, object], words: str) -> None:
    obj = encode_spec(InterventionSpec(ops=OPS))
    obj["ops"][0]["vector"] |= change
    with pytest.raises(SpecError) as error:
        decode_spec(obj)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize("obj", [None, 3, {"ops": 1}, {"ops": [1]}, {"ops": [{"kind": "x"}]}, {"ops": [{}]}])
def test_what_is_no_spec_is_refused_as_a_spec(obj: object) -> None:
    with pytest.raises(SpecError, match="at steering"):
        decode_spec(obj)


def test_a_tensor_past_the_limit_is_not_expanded() -> None:
    obj = encode_spec(InterventionSpec(ops=OPS))
    with pytest.raises(SpecError, match=r"at steering.ops\[0\].vector.shape: takes 16 bytes; at most 8"):
        decode_spec(obj, max_bytes=8)
