"""A command line that runs in this process, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from midstream.cli import main


@dataclass(frozen=True)
class Ran:
    """One command line that has run."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs command lines, of which `capsys` hears what they print."""

    def one(*words: str | Path) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return one
