"""Sites and layer sets, as docs/semantics.md's "Layers" and "Sites" have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.errors import SpecError, UnsupportedOperationError
from midstream.core.sites import SITES, SiteLayout, as_site, layer_set

MOE_LAYERS = (1, 3, 5)


@settings(deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=20))
def test_ids_are_sorted_and_a_repeat_counts_once(layers: list[int]) -> None:
    for given_as in (
        layers,
        tuple(layers),
        set(layers),
        iter(layers),
        np.array(layers),
        dict.fromkeys(layers),
    ):
        found = layer_set(given_as, range(12))
        assert found == tuple(sorted(set(layers)))
        assert all(type(layer) is int for layer in found)


def test_none_is_all() -> None:
    assert layer_set(None, range(4)) == (0, 1, 2, 3)
    assert layer_set(None, MOE_LAYERS) == MOE_LAYERS  # of router_logits: all MoE layers


def test_one_id_without_a_list() -> None:
    assert layer_set(2, range(4)) == layer_set(np.int64(2), range(4)) == (2,)


def refusal(layers: Any, available: Any = range(30), **names: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        layer_set(layers, available, **names)
    assert caught.value.code == "E_LAYER_RANGE"
    assert not isinstance(caught.value, UnsupportedOperationError)
    return caught.value


@pytest.mark.parametrize("layers", [[], (), set(), range(0), np.array([], dtype=np.int64), iter(())])
def test_an_empty_list_is_refused(layers: Any) -> None:
    error = refusal(layers)
    assert error.path == "layers"
    assert "0" in error.message
    assert "29" in error.message


@pytest.mark.parametrize(
    "bad", [-1, 30, True, False, np.True_, 1.0, np.float32(1), "1", None, [1], float("nan"), 2**70]
)
def test_what_is_no_layer_is_refused_naming_the_range(bad: Any) -> None:
    error = refusal([0, bad])
    assert error.path == "layers[1]"
    assert "0 to 29" in error.message
    assert repr(bad) in error.message


@pytest.mark.parametrize("bad", [-1, 30, True, 1.5, "1", "12"])
def test_one_bad_id_without_a_list(bad: Any) -> None:
    assert "0 to 29" in refusal(bad).message


def test_a_dense_layer_asked_for_router_logits_is_refused() -> None:
    error = refusal([1, 2], MOE_LAYERS, path="capture.layers", what="router_logits")
    assert error.path == "capture.layers[1]"
    assert "router_logits" in error.message
    assert "1, 3, 5" in error.message


def test_a_model_of_one_layer_and_a_site_of_none() -> None:
    assert layer_set([0], range(1)) == (0,)
    assert "0" in refusal([1], range(1)).message
    assert "none" in refusal([0], ()).message


def test_the_sites() -> None:
    assert set(SITES) == {
        "resid_pre", "resid_post", "attn_out", "mlp_out", "head_out", "router_logits", "q", "k",
    }  # fmt: skip
    assert [as_site(site) for site in SITES] == list(SITES)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("layer_input", "resid_pre"),
        ("residual", "resid_post"),
        ("layer_output", "resid_post"),
        ("hidden_states", "resid_post"),
        ("attn", "attn_out"),
        ("mlp", "mlp_out"),
        ("attention_heads", "head_out"),
        ("output_qk", "'q' and 'k'"),
    ],
)
def test_the_name_of_another_tool_is_answered_with_ours(name: str, ours: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=rf"^E_SITE at sites\[1\]: .*{name}.*{ours}"):
        as_site(name, "sites[1]")


@pytest.mark.parametrize("name", ["resid", "", "RESID_POST", None, 3, True, ["q"], {"q": 1}])
def test_no_site_is_answered_with_all_of_them(name: Any) -> None:
    with pytest.raises(UnsupportedOperationError, match=r"^E_SITE at site: ") as caught:
        as_site(name)
    assert all(site in caught.value.message for site in SITES)


def test_layout_of_a_site_made_of_heads() -> None:
    assert SiteLayout(12) == SiteLayout(width=12, heads=None, head_size=None)
    assert {SiteLayout(12, 3, 4): 1}[SiteLayout(12, heads=3, head_size=4)] == 1
