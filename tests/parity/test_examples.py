"""The examples run, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import midstream as ms

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.real_model


def run(name: str, *arguments: str) -> str:
    """What an example writes to stdout."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    """No script stands among the examples that nothing here runs."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"capture_basics.py", "train_probe.py"}


def test_capture_basics(tmp_path: Path) -> None:
    """It shows each row with its label, and leaves a file that loads."""
    out = tmp_path / "capture.safetensors"
    printed = run("capture_basics.py", "--small", "--out", str(out))
    loaded = ms.CaptureResult.load(out)
    assert len(loaded) == 2
    assert f"receipt: {loaded.receipt}" in printed
    assert len(re.findall(r"^  position +\d+  ", printed, re.MULTILINE)) == len(loaded.labels)
    assert "equal to the bit" in printed


def test_train_probe() -> None:
    """The probe finds what is there, and the control finds nothing."""
    printed = run("train_probe.py", "--small")
    held_out, shuffled = (
        float(found[1]) for found in re.finditer(r"^(?:held-out accuracy|shuffled labels): +([\d.]+)", printed, re.M)
    )
    assert "rows of the token '.'" in printed
    assert held_out > 0.85
    assert abs(shuffled - 0.5) < 0.2
    assert held_out > shuffled + 0.2
