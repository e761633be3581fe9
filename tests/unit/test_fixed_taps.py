"""Taps of a recorded graph: buffers that never move, and the rows that a replay leaves in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import midstream as ms
from midstream.core.errors import CaptureError
from midstream.taps.fixed import FixedTaps, plain_add

WIDTH, ROWS = 8, 6
GATE = {
    "layers": [0], "pooling": "mean", "readout": {"kind": "cosine", "d": np.ones(4)},
    "rule": {"kind": "per_layer", "threshold": 0.0, "compare": "ge", "combine": "all"},
}  # fmt: skip
PLACES = (3, 5)


def made(dtype: torch.dtype = torch.float32) -> FixedTaps:
    return FixedTaps(dict.fromkeys(PLACES, WIDTH), ROWS, dtype, torch.device("cpu"))


def model(hidden: Tensor, residual: Tensor, taps: FixedTaps | None) -> tuple[Tensor, Tensor]:
    """Two blocks that fuse the residual, as a recorded graph would run them: nothing here looks at a Python value."""
    for place in PLACES:
        residual = residual + hidden
        hidden = torch.tanh(residual)
        if taps is not None:
            taps.at(place, hidden, residual)
    return hidden, residual


def expected(hidden: Tensor, residual: Tensor, read: Any, added: dict[int, Tensor]) -> dict[int, Tensor]:
    """The same with Python between the blocks."""
    found: dict[int, Tensor] = {}
    for place in PLACES:
        residual = residual + hidden
        hidden = torch.tanh(residual)
        for row, more in zip(read, added.get(place, torch.zeros(len(read), WIDTH)), strict=True):
            hidden[row] = hidden[row] + more
        found[place] = (hidden + residual)[torch.from_numpy(read)]
    return found


def test_a_hundred_passes_on_the_same_buffers() -> None:
    taps, rng = made(), np.random.default_rng(0)
    addresses = [one.data_ptr() for one in taps.buffers]
    for step in range(100):
        size = int(rng.integers(1, 12))
        read = np.sort(rng.permutation(size)[: rng.integers(0, min(size, ROWS) + 1)]).astype(np.int64)
        hidden, residual = torch.randn(size, WIDTH), torch.randn(size, WIDTH)
        added = {place: torch.randn(len(read), WIDTH) for place in PLACES if rng.random() < 0.5}
        want = expected(hidden.clone(), residual.clone(), read, added)
        taps.fill(read, added)
        after, _ = model(hidden.clone(), residual.clone(), taps)
        for place in PLACES:
            assert torch.allclose(taps.left(place), want[place], atol=1e-6), step
            assert torch.equal(taps.added(place), added.get(place, torch.full_like(want[place], -0.0)))
        if not added:  # what is read is not changed
            assert torch.equal(after, model(hidden.clone(), residual.clone(), None)[0])
        assert [one.data_ptr() for one in taps.buffers] == addresses


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=0, max_size=ROWS, unique=True), st.integers(0, 2**31))
def test_rows_that_nobody_reads_are_bit_equal(read: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    taps, hidden = made(torch.bfloat16), torch.randn(10, WIDTH, generator=generator).bfloat16()
    before = hidden.clone()
    taps.fill(np.array(sorted(read), dtype=np.int64), {3: torch.ones(len(read), WIDTH)})
    taps.at(3, hidden, None)
    others = [row for row in range(10) if row not in read]
    assert torch.equal(hidden[others], before[others])
    assert torch.equal(hidden[sorted(read)], before[sorted(read)] + 1)
    taps.fill(np.zeros(0, dtype=np.int64), {})  # nothing of the pass before is left to add
    again = hidden.clone()
    taps.at(3, hidden, None)
    assert torch.equal(hidden, again)


def test_a_pass_that_leaves_nothing_is_seen() -> None:
    taps = made()
    taps.forget()
    taps.fill(np.array([0]), {})
    taps.at(3, torch.ones(2, WIDTH), None)
    assert torch.isfinite(taps.left(3)).all()
    assert torch.isnan(taps.left(5)).all()


@pytest.mark.parametrize(
    ("spec", "plain"),
    [
        (ms.add(np.ones(4), layers=[0]), True),
        (ms.add(np.ones((2, 4)), layers=[0], positions=[3, 4]), True),
        (ms.add(np.ones(4), layers=[0], norm_match=True), False),
        (ms.add(np.ones(4), layers=[0], strength=0.0), False),
        (ms.add(np.ones(4), layers=[0], cap_norm=True), False),
        (ms.add(np.ones(4), layers=[0], only_aligned={"measure": "cosine", "above": 0.0}), False),
        (ms.add(np.ones(4), layers=[0], gate=GATE), False),
        (ms.ablate(np.ones(4), layers=[0]), False),
        (ms.replace(np.ones(4), layers=[0]), False),
    ],
)
def test_what_can_be_written_down_before_the_pass(spec: ms.InterventionSpec, plain: bool) -> None:
    assert plain_add(spec.ops[0]) is plain


def test_minus_zero_is_kept_and_too_many_rows_are_refused() -> None:
    taps, hidden = made(torch.bfloat16), torch.full((3, WIDTH), -0.0, dtype=torch.bfloat16)
    taps.fill(np.array([1], dtype=np.int64), {5: torch.ones(1, WIDTH)})
    taps.at(3, hidden, None)
    assert torch.equal(hidden.view(torch.int16), torch.full((3, WIDTH), -0.0, dtype=torch.bfloat16).view(torch.int16))
    assert torch.equal(taps.left(3).view(torch.int16), hidden[1:2].view(torch.int16))
    with pytest.raises(CaptureError, match="7 rows, and a recorded graph reads 6"):
        taps.fill(np.arange(7), {})
