"""A harvest that dies at any write, flush or rename, or is killed at any moment, and is run again: the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream import harvest
from midstream.harvest import HarvestSpec
from unit.harvests import contents
from unit.tiny_checkpoint import save_tiny

TEXTS = ["one", "twenty-two words", "a", "some more of it", "x" * 40]
SPEC = HarvestSpec(capture=ms.CaptureSpec(layers=[1]), shard_tokens=15)


class Died(BaseException):
    """The process is gone."""


class Mortal:
    """Counts what a run does to the disk, and dies at one of those; afterwards nothing reaches the disk any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.dies_at, self.seen = 0, 0, list[str]()
        self._patch(monkeypatch, os, "replace")
        self._patch(monkeypatch, os, "fsync")
        self._patch(monkeypatch, os, "mkdir")
        self._patch(monkeypatch, os, "unlink")
        self._patch(monkeypatch, Path, "unlink")
        self._patch(monkeypatch, Path, "write_text", writes=lambda path, *_: path)
        self._patch(monkeypatch, "midstream.formats.tensor_file.save_file", writes=lambda _, path, *__: path)
        self._patch(monkeypatch, "pyarrow.parquet.write_table", writes=lambda _, path: path)
        self._patch(monkeypatch, "pyarrow.parquet.ParquetWriter.write_table", writes=None)

    def _patch(self, monkeypatch: pytest.MonkeyPatch, *where: Any, writes: Callable[..., Any] | None = None) -> None:
        """writes: the file that a call writes, of which a death leaves a half."""
        *owner, name = where
        real: Any = getattr(owner[0], name) if owner else None
        if real is None:
            module, _, name = name.rpartition(".")
            owner = [_found(module)]
            real = getattr(owner[0], name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.dies_at and self.count >= self.dies_at:
                if writes is not None and self.count == self.dies_at:
                    path = Path(writes(*args))
                    real(*args, **kwargs)
                    data = path.read_bytes()
                    with path.open("wb") as file:
                        file.write(data[: len(data) // 2])
                raise Died(name)
            self.seen.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner[0], name, counted)

    def reset(self, dies_at: int = 0) -> None:
        self.count, self.dies_at, self.seen = 0, dies_at, []


def _found(path: str) -> Any:
    import importlib

    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(_found(module), name)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ms.LanguageModel]:
    with ms.load(save_tiny(tmp_path_factory.mktemp("tiny"))) as lm:
        yield lm


def test_death_at_each_write_flush_and_rename(
    lm: ms.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harvest.run(lm, TEXTS, tmp_path / "whole", SPEC)
    whole = contents(tmp_path / "whole")
    mortal = Mortal(monkeypatch)
    harvest.run(lm, TEXTS, tmp_path / "counted", SPEC)
    assert contents(tmp_path / "counted") == whole
    steps = mortal.count
    assert {"replace", "fsync", "unlink", "write_text", "save_file", "write_table"} <= set(mortal.seen)
    for dies_at in range(1, steps + 1):
        out = tmp_path / f"dies-{dies_at}"
        mortal.reset(dies_at)
        with pytest.raises(Died):
            harvest.run(lm, TEXTS, out, SPEC)
        mortal.reset()
        harvest.run(lm, TEXTS, out, SPEC)
        assert contents(out) == whole, f"after a death at step {dies_at} of {steps}"


def test_deaths_one_after_the_other(lm: ms.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harvest.run(lm, TEXTS, tmp_path / "whole", SPEC)
    mortal, draw = Mortal(monkeypatch), random.Random(5)
    for number in range(8):
        out, deaths = tmp_path / f"dies-{number}", 0
        while deaths < 30:
            mortal.reset(draw.randint(1, 25))
            try:
                harvest.run(lm, TEXTS, out, SPEC)
                break
            except Died:
                deaths += 1
        mortal.reset()
        harvest.run(lm, TEXTS, out, SPEC)
        assert contents(out) == contents(tmp_path / "whole")
        assert deaths


def test_a_disk_that_fills(lm: ms.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harvest.run(lm, TEXTS, tmp_path / "whole", SPEC)
    real: Any = harvest.writing.write_shard

    def full(path: Path, *rest: Any) -> None:
        if path.name == "000001.safetensors":
            raise OSError(28, "No space left on device", str(path))
        real(path, *rest)

    monkeypatch.setattr("midstream.harvest.writing.write_shard", full)
    with pytest.raises(OSError, match="No space left on device"):
        harvest.run(lm, TEXTS, tmp_path / "out", SPEC)
    monkeypatch.undo()
    found = harvest.open(tmp_path / "out")
    assert not found.complete
    assert len(found.manifest.shards) == 1
    assert torch.equal(found.rows(1)[:], harvest.open(tmp_path / "whole").rows(1)[: len(found.rows(1))])
    report = harvest.run(lm, TEXTS, tmp_path / "out", SPEC)
    assert report.made == report.shards - 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    draw = random.Random(11)
    lines = [json.dumps({"text": "words " * draw.randint(1, 30), "n": n}) for n in range(1500)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "midstream.cli", "harvest", "--model", str(folder), "--prompts",
               str(tmp_path / "data.jsonl"), "--layers", "1,3", "--shard-tokens", "3000"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(out: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, "--out", str(tmp_path / out)], env=environment, stderr=subprocess.PIPE)

    assert start("whole").wait(300) == 0
    kills = 0
    for _ in range(5):
        before, running = made(tmp_path / "killed"), start("killed")
        while running.poll() is None and made(tmp_path / "killed") == before:
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.3))
        if running.poll() is not None:
            break
        running.send_signal(signal.SIGKILL)
        running.wait()
        kills += 1
    assert start("killed").wait(300) == 0
    assert kills >= 3
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def made(directory: Path) -> int:
    """How many shards the manifest knows."""
    try:
        return len(json.loads((directory / "manifest.json").read_bytes())["shards"])
    except FileNotFoundError:
        return 0
