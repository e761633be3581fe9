"""Steering through the model's own generate where its cache counts no tokens: recurrent models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import midstream as ms


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_recurrent_model_is_steered_through_its_own_generate(use_cache: bool, tiny: Any) -> None:
    lm = tiny("mamba").lm
    given = {"max_tokens": 4, "ignore_eos": True, "extra": {"use_cache": use_cache}}
    vector = torch.linspace(-1, 1, lm.facts.hidden_size) * 50
    (plain,) = lm.generate([[5, 6, 7]], **given)
    (steered,) = lm.generate([[5, 6, 7]], steering=ms.add(vector, layers=[0], rows="generated"), **given)
    assert steered.token_ids[0] == plain.token_ids[0]  # generated rows do not change the first generated token
    assert steered.token_ids != plain.token_ids
    assert steered.steering[0].computed >= 3


def test_without_the_models_own_generate_it_says_what_to_do(tiny: Any) -> None:
    lm = tiny("mamba").lm
    with pytest.raises(ms.UnsupportedOperationError, match="cache cannot be decoded here"):
        lm.generate([[5, 6, 7]], max_tokens=2)
