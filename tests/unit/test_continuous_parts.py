"""Parts of the embedded engine: caches whose rows come and go, prompts that run together, who comes next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from midstream.backends.huggingface.continuous.batches import Batch, Prefill, prefills
from midstream.backends.huggingface.continuous.line import PASSED, Line, table_for
from midstream.core.generation import GenerationParams

# --- caches that come together and part


WINDOWS = (None, 3, 6)


def new_layers() -> Cache:
    return Cache(layers=[DynamicLayer() if of is None else DynamicSlidingWindowLayer(of) for of in WINDOWS])


def put(cache: Cache, values: torch.Tensor) -> None:
    """More columns `[rows, columns]`, to every layer."""
    for layer in range(len(WINDOWS)):
        cache.update(values[:, None, :, None].float(), -values[:, None, :, None].float(), layer)


def row(prompt: list[int]) -> Any:
    params = GenerationParams(max_tokens=99)
    return SimpleNamespace(
        request=0,
        prompt=prompt,
        prompt_len=len(prompt),
        token_ids=[],
        tapped=False,
        gated=False,
        table=0,
        stopping=SimpleNamespace(params=params),
    )


def prefilled(prompts: list[list[int]], chunk: int) -> Batch:
    prefill = Prefill([row(prompt) for prompt in prompts], chunk if len(prompts) == 1 else 99, new_layers())
    while not prefill.ended:
        step = prefill.next()
        assert step.ids.shape[1] <= prefill.chunk
        put(prefill.cache, step.ids)
    return prefill.batch()


def check(batch: Batch, sequences: list[list[int]]) -> None:
    width = max(map(len, sequences), default=0)
    assert batch.mask.shape == (len(sequences), batch.columns)
    for place, sequence in enumerate(sequences):
        assert batch.mask[place].tolist() == [0] * (batch.columns - len(sequence)) + [1] * len(sequence)
    for layer, window in zip(batch.cache.layers, WINDOWS, strict=True):
        held = batch.columns if window is None else min(batch.columns, window - 1)
        assert layer.keys.shape == (len(sequences), 1, held, 1)
        assert layer.get_seq_length() == batch.columns
        for place, sequence in enumerate(sequences):
            tail = sequence[-held:] if held else []
            assert layer.keys[place, 0, held - len(tail) :, 0].tolist() == tail
            assert layer.values[place, 0, held - len(tail) :, 0].tolist() == [-token for token in tail]
    assert batch.columns >= width


PROMPTS = st.lists(st.integers(1, 12), min_size=1, max_size=4)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("join"), PROMPTS, st.integers(1, 5)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("leave"), st.lists(st.booleans(), min_size=12, max_size=12), st.just(0)),
    ),
    max_size=12,
)


@given(PROMPTS, MOVES)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_caches_hold_the_ends_of_their_rows(first: list[int], moves: list[tuple[str, Any, int]]) -> None:
    numbers = iter(range(1, 10_000))

    def prompts_of(lengths: list[int]) -> list[list[int]]:
        return [[next(numbers) for _ in range(length)] for length in lengths]

    sequences = prompts_of(first)
    batch = prefilled([list(one) for one in sequences], 3)
    check(batch, sequences)
    for kind, what, chunk in moves:
        if kind == "join":
            more = prompts_of(what)
            batch.join(prefilled([list(one) for one in more], chunk))
            sequences = [*sequences, *more]
        elif kind == "step":
            for _ in range(what):
                for one, sequence in zip(batch.rows, sequences, strict=True):
                    one.token_ids = [next(numbers)]
                    sequence.append(one.token_ids[0])
                put(batch.cache, batch.next().ids)
        else:
            stays = [*what, *[True] * len(sequences)][: len(sequences)]
            if not any(stays):
                continue
            for one, stay in zip(batch.rows, stays, strict=True):
                one.stays = stay
            batch.keep(lambda one: one.stays)
            sequences = [sequence for sequence, stay in zip(sequences, stays, strict=True) if stay]
            if not all(stays):
                assert batch.columns == max(map(len, sequences))
        check(batch, sequences)


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 100), st.integers(1, 50), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_prompts_run_together_under_the_budget(lengths: list[int], budget: int, chunk: int, padded: bool) -> None:
    rows = [row(list(range(length))) for length in lengths]
    found = prefills(rows, budget, chunk, padded, lambda one: False)
    assert sorted(id(one) for prefill in found for one in prefill.rows) == sorted(map(id, rows))
    for prefill in found:
        sizes = [len(one.prompt) for one in prefill.rows]
        if len(sizes) > 1:
            assert len(sizes) * max(sizes) <= budget
            assert max(sizes) <= chunk
            assert padded or len(set(sizes)) == 1


# --- who comes next


def test_a_line_lets_small_ones_pass_but_not_for_ever() -> None:
    line = Line[int](lambda size: ("place", "rows") if size > 10 else ("place",))

    def few(size: int) -> str | None:
        return "place" if size > 90 else None

    def full(size: int) -> str | None:
        return "rows" if size > 10 else None

    line.add(100)
    for _ in range(PASSED + 5):
        line.add(1)
    passed = 0
    while line.take(few) is not None:
        passed += 1
    assert passed == PASSED
    assert line.take(full) == 1, "it wants nothing that the first lacks"
    line.add(20)
    assert [line.take(lambda size: "rows" if size > 90 else None) for _ in range(5)] == [1, 1, 1, 1, None]
    assert line.take(lambda _: None) == 100
    assert line.take(few) == 20
    assert not len(line)


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=40), st.integers(1, 100))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_tables_hold_no_more_than_there_is(moves: list[tuple[int, bool]], most: int) -> None:
    tables: dict[int, list[int]] = {}
    for reach, goes in moves:
        sizes = {number: (len(of), max(of)) for number, of in tables.items()}
        table = table_for(sizes, reach, most)
        if table is not None:
            tables.setdefault(table, []).append(reach)
        else:
            assert sum(count * longest for count, longest in sizes.values()) + reach > most
        assert sum(len(of) * max(of) for of in tables.values()) <= most
        if goes and tables:
            first = next(iter(tables))
            tables[first].pop()
            tables = {number: of for number, of in tables.items() if of}
