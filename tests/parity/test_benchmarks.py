"""The benchmark runs from end to end, small; its times are shown by `make bench` and asserted nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.real_model
def test_a_small_run_measures_and_renders(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run = [sys.executable, "benchmarks/capture.py", "--small", "--peers", "none", "--out", str(figures)]
    subprocess.run(run, cwd=ROOT, check=True, timeout=1200)
    measured = json.loads(figures.read_text())
    assert {"bare 16", "midstream 15", "midstream all", "usual"} <= set(measured["timings"])
    show = [sys.executable, "benchmarks/publish.py", "capture", "--figures", str(figures), "--print"]
    shown = subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "Against the bare forward" in shown


@pytest.mark.slow
@pytest.mark.real_model
def test_a_small_run_of_steering_measures_and_renders(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run = [sys.executable, "benchmarks/generate.py", "--small", "--out", str(figures)]
    subprocess.run(run, cwd=ROOT, check=True, timeout=1200)
    measured = json.loads(figures.read_text())
    assert {"plain", "one spec", "a spec each", "model.generate", "score"} <= set(measured["timings"])
    assert measured["checks"]["steered"] > 0
    show = [sys.executable, "benchmarks/publish.py", "generate", "--figures", str(figures), "--print"]
    shown = subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "another spec for each" in shown
