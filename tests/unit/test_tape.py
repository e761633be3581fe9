"""The tape against a brute-force table, under any schedule an engine may choose; and segments as another maps them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.errors import CaptureError
from midstream.core.select import SelectSpec, resolve
from midstream.taps.segments import Column, Segments, mapped
from midstream.taps.step import Run, step_of, whole_sequence
from midstream.taps.stream import Copied, Fused
from midstream.taps.tape import Tape, Taping

CPU = torch.device("cpu")
WIDTH = 5
SELECTS = [None, "prompt[-1]", "generated", "prompt[1:3], generated[0]", "sequence, !prompt{3}"]


def row_of(owner: int, position: int, layer: int) -> torch.Tensor:
    return torch.tensor([owner, position, layer, owner * 7 + position, 0.25 * layer], dtype=torch.float32)


class Owner:
    def __init__(self, number: int, random: Random) -> None:
        self.number = number
        self.prompt_len = random.randint(1, 6)
        self.ids = [random.randint(0, 5) for _ in range(self.prompt_len + random.randint(0, 5))]
        self.select = SelectSpec.read(random.choice(SELECTS))
        self.layers = random.choice([(0,), (1,), (0, 1)])
        self.dtype = random.choice([torch.float32, torch.float64])
        self.first = random.choice([0, 0, 2])
        self.done = 0

    @property
    def taping(self) -> Taping:
        columns = tuple(Column("resid_post", layer, WIDTH, self.dtype) for layer in self.layers)
        return Taping(columns, self.select, len(self.ids), self.first)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_schedule_gives_each_request_its_rows(seed: int) -> None:
    """Requests come and go, in chunks, preempted, numbers used again; each has its selected rows and no other."""
    random = Random(seed)
    with TemporaryDirectory() as directory:
        segments = Segments(Path(directory), 1 << 30)
        tape = Tape(segments)
        waiting = [Owner(number, random) for number in range(random.randint(1, 8))]
        running: dict[int, Owner] = {}
        free: list[int] = []
        readers: list[str] = []
        while waiting or running:
            if waiting and (not running or random.random() < 0.4):
                owner = waiting.pop()
                slot = free.pop() if free else len(running)
                while slot in running:
                    slot += 1
                running[slot] = owner
                tape.admit(slot, owner.taping)
            runs, place = [], 0
            for slot, owner in running.items():
                if random.random() < 0.3:
                    owner.done = 0 if random.random() < 0.3 else owner.done  # preempted
                    continue
                count = random.randint(1, len(owner.ids) - owner.done) if owner.done < len(owner.ids) else 0
                if count:
                    ids = owner.ids[owner.done : owner.done + count]
                    runs.append(Run(slot, place, owner.done, ids, owner.prompt_len))
                    owner.done += count
                    place += count + random.randint(0, 1)
            if runs:
                step = step_of(runs, place)
                tape.begin(step, CPU)
                for layer in (0, 1):
                    values = torch.full((place, WIDTH), -1.0)
                    for run in runs:
                        for offset in range(len(run.token_ids)):
                            owner = running[run.request]
                            values[run.row + offset] = row_of(owner.number, run.position + offset, layer)
                    if ("resid_post", layer) in tape.places:
                        half = torch.rand_like(values)
                        stream = Copied(values) if random.random() < 0.5 else Fused(values - half, half)
                        tape.record(("resid_post", layer), stream)
                tape.end()
                assert not tape.failures
            for slot, owner in list(running.items()):
                if owner.done == len(owner.ids):
                    check(tape, segments, slot, owner)
                    reader = f"{owner.number}" if random.random() < 0.7 else None
                    tape.dismiss(slot, reader)
                    if reader is not None:
                        readers.append(reader)
                    del running[slot]
                    free.append(slot)
            if readers and random.random() < 0.5:
                tape.release(readers.pop())
        for reader in readers:
            tape.release(reader)
        assert not segments.in_use


def check(tape: Tape, segments: Segments, slot: int, owner: Owner) -> None:
    rows = whole_sequence(owner.ids, owner.prompt_len)
    wanted = np.flatnonzero(resolve(owner.select, rows) & (rows.position >= owner.first))
    taken = tape.taken(slot)
    assert taken.position.tolist() == wanted.tolist()
    assert taken.token_id.tolist() == [owner.ids[position] for position in wanted]
    for position, number, row in zip(taken.position, taken.segment, taken.row, strict=True):
        segment = segments[int(number)]
        for layer in owner.layers:
            got = segment.tensors["resid_post", layer][int(row)]
            torch.testing.assert_close(got, row_of(owner.number, int(position), layer).to(owner.dtype))


def test_another_process_reads_what_was_put_down(tmp_path: Path) -> None:
    columns = (Column("resid_post", 3, 6, torch.bfloat16), Column("router_logits", 1, 3, torch.float32))
    segment = Segments(tmp_path, 1 << 30).new(columns)
    rows = torch.randn(segment.capacity, 6).bfloat16()
    segment.tensors["resid_post", 3].copy_(rows)
    read = [Column.read(one) for one in segment.plain()["columns"]]
    other = mapped(tmp_path / segment.plain()["file"], read, segment.plain()["capacity"])
    assert torch.equal(other["resid_post", 3].view(torch.int16), rows.view(torch.int16))
    assert not other["resid_post", 3].is_inference()


def test_rows_that_nobody_reads_are_bounded_and_name_the_way_out(tmp_path: Path) -> None:
    tape = Tape(Segments(tmp_path, 1 << 20))
    wide = (Column("resid_post", 0, 1 << 17, torch.float32),)
    tape.admit(0, Taping(wide, None, 4))
    tape.begin(step_of([Run(0, 0, 0, [1, 2], 2)], 2), CPU)
    tape.end()
    with pytest.raises(CaptureError, match="row_bytes"):
        raise tape.failures[0]


def test_a_place_that_does_not_fire_fails_its_requests_alone(tmp_path: Path) -> None:
    tape = Tape(Segments(tmp_path, 1 << 30))
    for number, layer in ((0, 0), (1, 1)):
        tape.admit(number, Taping((Column("resid_post", layer, 3, torch.float32),), None, 2))
    tape.begin(step_of([Run(0, 0, 0, [1], 1), Run(1, 1, 0, [1], 1)], 2), CPU)
    tape.record(("resid_post", 1), Copied(torch.ones(2, 3)))
    tape.end()
    assert list(tape.failures) == [0]
    assert "did not fire" in str(tape.failures[0])


def test_overflow_is_counted_once_and_integers_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    tape = Tape(Segments(tmp_path, 1 << 30))
    values = torch.tensor([[1.0, 1e6, 2.0], [1.0, 2.0, float("nan")]])
    for number, dtype in ((0, torch.float16), (1, torch.int32)):
        tape.admit(number, Taping((Column("resid_post", 0, 3, dtype),), None, 2))
    for _ in range(2):  # the second time they are computed again
        tape.begin(step_of([Run(0, 0, 0, [1, 2], 2), Run(1, 2, 0, [1, 2], 2)], 4), CPU)
        tape.record(("resid_post", 0), Copied(torch.cat([values, values])))
        tape.end()
    assert tape.taken(0).overflowed.tolist() == [1, 0]
    tape.taken(1)
    assert "not finite or too large for int32" in str(tape.failures[1])
