"""Activations in JSON: what is written is read, and what is not that is said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from midstream.core.capture import CaptureReceipt
from midstream.core.errors import FileFormatError
from midstream.formats.activations import Activations, HeldTensor, Stack, held_tensors, read_activations

ROWS = 3


def made() -> Activations:
    stacks = [
        Stack("resid_post", (1, 4), torch.randn(2, ROWS, 5).bfloat16()),
        Stack("q", (1,), torch.randn(1, ROWS, 4)),
        Stack("q", (2,), torch.randn(1, ROWS, 8)),
    ]
    labels = np.array([0, 1, 5]), np.array([7, 8, 9]), np.array([False, False, True])
    return Activations(stacks, *labels, CaptureReceipt(ROWS, ROWS, 0, 1))


@pytest.mark.parametrize("held", [False, True])
def test_what_is_written_is_read(held: bool) -> None:
    one = made()
    tensors = {f"h{place}": stack.tensor for place, stack in enumerate(one.stacks)}
    plain = json.loads(json.dumps(one.plain(list(tensors) if held else None)))
    assert [found.handle for found in held_tensors(plain)] == (list(tensors) if held else [])
    again = read_activations(plain, lambda found: tensors[found.handle])
    assert again.receipt == one.receipt
    assert again.position.tolist() == [0, 1, 5]
    assert again.token_id.tolist() == [7, 8, 9]
    assert again.generated.tolist() == [False, False, True]
    for mine, theirs in zip(one.stacks, again.stacks, strict=True):
        assert (mine.site, mine.layers) == (theirs.site, theirs.layers)
        assert torch.equal(mine.tensor, theirs.tensor)
    if held:
        assert plain["resid_post"]["nbytes"] == 2 * ROWS * 5 * 2
        assert plain["resid_post"]["transport"] == "binary"
    assert [part["layers"] for part in plain["q"]] == [[1], [2]]


def test_no_rows_at_all() -> None:
    empty = np.zeros(0, dtype=np.int64)
    one = Activations([Stack("resid_post", (1,), torch.empty(1, 0, 4))], empty, empty, empty > 0, CaptureReceipt(0, 0))
    again = read_activations(one.plain(), lambda found: torch.empty(0))
    assert again.stacks[0].tensor.shape == (1, 0, 4)
    assert len(again.position) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"labels": {"position": [0, 1], "token_id": [7, 8, 9], "phase": ["prompt"] * 3}},
        {"labels": {"position": [0, 1, 2.5], "token_id": [7, 8, 9], "phase": ["prompt"] * 3}},
        {"labels": {"position": [0, 1, 2], "token_id": [7, 8, 9], "phase": ["prompt", "prompt", "other"]}},
        {"labels": {"position": [0, 1, 2], "token_id": [7, 8, 9]}},
        {"labels": None},
        {"receipt": {"selected": 3}},
        {"receipt": None},
        {"secret": {}},
        {"resid_post": {"layers": [1]}},
        {"resid_post": {"handle": "../etc", "nbytes": 1, "dtype": "float32", "shape": [1, 3, 4], "layers": [1]}},
    ],
)
def test_what_is_not_that_is_said(change: dict[str, Any]) -> None:
    plain = made().plain() | change
    with pytest.raises(FileFormatError, match="activations"):
        read_activations(plain, lambda found: torch.zeros(1, 3, 4))


def test_a_tensor_of_another_shape_is_said() -> None:
    plain = made().plain(["a", "b", "c"])

    def fetch(_: HeldTensor) -> torch.Tensor:
        return torch.zeros(1, 2, 3)

    with pytest.raises(FileFormatError, match=r"resid_post is \[1, 2, 3\], of 2 layers and 3 rows"):
        read_activations(plain, fetch)
    with pytest.raises(FileFormatError, match="is no object"):
        read_activations([], fetch)
