"""The speed of a harvest: against the bare forward of the same tokens, the disk's own rate, and what reads it back.

    python benchmarks/harvest.py
    python benchmarks/harvest.py --small

Writes its figures to build/benchmarks/harvest.json (with --small, harvest-small.json).
"""

import argparse
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capture import RESULTS, begin_pinned, environment_facts, middle_of
from in_process import InProcess
from measure import timed
from prompts import make_prompts
from transformers import AutoTokenizer
from turns import run_turns

import midstream as ms
from midstream.backends.bundled import smollm2_path
from midstream.harvest import HarvestSpec

_BLOCK = 1 << 26
"""Bytes of one write of the disk's own rate."""


@dataclass(frozen=True)
class Settings:
    """What to run."""

    small: bool
    documents: int
    repetitions: int
    threads: int


class Subjects:
    """One model, texts, and everything that is timed on them. `rows` of a Timing: tokens, or megabytes of bytes."""

    def __init__(self, folder: Path, settings: Settings, scratch: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.texts = [tokenizer.decode(ids) for ids in make_prompts(folder, settings.documents)]
        encoded = [tokenizer(text)["input_ids"] for text in self.texts]
        self.here = InProcess(folder, encoded)
        self.lm = ms.load(self.here.model, tokenizer=tokenizer)
        self.scratch = scratch
        self.middle = middle_of(self.here.depth)
        self.runs: dict[str, Callable[[], int]] = {
            "bare middle": lambda: self.here.bare(self.middle + 1),
            "harvest middle": lambda: self._harvest([self.middle]),
            "harvest middle, compiled": lambda: self._harvest([self.middle], compiled=True),
            "bare all": lambda: self.here.bare(self.here.depth),
            "harvest all": lambda: self._harvest(None),
            "disk": self._disk,
            "read shuffled": self._read,
        }

    def _harvest(self, layers: list[int] | None, *, compiled: bool = False) -> int:
        """From text to flushed shards, in a new directory."""
        out = self.scratch / f"harvest-{'all' if layers is None else 'one'}"
        shutil.rmtree(out, ignore_errors=True)
        spec = HarvestSpec(capture=ms.CaptureSpec(layers=layers))
        return ms.harvest.run(self.lm, self.texts, out, spec, compiled=compiled).counts.tokens

    def _disk(self) -> int:
        """As many bytes as a harvest of all layers has, written and flushed. Returns megabytes."""
        size = sum(one.bytes for one in ms.harvest.open(self.scratch / "harvest-all").manifest.shards)
        block, path = os.urandom(_BLOCK), self.scratch / "disk"
        with path.open("wb", buffering=0) as file:
            for _ in range(-(-size // _BLOCK)):
                file.write(block)
            os.fsync(file.fileno())
        path.unlink()
        return round(-(-size // _BLOCK) * _BLOCK / 1e6)

    def _read(self) -> int:
        """Every row of one layer, in shuffled batches, from the page cache. Returns megabytes."""
        found = ms.harvest.open(self.scratch / "harvest-all")
        return round(sum(batch.nbytes for batch in found.stream(self.middle)) / 1e6)


def main() -> None:
    settings = _read_arguments()
    begin_pinned(settings.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = RESULTS / f"harvest{'-small' * settings.small}.json"
    figures: dict[str, Any] = {"settings": asdict(settings), "versions": environment_facts()}
    with tempfile.TemporaryDirectory() as scratch:
        subjects = Subjects(smollm2_path(), settings, Path(scratch))
        figures["tokens"] = sum(map(len, subjects.here.prompts))
        runs = {name: functools.partial(timed, work) for name, work in subjects.runs.items()}
        figures["compiled for the first time"] = asdict(runs["harvest middle, compiled"]())
        run_turns(runs, settings.repetitions, figures, out)


def _read_arguments() -> Settings:
    parser = argparse.ArgumentParser(description="Measure the speed of harvests.")
    parser.add_argument("--small", action="store_true", help="24 documents and 2 repetitions: does it run?")
    parser.add_argument("--repetitions", type=int, help="turns that every subject takes (9; small: 2)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of torch")
    given = parser.parse_args()
    return Settings(
        given.small, 24 if given.small else 256, given.repetitions or (2 if given.small else 9), given.threads
    )


if __name__ == "__main__":
    main()
