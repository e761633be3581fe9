"""CaptureSpec on the wire, and the labels and the receipt of what it gives."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.capture import (
    STORAGE_DTYPES,
    CaptureReceipt,
    CaptureSpec,
    Labels,
    as_storage_dtype,
)
from midstream.core.errors import SpecError, UnsupportedOperationError
from midstream.core.generation import GenerationParams
from midstream.core.select import SelectSpec
from midstream.core.sites import SITES, layer_set

SELECTS = [
    "prompt",
    "generated[3:]",
    "prompt, generated, !prompt[0]",
    "prompt[-4:-1], sequence[17]",
    "prompt{5,7}",
]

specs = st.builds(
    CaptureSpec,
    sites=st.lists(st.sampled_from(SITES), min_size=1, unique=True),
    layers=st.none() | st.lists(st.integers(0, 40), min_size=1),
    select=st.none() | st.sampled_from(SELECTS),
    dtype=st.none() | st.sampled_from(STORAGE_DTYPES),
)


def refusal(**fields: Any) -> SpecError:
    with pytest.raises(SpecError) as by_name:
        CaptureSpec(**fields)
    with pytest.raises(SpecError) as from_object:
        CaptureSpec.of(fields)
    error = by_name.value
    assert str(error) == str(from_object.value) == f"{error.code} at {error.path}: {error.message}"
    assert isinstance(error, UnsupportedOperationError) is (error.code == "E_SITE")
    return error


# --- the wire form


@settings(deadline=None)
@given(specs)
def test_canonical_round_trip(spec: CaptureSpec) -> None:
    canonical = spec.canonical()
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), allow_nan=False)
    again = CaptureSpec.of(json.loads(text))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.canonical() == canonical
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_defaults() -> None:
    spec = CaptureSpec()
    assert (spec.sites, spec.layers, spec.select, spec.dtype) == (("resid_post",), None, None, None)
    assert spec == CaptureSpec(sites="resid_post") == CaptureSpec.of({}) == CaptureSpec(layers=None, select=None)


def test_select_takes_the_grammar_the_object_and_a_spec() -> None:
    select = SelectSpec(prompt="all", exclude_prompt_positions=[0])
    spec = CaptureSpec(select=select)
    assert spec == CaptureSpec(select="prompt, !prompt[0]") == CaptureSpec(select=select.canonical())
    assert spec.canonical()["select"] == select.canonical()
    assert type(spec.select) is SelectSpec


def test_equal_captures_have_one_canonical_form() -> None:
    """Ids are sorted and a repeat counts once; so are the names of sites."""
    spec = CaptureSpec(layers=[3, 1, 3], sites=["q", "k", "q"])
    assert spec.layers == (1, 3)
    assert spec.sites == ("q", "k")
    assert spec.canonical() == CaptureSpec(layers=[1, 3], sites=["q", "k"]).canonical()


def test_the_short_form() -> None:
    assert CaptureSpec.short() == CaptureSpec()
    last = CaptureSpec.short([2], mode="last_token", location="layer_input")
    assert last == CaptureSpec(sites="resid_pre", layers=[2], select="prompt[-1]")
    wrong: dict[str, Any]
    for wrong in ({"mode": "first_token"}, {"location": "attn"}):
        with pytest.raises(SpecError):
            CaptureSpec.short([2], **wrong)


def test_layers_from_numpy_and_range() -> None:
    assert CaptureSpec(layers=np.array([0, 2])).layers == (0, 2)
    assert CaptureSpec(layers=[np.int64(0), np.int32(2)]).layers == CaptureSpec(layers=range(0, 3, 2)).layers
    assert all(type(layer) is int for layer in CaptureSpec(layers=[np.int64(2)]).layers or ())


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_json_schema(mode: Any) -> None:
    schema = CaptureSpec.model_json_schema(mode=mode)
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {"sites", "layers", "select", "dtype"}
    assert all(site in json.dumps(schema) for site in SITES)


def test_bounds_in_a_json_schema_are_the_standards() -> None:
    found = GenerationParams.model_json_schema()["properties"]
    assert found["max_tokens"]["minimum"] == 1
    assert {"exclusiveMinimum": 0, "maximum": 1, "type": "number"} in found["top_p"]["anyOf"]
    assert "ge" not in str(found).split("'")


def test_json_schema_of_a_select() -> None:
    schema = SelectSpec.model_json_schema()
    assert schema["additionalProperties"] is False
    assert {"prompt", "exclude_sequence_window", "generation_tokens"} <= set(schema["properties"])


def test_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        CaptureSpec().layers = (1,)


# --- refusals, with code and path


@pytest.mark.parametrize("name", ["layer", "rows", "site", "per_prompt_select", "capture", "self"])
def test_an_unknown_field_is_refused(name: str) -> None:
    error = None
    with pytest.raises(SpecError) as caught:
        CaptureSpec.of({name: 1})
    error = caught.value
    assert (error.code, error.path) == ("E_UNKNOWN_FIELD", f"capture.{name}")
    assert "sites, layers, select, dtype" in error.message


@pytest.mark.parametrize("empty", [[], (), set(), range(0), np.array([], dtype=np.int64)], ids=repr)
def test_empty_layers(empty: Any) -> None:
    error = refusal(layers=empty)
    assert (error.code, error.path) == ("E_LAYER_RANGE", "capture.layers")


@pytest.mark.parametrize("bad", [True, 1.0, "1", None, [1]], ids=repr)
def test_a_layer_that_is_no_integer(bad: Any) -> None:
    assert refusal(layers=[0, bad]).path == "capture.layers[1]"


@pytest.mark.parametrize("bad", ["12", 1.5, {"0": 1}], ids=repr)
def test_layers_that_are_no_list(bad: Any) -> None:
    assert refusal(layers=bad).path.startswith("capture.layers")


def test_a_negative_layer_is_refused_at_the_latest_by_the_model() -> None:
    with pytest.raises(SpecError, match=r"^E_LAYER_RANGE at capture\.layers\[0\]: "):
        layer_set(CaptureSpec(layers=[-1]).layers, range(4), "capture.layers")


def test_empty_sites() -> None:
    error = refusal(sites=[])
    assert (error.code, error.path) == ("E_SITE", "capture.sites")


@pytest.mark.parametrize("bad", ["residual", "nothing", 3, None, ["q"]], ids=repr)
def test_a_site_that_is_none(bad: Any) -> None:
    error = refusal(sites=["resid_post", bad])
    assert (error.code, error.path) == ("E_SITE", "capture.sites[1]")


@pytest.mark.parametrize("bad", [3, 1.5, True, {"q": 1}], ids=repr)
def test_sites_that_are_no_list(bad: Any) -> None:
    assert refusal(sites=bad).path.startswith("capture.sites")


def test_one_site_of_another_tool() -> None:
    error = refusal(sites="residual")
    assert error.code == "E_SITE"
    assert "resid_post" in error.message


@pytest.mark.parametrize(
    ("select", "code", "path"),
    [
        ({}, "E_SELECTION", "capture.select"),
        ("", "E_SELECTION", "capture.select"),
        ("prompts", "E_SELECTION", "capture.select"),
        (5, "E_SELECTION", "capture.select"),
        ({"prompt_positions": []}, "E_SELECTION", "capture.select.prompt_positions"),
        ({"prompt_positions": [1.5]}, "E_SELECTION", "capture.select.prompt_positions"),
        ({"prompt": "al"}, "E_SELECTION", "capture.select.prompt"),
        ({"sequence_window": [-1, None]}, "E_SELECTION", "capture.select.sequence_window"),
        (
            {"prompt": "all", "exclude_generation_tokens": [1]},
            "E_SELECTION",
            "capture.select.exclude_generation_tokens",
        ),
        ({"prompts": "all"}, "E_UNKNOWN_FIELD", "capture.select.prompts"),
        ({"prompt": "all", "select": 1}, "E_UNKNOWN_FIELD", "capture.select.select"),
        ({"prompt": "all", "capture": 1}, "E_UNKNOWN_FIELD", "capture.select.capture"),
    ],
    ids=str,
)
def test_a_bad_select(select: Any, code: str, path: str) -> None:
    error = refusal(select=select)
    assert (error.code, error.path) == (code, path)


@pytest.mark.parametrize("bad", ["int8", "float", "float8_e4m3fn", "torch.bool", torch.int8, np.uint8, 32, ""])
def test_a_bad_dtype(bad: Any) -> None:
    error = refusal(dtype=bad)
    assert (error.code, error.path) == ("E_BAD_PARAM", "capture.dtype")
    assert all(name in error.message for name in STORAGE_DTYPES)


@pytest.mark.parametrize("value", [None, [1], "resid_post", 3])
def test_what_is_no_spec(value: Any) -> None:
    with pytest.raises(SpecError, match=r"^E_BAD_PARAM at capture: "):
        CaptureSpec.of(value)


# --- dtypes


def test_the_storage_dtypes() -> None:
    assert set(STORAGE_DTYPES) == {"float16", "bfloat16", "float32", "float64", "int32", "int64"}
    for name in STORAGE_DTYPES:
        forms: list[Any] = [name, f"torch.{name}", getattr(torch, name)]
        if name != "bfloat16":
            forms += [getattr(np, name), np.dtype(name)]
        assert {as_storage_dtype(form) for form in forms} == {name}
        assert CaptureSpec(dtype=getattr(torch, name)).canonical()["dtype"] == name
    assert as_storage_dtype(None) is None


# --- labels and receipt


def labels(rows: list[tuple[int, int, int, int, bool]]) -> Labels:
    return Labels(*(np.array(column) for column in zip(*rows, strict=True)))


ROWS = [(0, -1, 0, 9, False), (0, -1, 1, 8, False), (0, 0, 2, 7, True), (2, -1, 0, 6, False)]


def test_labels() -> None:
    table = labels(ROWS)
    assert len(table) == 4
    assert table.phase.tolist() == ["prompt", "prompt", "generation", "prompt"]
    assert table == labels(ROWS)
    assert table != labels([*ROWS[:3], (2, -1, 0, 5, False)])
    assert table != labels(ROWS[:3])
    assert table.take(np.array([True, False, True, False])) == labels([ROWS[0], ROWS[2]])
    assert table.take(np.array([3, 0])) == labels([ROWS[3], ROWS[0]])
    assert "4 rows of 2 samples" in repr(table)


def test_columns_of_different_lengths_are_refused() -> None:
    one, two = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
    with pytest.raises(ValueError, match="different lengths"):
        Labels(two, two, one, two, two.astype(np.bool_))


def test_receipt() -> None:
    assert CaptureReceipt(selected=5, computed=3, reused=2).complete
    assert not CaptureReceipt(selected=5, computed=3).complete
