"""Keys of blocks, how far a cache hit may go, and rows that are found again by their block's key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import midstream as ms
from midstream.backends.vllm.block_keys import chain
from midstream.backends.vllm.jobs import Job
from midstream.backends.vllm.plugin.prefix_cache import hit_limit
from midstream.backends.vllm.requests import EngineRequest
from midstream.backends.vllm.reuse import RowStore
from midstream.backends.vllm.rows import Collected
from midstream.core.capture import CaptureSpec
from midstream.core.interventions import InterventionSpec
from midstream.core.prompts import PreparedPrompt

VECTOR = np.ones(4, dtype=np.float32)


def wishes(length: int, **given: Any) -> EngineRequest:
    return EngineRequest(id="a", prompt_len=length, max_len=length + 4, **given)


def steer(**given: Any) -> InterventionSpec:
    return InterventionSpec.read(ms.add(VECTOR, layers=[2], **given))


@pytest.mark.parametrize(
    ("rows", "first", "limit"),
    [
        (None, 0, 0),
        ("prompt[-1]", 0, 9),
        ("prompt[3:5]", 0, 3),
        ("generated", 0, None),
        (None, 6, 6),
        ("prompt[2]", 6, None),
    ],
)
def test_a_hit_ends_where_the_first_wanted_row_is(rows: str | None, first: int, limit: int | None) -> None:
    capture = CaptureSpec(select=rows)  # pyright: ignore[reportArgumentType]
    assert hit_limit(wishes(10, capture=capture, first=first), list(range(10))) == limit


def test_a_gate_sees_the_whole_prompt_and_a_plain_steer_need_not() -> None:
    gate = {
        "layers": [0], "pooling": "mean", "readout": {"kind": "cosine", "d": VECTOR},
        "rule": {"kind": "per_layer", "threshold": 0.0, "compare": "ge", "combine": "all"},
    }  # fmt: skip
    assert hit_limit(wishes(10, steering=steer(gate=gate)), list(range(10))) == 0
    assert hit_limit(wishes(10, steering=steer()), list(range(10))) is None


ids = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(one=ids, other=ids)
def test_two_prompts_have_one_key_as_long_as_they_are_alike(one: list[int], other: list[int]) -> None:
    keys, others = list(chain(one, len(one), 4, None, None)), list(chain(other, len(other), 4, None, None))
    for place, (a, b) in enumerate(zip(keys, others, strict=False)):
        assert (a == b) == (one[: 4 * place + 4] == other[: 4 * place + 4])


def test_a_steer_changes_keys_from_its_first_row_on() -> None:
    prompt = list(range(16))
    plain = list(chain(prompt, 16, 4, None, None))
    late = list(chain(prompt, 16, 4, steer(rows="sequence[9:]"), None))
    assert [a == b for a, b in zip(plain, late, strict=True)] == [True, True, False, False]
    assert list(chain(prompt, 16, 4, steer(strength=0.0), None)) == plain
    last = list(chain(prompt, 16, 4, steer(rows="prompt[-1]"), None))
    longer = list(chain([*prompt, 1, 2, 3, 4], 20, 4, steer(rows="prompt[-1]"), None))
    assert [a == b for a, b in zip(last, longer, strict=False)] == [True, True, True, False]
    assert next(chain(prompt, 16, 4, None, "salt")) != plain[0]


def collected(request: int, positions: list[int], number: int = 1) -> Collected:
    n = np.array(positions, dtype=np.int64)
    return Collected(
        np.full(len(n), request),
        n,
        n + 100,
        np.full(len(n), number),
        n + 50,
        n * 0,
        [{}],
        [{"number": number, "nbytes": 60}],
    )


def job(prompt: list[int]) -> Job:
    return Job(PreparedPrompt(tuple(prompt)), None, (), (None,))


def test_rows_of_whole_blocks_are_found_again_until_they_are_evicted() -> None:
    store = RowStore(4, max_bytes=100)
    first = job(list(range(10)))
    spec = CaptureSpec(layers=[1])
    lookup = store.look_up(first, spec)
    assert (lookup.first, list(lookup.blocks)) == (0, [])
    store.promise("one", lookup)
    again = store.look_up(job(list(range(9))), spec)
    assert (again.first, [start for _, start in again.blocks]) == (8, [0, 4])
    assert not store.has(again.blocks[0][0])
    store.keep("one", lookup, [collected(0, list(range(10)))])
    assert store.evict() == []
    (lines,) = store.rows_of(again.blocks, np.array([1, 6]))
    assert lines[0].position.tolist() == [1, 6]
    assert lines[0].row.tolist() == [51, 56]
    assert store.look_up(first, CaptureSpec(layers=[2])).first == 0
    other = store.look_up(job([9] * 8), spec)
    store.promise("two", other)
    store.keep("two", other, [collected(0, list(range(8)), 2)])
    assert store.evict(pinned=["one"]) == ["two"]
    assert store.look_up(first, spec).first == 8
    store.max_bytes = 10
    assert store.evict() == ["one"]
    assert store.look_up(first, spec).first == 0


def test_rows_that_only_some_of_a_block_were_taken_of_are_not_promised() -> None:
    store = RowStore(4)
    spec = CaptureSpec(layers=[1], select="prompt[1:6]")  # pyright: ignore[reportArgumentType]
    lookup = store.look_up(job(list(range(10))), spec)
    store.promise("one", lookup)
    assert store.look_up(job(list(range(10))), spec).first == 0
    whole = CaptureSpec(layers=[1])
    rows = store.look_up(job(list(range(10))), whole)
    store.promise("two", rows)
    assert store.look_up(job(list(range(10))), spec).first == 8
    store.forget_promises("two")
    assert store.look_up(job(list(range(10))), spec).first == 0


def test_a_capture_of_the_last_row_needs_no_store() -> None:
    store = RowStore(4)
    assert store.look_up(job(list(range(8))), CaptureSpec(select="prompt[-1]")).first == 0  # pyright: ignore
    assert store.look_up(job(list(range(9))), CaptureSpec(select="prompt[-1]")).keys == ()  # pyright: ignore
