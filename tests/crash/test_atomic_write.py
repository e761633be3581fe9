"""A writer killed at any step leaves the old file or the new one, whole, and the next writer succeeds."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.formats import tensor_file
from midstream.formats.atomic import replacing

ENDED, FAILED = 0, 1


def write(path: Path, value: float, size: int = 50_000) -> None:
    tensor_file.write(path, {"x": torch.full((size,), value)}, {"midstream": {"value": value}})


def forked(work: Callable[[], object]) -> int:
    """Do the work in a child process that never comes back from it; its id."""
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            work()
            code = ENDED
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """How a child ended: its exit status, or −SIGKILL."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(last: int) -> None:
    """From now on this process kills itself before or after the `last`-th call that changes the disk."""
    steps = itertools.count()

    def step() -> None:
        if next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def both_sides(*given: Any, **named: Any) -> Any:
            step()
            result = call(*given, **named)
            step()
            return result

        setattr(owner, name, both_sides)

    for name in ("open", "fchmod", "fsync", "replace", "close"):
        watched(os, name)
    watched(Path, "unlink")
    watched(tensor_file, "save_file")


def value_of(path: Path) -> float:
    """The value that the whole file holds, in its metadata as in each number."""
    with tensor_file.opened(path, "a file of this test") as file:
        x, metadata = tensor_file.owned(file, "x"), tensor_file.read_json(file, "midstream", path)
    assert metadata is not None
    assert bool((x == metadata["value"]).all())
    return metadata["value"]


def strays(path: Path) -> list[Path]:
    """What lies beside the file; each is a temporary file by its name."""
    found = [one for one in path.parent.iterdir() if one != path]
    assert all(one.name.startswith((".midstream-", ".tmp")) for one in found)
    return found


def test_killed_at_each_step(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    found: list[float] = []
    for last in itertools.count():
        write(path, 1)

        def work(last: int = last) -> None:
            killed_at(last)
            write(path, 2)

        end = ended(forked(work))
        found.append(value_of(path))
        if end == ENDED:  # there was no such step any more
            break
        assert end == -signal.SIGKILL
        for stray in strays(path):
            stray.unlink()
    assert strays(path) == []
    assert len(found) > 15
    assert found == sorted(found)
    assert (found[0], found[-2], found[-1]) == (1, 2, 2)


@pytest.mark.parametrize("existing", [False, True])
def test_killed_halfway_through_the_bytes(tmp_path: Path, existing: bool) -> None:
    path = tmp_path / "a.safetensors"
    if existing:
        path.write_bytes(b"old")

    def work() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half")
            os._exit(7)

    assert ended(forked(work)) == 7
    assert path.exists() == existing
    assert not existing or path.read_bytes() == b"old"
    assert len(strays(path)) == 1
    write(path, 3)
    assert value_of(path) == 3


def test_killed_at_random(tmp_path: Path) -> None:
    """Kills that fall anywhere, also into the copying of bytes, while a reader looks all the time."""
    path = tmp_path / "a.safetensors"
    write(path, 1)

    def work() -> None:
        for value in itertools.count(2):
            write(path, float(value), size=500_000)

    for delay in torch.rand(10, generator=torch.Generator().manual_seed(0)).tolist():
        child = forked(work)
        end = time.monotonic() + 0.02 + delay / 5
        try:
            while time.monotonic() < end:
                assert value_of(path) >= 1
        finally:
            os.kill(child, signal.SIGKILL)
            assert ended(child) == -signal.SIGKILL
        assert value_of(path) >= 1
        strays(path)
