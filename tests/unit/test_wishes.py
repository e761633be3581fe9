"""What bodies of completions ask of taps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.backends.vllm.routes.wishes import asked_of
from midstream.core.errors import SpecError
from midstream.formats.lens import steering_of
from midstream.formats.spec_json import encode_spec
from midstream.formats.wire import encode_tensor

SPEC = ms.add(torch.ones(4), layers=[1], strength=2.0)
STEER = encode_spec(SPEC)


@pytest.mark.parametrize(
    ("fields", "xargs"),
    [
        ({}, {}),
        ({"capture": None, "steering": None}, {}),
        ({"steering": False}, {}),
        ({"output_residual_stream": False}, {}),
        ({}, {"output_residual_stream": "null"}),
        ({"activations_transport": "binary"}, {}),
        ({}, {"others": 3}),
        ({}, {"apply_hooks": "false"}),
    ],
)
def test_nothing_is_asked(fields: dict[str, Any], xargs: dict[str, Any]) -> None:
    assert asked_of(fields, xargs) is None


@pytest.mark.parametrize("as_text", [False, True])
def test_the_same_in_the_body_and_in_xargs(as_text: bool) -> None:
    given = {"capture": {"layers": [2], "select": "prompt[-1]"}, "steering": STEER}
    transport = {"activations_transport": "binary"}
    if as_text:
        asked = asked_of({}, {**{name: json.dumps(value) for name, value in given.items()}, **transport})
    else:
        asked = asked_of({**given, **transport}, {})
    assert asked is not None
    assert asked.capture is not None
    assert (asked.capture.layers, str(asked.capture.select)) == ((2,), "prompt[-1]")
    assert asked.steering == SPEC
    assert asked.binary
    assert not asked.residual


@pytest.mark.parametrize(("value", "layers"), [(True, None), ("true", None), ([3, 1, 3], (1, 3)), ("[0]", (0,))])
def test_residual_streams_of_vllm_lens(value: Any, layers: Any) -> None:
    place = (
        ({}, {"output_residual_stream": value}) if isinstance(value, str) else ({"output_residual_stream": value}, {})
    )
    asked = asked_of(*place)
    assert asked is not None
    assert asked.residual
    assert asked.capture is not None
    assert asked.capture.layers == layers


def test_steering_vectors_of_vllm_lens() -> None:
    two = torch.arange(8.0).view(2, 4)
    three = torch.arange(24.0).view(1, 6, 4)
    spec = steering_of([
        {"activations": encode_tensor(two), "layer_indices": [5, 2], "scale": 3.0, "norm_match": True},
        {"activations": encode_tensor(three), "layer_indices": [1], "position_indices": [0, 2, 4, 6, 8, 10]},
        {"activations": encode_tensor(three.bfloat16()), "layer_indices": [0]},
    ])  # fmt: skip
    first, second, third, fourth = spec.ops
    assert (first.layers, first.strength, first.norm_match) == ((2,), 3.0, True)  # pyright: ignore
    assert first.vector.array.tolist() == two[1].tolist()  # pyright: ignore
    assert second.vector.array.tolist() == two[0].tolist()  # pyright: ignore
    assert third.positions == (0, 2, 4, 6, 8, 10)  # pyright: ignore
    assert fourth.positions == (0, 1, 2, 3, 4, 5)  # pyright: ignore


@pytest.mark.parametrize(
    ("fields", "xargs", "message"),
    [
        ({"capture": {}}, {"capture": "{}"}, "E_BAD_PARAM at vllm_xargs.capture: capture stands in the body too"),
        ({"capture": []}, {}, "E_BAD_PARAM at capture: must be an object"),
        ({"capture": {"layers": [1], "rows": "prompt"}}, {}, "E_UNKNOWN_FIELD at capture.rows"),
        ({}, {"capture": "[1"}, "E_BAD_PARAM at vllm_xargs.capture: is no JSON"),
        ({"output_residual_stream": []}, {}, "E_BAD_PARAM at output_residual_stream: is a list of layers, or true"),
        ({"output_residual_stream": 3}, {}, "E_BAD_PARAM at output_residual_stream"),
        ({"output_residual_stream": [True]}, {}, "E_BAD_PARAM at output_residual_stream"),
        ({"output_residual_stream": True, "capture": {}}, {}, "give one of them"),
        ({"steering": STEER}, {"apply_steering_vectors": "[]"}, "give one of them"),
        ({"steering": 5}, {}, "E_BAD_PARAM at steering: is an object with ops"),
        ({"steering": {"ops": [{"kind": "sub"}]}}, {}, "E_UNKNOWN_KIND at steering.ops[0].kind"),
        ({}, {"apply_steering_vectors": "[]"}, "is a list of steering vectors"),
        (
            {},
            {"apply_steering_vectors": '[{"layer_indices": [1]}]'},
            "E_BAD_PARAM at vllm_xargs.apply_steering_vectors",
        ),
        (
            {"apply_hooks": [{"fn": {}}]},
            {},
            "E_UNKNOWN_KIND at apply_hooks: code of a caller is never run: use steering",
        ),
        ({"output_qk": True}, {}, "E_UNKNOWN_KIND at output_qk"),
        ({"capture": {}, "activations_transport": "smoke"}, {}, "E_BAD_PARAM at activations_transport: no transport"),
        ({}, {"midstream": '{"prompt_len": -1}'}, "E_BAD_PARAM at vllm_xargs.midstream.prompt_len"),
        ({}, {"midstream": '{"key": 1}'}, "E_UNKNOWN_FIELD at vllm_xargs.midstream.key"),
        ({}, {"midstream": "[]"}, "E_BAD_PARAM at vllm_xargs.midstream"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], xargs: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        asked_of(fields, xargs)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_indices": [1]}, "[0].layer_indices: 1 layers for activations of 2"),
        ({"layer_indices": [1, -1]}, "E_LAYER_RANGE"),
        ({"position_indices": [0]}, "[0].position_indices: goes with activations [layers, positions, hidden]"),
        ({"activations": encode_tensor(torch.ones(4))}, "[0].activations: is torch.float32 [4]"),
        ({"activations": encode_tensor(torch.ones(2, 4, dtype=torch.int64))}, "[0].activations: is torch.int64"),
        ({"activations": encode_tensor(torch.full((2, 4), torch.nan))}, "not finite"),
        ({"scale": "3"}, "[0].scale"),
        ({"fn": 1}, "E_UNKNOWN_FIELD at apply_steering_vectors[0].fn"),
    ],
)
def test_steering_vectors_that_cannot_be(change: dict[str, Any], message: str) -> None:
    one = {"activations": encode_tensor(torch.ones(2, 4)), "layer_indices": [1, 2], **change}
    with pytest.raises(SpecError) as raised:
        steering_of([one])
    assert message in str(raised.value)
