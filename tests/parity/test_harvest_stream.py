"""A shuffled stream of a harvest: each row once in an epoch, the same batches from any place on and by any workers."""

from __future__ import annotations

import json
import multiprocessing
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import midstream as ms
from midstream import harvest
from midstream.harvest import Harvest, HarvestSpec
from midstream.harvest.streaming import _Order
from unit.tiny_checkpoint import save_tiny

OPTIONS: dict[str, Any] = {"batch": 16, "buffer": 60, "run": 7, "seed": 3}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    folder = tmp_path_factory.mktemp("stream")
    texts = [f"sample {number} " + "x" * (number % 11) for number in range(40)]
    with ms.load(save_tiny(folder / "tiny")) as lm:
        spec = HarvestSpec(capture=ms.CaptureSpec(layers=[1, 2]), shard_tokens=100)
        harvest.run(lm, texts, folder / "out", spec)
    return harvest.open(folder / "out")


def ordered(rows: torch.Tensor) -> list[tuple[float, ...]]:
    return sorted(map(tuple, rows.tolist()))


def test_each_row_once_and_mixed(found: Harvest) -> None:
    stream = found.stream(2, **OPTIONS)
    batches = list(stream)
    assert len(batches) == len(stream) > 3
    assert {len(one) for one in batches[:-1]} == {16}
    whole = found.rows(2)[:]
    assert ordered(torch.cat(batches)) == ordered(whole)
    assert not torch.equal(torch.cat(batches), whole)
    assert len(found.manifest.shards) > 3
    full = list(found.stream(2, **OPTIONS, drop_last=True))
    assert [len(one) for one in full] == [16] * (len(whole) // 16)


def test_another_seed_and_epoch_are_another_order(found: Harvest) -> None:
    stream = found.stream(2, **OPTIONS)
    first, second = torch.cat(list(stream)), torch.cat(list(stream))
    other = torch.cat(list(found.stream(2, **OPTIONS | {"seed": 4})))
    assert stream.epoch == 2
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(first, torch.cat(list(found.stream(2, **OPTIONS))))


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_it_goes_on_where_it_was_left(found: Harvest, taken: int) -> None:
    want = list(found.stream(2, **OPTIONS))
    stream = found.stream(2, **OPTIONS)
    begun = list(islice(stream, taken))
    state = json.loads(json.dumps(stream.state_dict()))
    again = found.stream(2, **OPTIONS | {"seed": 99})
    again.load_state_dict(state)
    assert all(map(torch.equal, [*begun, *again], want))
    assert again.epoch == 1
    with pytest.raises(ms.SpecError, match=r"state\.batch: is 16, and here it is 8"):
        found.stream(2, **OPTIONS | {"batch": 8}).load_state_dict(state)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("taken", [0, 4])
def test_workers_give_the_same_batches(found: Harvest, workers: int, taken: int) -> None:
    want = list(found.stream(2, **OPTIONS))[taken:]
    stream = found.stream(2, **OPTIONS)
    stream.taken = taken
    loader: Any = DataLoader(stream, batch_size=None, num_workers=workers)
    got = list(loader)
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def test_another_process_opens_it_again(found: Harvest) -> None:
    context = multiprocessing.get_context("spawn")
    loader: Any = DataLoader(
        found.stream(2, **OPTIONS), batch_size=None, num_workers=1, multiprocessing_context=context
    )
    assert all(map(torch.equal, list(loader), list(found.stream(2, **OPTIONS))))


def test_bad_options(found: Harvest) -> None:
    with pytest.raises(ms.SpecError, match="E_BAD_PARAM at batch: is 1 or more, got 0"):
        found.stream(2, batch=0)
    with pytest.raises(
        ms.SpecError, match=r"no resid_post\.7 in this harvest; there are: resid_post\.1, resid_post\.2"
    ):
        found.stream(7)


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 120), st.integers(1, 50))
def test_any_order_is_a_permutation(rows: int, run: int, buffer: int, batch: int) -> None:
    order = _Order(rows, run, buffer, (1, 2))
    got = [int(row) for start in range(0, rows, batch) for row in order[start : start + batch]]
    assert sorted(got) == list(range(rows))
    held = max(buffer // run, 1) * run
    for start in range(0, rows, held):
        assert len({row // run for row in got[start : start + held]}) <= 2 * (held // run) + 1
