"""The recorder against a brute-force table, under any schedule an engine may choose."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midstream.core.errors import CaptureError
from midstream.core.select import SelectSpec
from midstream.taps.recorder import Recorded, RecordedRequest, Recorder
from midstream.taps.step import Run, StepBatch, step_of, whole_sequence

CPU = torch.device("cpu")

# --- selects, each with its meaning for one row (position p, prompt length n, token t)

SELECTS: list[tuple[str | None, Callable[[int, int, int], bool]]] = [
    (None, lambda p, n, t: True),
    ("prompt", lambda p, n, t: p < n),
    ("generated", lambda p, n, t: p >= n),
    ("prompt[-1]", lambda p, n, t: p == n - 1),
    ("prompt[4]", lambda p, n, t: p == 4 < n),
    ("prompt[-2:], generated[1:]", lambda p, n, t: n - 2 <= p < n or p > n),
    ("sequence[1:4]", lambda p, n, t: 1 <= p < 4),
    ("sequence, !prompt[0]", lambda p, n, t: p > 0),
    ("prompt{1}, generated{2,3}", lambda p, n, t: t == 1 if p < n else t in (2, 3)),
    ("generated, !generated{2}", lambda p, n, t: p >= n and t != 2),
    ("generated[90]", lambda p, n, t: False),
]

# --- what is to be recorded


@dataclass
class Choice:
    """One choice of one sample, and how far an engine has come with it."""

    sample: int
    choice: int
    prompt: list[int]
    generated: list[int]
    select: int
    max_len: int
    group: int = 0  # whose first `shared` rows stand in a batch once, owned by each
    shared: int = 0
    with_prompt: bool = True
    done: int = 0
    known: int = 0

    def __post_init__(self) -> None:
        self.known = len(self.prompt)

    @property
    def consumed(self) -> list[int]:
        """Every token but the last generated one."""
        return [*self.prompt, *self.generated[:-1]]

    def request(self) -> RecordedRequest:
        select = SelectSpec.read(SELECTS[self.select][0])
        return RecordedRequest(self.sample, self.choice, self.prompt, self.max_len, select, self.with_prompt)

    def row_is(self, position: int) -> tuple[Any, ...]:
        """What decides a row's values: a later choice's prompt rows differ, to show when they are taken."""
        owner = ("group", self.group) if position < self.shared else (self.sample, self.choice)
        return (*owner, position, self.consumed[position])


SITES: dict[str, tuple[tuple[int, ...], int, torch.dtype]] = {
    "resid_post": ((0, 2), 4, torch.float32),
    "mlp_out": ((2,), 3, torch.bfloat16),  # a width whose bytes are no multiple of eight
    "router_logits": ((1,), 2, torch.float64),
}
KEYS = [(site, layer) for site, (layers, _, _) in SITES.items() for layer in layers]


@cache
def values_of(site: str, layer: int, row: tuple[Any, ...]) -> Tensor:
    """A row of random bits, the same for the same row: NaN, infinities and −0 among them."""
    _, width, dtype = SITES[site]
    rng = np.random.default_rng(zlib.crc32(repr((site, layer, row)).encode()))
    return torch.frombuffer(bytearray(rng.bytes(width * dtype.itemsize)), dtype=dtype)


def bits(values: Tensor) -> list[Any]:
    return values.contiguous().view(torch.uint8).reshape(len(values), -1).tolist()


tokens = st.integers(0, 3)


@st.composite
def requests(draw: st.DrawFn) -> list[Choice]:
    out: list[Choice] = []
    selects = st.integers(0, len(SELECTS) - 1)
    one_select = draw(st.none() | selects)
    for sample in range(draw(st.integers(1, 4))):
        if out and draw(st.booleans()):  # begins as the one before it
            group, shared = out[-1].group, out[-1].shared
            prompt = out[-1].prompt[:shared] + draw(st.lists(tokens, min_size=not shared, max_size=4))
        else:
            group, prompt = sample, draw(st.lists(tokens, min_size=1, max_size=6))
            shared = draw(st.integers(0, len(prompt)))
        select = draw(selects) if one_select is None else one_select
        max_tokens = draw(st.integers(1, 5))
        max_len = len(prompt) + max_tokens - 1
        for choice in range(draw(st.integers(1, 3))):
            generated = draw(st.lists(tokens, max_size=max_tokens))  # fewer: an early EOS
            out.append(Choice(sample, choice, prompt, generated, select, max_len, group, shared, choice == 0))
    return out


# --- an engine: any composition of passes, padding, preemption


@dataclass
class Pass:
    """One forward pass being put together: who owns each flat row, and what it holds."""

    holds: list[tuple[Choice, int] | None] = field(default_factory=list)
    owned: list[tuple[int, int, int]] = field(default_factory=list)  # flat row, request, position

    def add(self, owners: Sequence[int], one: Choice, start: int, stop: int) -> None:
        first = len(self.holds)
        self.holds += [(one, position) for position in range(start, stop)]
        self.owned += [(first + p - start, owner, p) for owner in owners for p in range(start, stop)]

    def step(self, every: Sequence[Choice]) -> StepBatch:
        columns = [(row, of, p, every[of].consumed[p], len(every[of].prompt)) for row, of, p in self.owned]
        table = np.array(columns, dtype=np.int64).reshape(-1, 5).T.copy()
        return StepBatch(len(self.holds), *table)

    def values(self, site: str, layer: int) -> Tensor:
        rows = torch.full((len(self.holds), SITES[site][1]), 77, dtype=SITES[site][2])  # padding holds something
        for row, held in enumerate(self.holds):
            if held is not None:
                rows[row] = values_of(site, layer, held[0].row_is(held[1]))
        return rows


def run(recorder: Recorder, every: list[Choice], random: Random) -> None:
    """Drive the recorder until every row was computed."""
    unshared = {one.group for one in every if one.shared}
    preemptions = random.randint(0, 3)
    while unfinished := [place for place, one in enumerate(every) if one.done < len(one.consumed)]:
        now = Pass()
        random.shuffle(unfinished)
        for place in unfinished[: random.randint(1, len(unfinished))]:
            one = every[place]
            now.holds += [None] * random.choice([0, 0, 0, 1, 2])
            if one.group in unshared:  # its shared rows first, in chunks, for all at once
                group = [index for index, other in enumerate(every) if other.group == one.group]
                random.shuffle(group)
                stop = random.randint(one.done + 1, one.shared)
                now.add(group, one, one.done, stop)
                for index in group:
                    every[index].done = stop
                unshared -= {one.group} if stop == one.shared else set()
                continue
            if preemptions and random.random() < 0.2:
                preemptions -= 1
                one.done = 0  # from scratch; what was generated is kept
            if one.done == len(one.consumed):
                continue
            one.known += one.done == one.known  # a token was sampled
            stop = random.randint(one.done + 1, one.known)
            now.add([place], one, one.done, stop)
            one.done = stop
        now.holds += [None] * random.choice([0, 0, 2])
        recorder.begin(now.step(every), CPU)
        for site, layer in random.sample(KEYS, len(KEYS)):
            live = now.values(site, layer)
            recorder.record(site, layer, live[None] if random.random() < 0.5 else live)  # pyright: ignore
            live.view(torch.uint8).fill_(0x55)  # the engine goes on with its buffer
        recorder.end()


def check(got: Recorded, every: list[Choice]) -> None:
    """The result equals the table, read off the ids alone."""
    table = [
        (one.sample, -1 if p < len(one.prompt) else one.choice, p, token, p >= len(one.prompt), one)
        for one in every
        for p, token in enumerate(one.consumed)
        if (one.with_prompt or p >= len(one.prompt)) and SELECTS[one.select][1](p, len(one.prompt), token)
    ]
    table.sort(key=lambda row: row[:3])
    for place, name in enumerate(("sample", "choice", "position", "token_id", "generated")):
        assert getattr(got.labels, name).tolist() == [row[place] for row in table], name
    assert got.errors == {}
    # a row that several requests share is computed for one of them and reused by the others
    assert got.receipt.selected == got.receipt.computed + got.receipt.reused == len(table)
    assert [receipt.selected for receipt in got.receipts] == [
        sum(row[0] == sample for row in table) for sample in range(len(got.receipts))
    ]
    assert set(got.tensors) == (set(KEYS) if table else set())
    for (site, layer), tensor in got.tensors.items():
        assert tensor.dtype == SITES[site][2]
        expected = torch.stack([values_of(site, layer, row[5].row_is(row[2])) for row in table])
        assert bits(tensor) == bits(expected)


def recorder_of(every: Sequence[Choice], **options: Any) -> Recorder:
    sites = {site: layers for site, (layers, _, _) in SITES.items()}
    return Recorder(sites, [one.request() for one in every], **options)  # pyright: ignore[reportArgumentType]


@settings(deadline=None)
@given(requests(), st.integers(0, 2**32))
def test_any_schedule_gives_the_table(every: list[Choice], seed: int) -> None:
    recorder = recorder_of(every)
    run(recorder, every, Random(seed))
    only_prompts = not any(one.generated for one in every) and seed % 2
    check(recorder.finish(None if only_prompts else [one.generated for one in every]), every)


def test_step_of() -> None:
    step = step_of([Run(3, 8, 4, [5, 6], 5), Run(1, 0, 0, [], 2), Run(0, 2, 0, [7], 1)], 16)
    assert step.size == 16
    assert len(step) == 3
    assert step.row.tolist() == [8, 9, 2]
    assert step.request.tolist() == [3, 3, 0]
    assert step.position.tolist() == [4, 5, 0]
    assert step.token_id.tolist() == [5, 6, 7]
    assert step.prompt_len.tolist() == [5, 5, 1]
    assert step.take(np.array([2, 0])).row.tolist() == [2, 8]
    assert len(step_of([], 4)) == 0
    assert whole_sequence([7, 8, 9], 2).position.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="different lengths"):
        StepBatch(1, *[np.zeros(length, dtype=np.int64) for length in (1, 1, 2, 1, 1)])


# --- what goes wrong is said


def one_pass(recorder: Recorder, step: StepBatch, keys: Sequence[Any] = KEYS) -> None:
    recorder.begin(step, CPU)
    for site, layer in keys:
        recorder.record(site, layer, torch.zeros(step.size, SITES[site][1]))
    recorder.end()


def plain() -> Recorder:
    return recorder_of([Choice(0, 0, [5, 6, 7], [8, 9], 0, 4)])


@pytest.mark.parametrize("silent", KEYS, ids=str)
def test_a_tap_that_did_not_fire_is_named(silent: tuple[str, int]) -> None:
    with pytest.raises(CaptureError, match=rf"\b{silent[0]}\b.*\b{silent[1]}\b"):
        one_pass(plain(), whole_sequence([5, 6, 7], 3), [key for key in KEYS if key != silent])


@pytest.mark.parametrize("steps", [[], [[5, 6]], [[5, 6, 7]]], ids=["no pass", "no last chunk", "no decode step"])
def test_rows_that_never_came(steps: list[list[int]]) -> None:
    recorder = plain()
    for ids in steps:
        one_pass(recorder, whole_sequence(ids, 3))
    with pytest.raises(CaptureError, match=r"\b[1-4]\b.*rows? .*not arrive"):
        recorder.finish([[8, 9]])


@pytest.mark.parametrize(("ids", "generated"), [([5, 6, 7, 8], [8]), ([5, 6, 7, 4], [8, 9])], ids=["extra", "other"])
def test_a_row_too_many_or_of_another_token(ids: list[int], generated: list[int]) -> None:
    recorder = plain()
    one_pass(recorder, whole_sequence(ids, 3))
    with pytest.raises(CaptureError):
        recorder.finish([generated])


def test_taps_that_fire_at_the_wrong_time_or_with_the_wrong_rows() -> None:
    recorder = plain()
    with pytest.raises(CaptureError, match="resid_post"):
        recorder.record("resid_post", 0, torch.zeros(3, 4))
    with pytest.raises(CaptureError):
        recorder.end()
    recorder.begin(whole_sequence([5, 6, 7], 3), CPU)
    with pytest.raises(CaptureError, match=r"resid_post.*2 rows"):
        recorder.record("resid_post", 0, torch.zeros(2, 4))
    recorder.record("resid_post", 0, torch.zeros(3, 4))
    with pytest.raises(CaptureError, match=r"resid_post.*twice"):
        recorder.record("resid_post", 0, torch.zeros(3, 4))


# --- storage types


def store(values: Tensor, dtype: torch.dtype | None, order: str = "", times: int = 1) -> Recorded:
    """Each row of `values` as the one token of its own sample, all in one pass."""
    size = len(values)
    recorder = Recorder({"q": [0]}, [RecordedRequest(place, 0, [9], 1) for place in range(size)], dtype)
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    runs = [Run(int(place), row, 0, [9], 1) for row, place in enumerate(shuffled)]
    if order == "samples":  # the rows of the batch are a run, their places are not
        values = values[shuffled]
    else:
        runs = [Run(row, row, 0, [9], 1) for row in range(size)]
        Random(1).shuffle(runs if order == "rows" else [])
    memory = torch.empty(1 + values.numel(), dtype=values.dtype)  # whose second element begins no word
    live = (memory[1:] if order == "samples" else memory[:-1]).view(values.shape).copy_(values)
    for _ in range(times):
        recorder.begin(step_of(runs, size), CPU)
        recorder.record("q", 0, live)
        recorder.end()
    live.view(torch.uint8).fill_(0x55)
    return recorder.finish()


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
in_any_order = pytest.mark.parametrize("order", ["", "rows", "samples"])
from_any_type = pytest.mark.parametrize("source", FLOATS, ids=str)


@in_any_order
@from_any_type
@pytest.mark.parametrize("width", [3, 4])
def test_every_bit_is_kept(source: torch.dtype, width: int, order: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (64, width * source.itemsize), dtype=np.uint8)
    raw[::2, source.itemsize - 1], raw[::2, source.itemsize - 2] = 0xFF, 0xF7  # NaN, quiet and signalling
    raw[1] = [*[0] * (source.itemsize - 1), 0x80] * width  # −0
    values = torch.from_numpy(raw).view(source)
    assert values.isnan().any()
    for dtype in (None, source):
        got = store(values, dtype, order)
        assert got.tensors["q", 0].dtype == source
        assert bits(got.tensors["q", 0]) == bits(values)


@in_any_order
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=str)
@from_any_type
def test_casts_are_torchs_own(source: torch.dtype, dtype: torch.dtype, order: str) -> None:
    values = (torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 99).to(source)
    values[0] = torch.tensor([-2.9, 2.9, -0.0])
    got = store(values, dtype, order)
    assert got.tensors["q", 0].dtype == dtype
    assert bits(got.tensors["q", 0]) == bits(values.to(dtype))
    assert (got.receipt.overflowed, got.errors) == (0, {})
    if not dtype.is_floating_point:
        assert got.tensors["q", 0][0].tolist() == [-2, 2, 0]


@in_any_order
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@from_any_type
def test_what_an_integer_cannot_hold_fails_its_own_sample(source: torch.dtype, dtype: torch.dtype, order: str) -> None:
    edge = 2.0 ** (31 if dtype == torch.int32 else 63)
    bad = [float("nan"), float("inf"), -float("inf")]
    bad += [] if source == torch.float16 else [edge, -edge * 1.5, 1e30]
    good = [1.7, -1.7, 0.0] if source == torch.float16 else [-edge, edge / 2, -1.7]
    values = torch.tensor([[1.0, value] for pair in zip(bad, good * 2, strict=False) for value in pair], dtype=source)
    got = store(values, dtype, order)
    assert set(got.errors) == set(range(0, len(values), 2))
    assert all(isinstance(e, CaptureError) and str(place) in str(e) for place, e in got.errors.items())
    assert got.labels.sample.tolist() == list(range(1, len(values), 2))
    assert got.tensors["q", 0].equal(values[1::2].to(dtype))


@pytest.mark.parametrize("times", [1, 2], ids=["once", "computed twice"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_that_overflow_float16_are_counted(source: torch.dtype, times: int) -> None:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([[6e4, 7e4, 1e9], [-7e4, inf, nan], [-inf, 0, 1]], dtype=source)
    assert store(values, torch.float16, times=times).receipt.overflowed == 3


# --- what is handed over


@pytest.mark.parametrize("generated", [[1, 2], [1, 2, 3, 4]], ids=["early EOS", "full length"])
def test_tensors_are_ordinary_and_own_their_memory(generated: list[int]) -> None:
    with torch.inference_mode():
        recorder = Recorder({"q": [0]}, [RecordedRequest(sample, 0, [9], 4) for sample in (0, 1)])
        rows = len(generated)
        runs = [Run(sample, rows * sample, 0, [9, *generated[:-1]], 1) for sample in (0, 1)]
        live = torch.arange(4.0 * rows).view(-1, 2)
        recorder.begin(step_of(runs, 2 * rows), CPU)
        recorder.record("q", 0, live)
        recorder.end()
        kept = live.tolist()
        live.fill_(77)
        got = recorder.finish([generated] * 2).tensors["q", 0]
    assert got.tolist() == kept
    assert not got.is_inference()
    assert not got.requires_grad
    torch.nn.Linear(2, 1)(got).sum().backward()  # trains a probe
    got += 1
    got.requires_grad_()


def test_values_with_a_gradient_are_kept_without() -> None:
    assert not store(torch.ones(3, 2, requires_grad=True), None).tensors["q", 0].requires_grad
