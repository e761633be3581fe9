"""The examples run, and print what they promise."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import midstream as ms
from midstream.formats.vectors import read_vectors

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.real_model


def run(name: str, *arguments: str) -> str:
    """What an example writes to stdout."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def module(name: str) -> Any:
    """An example as a module, which runs nothing."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


def test_every_example_is_tested() -> None:
    """No script stands among the examples that nothing here runs."""
    tested = {"capture_basics.py", "causal_tracing.py", "steer_sentiment.py", "train_probe.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


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


def test_steer_sentiment_is_neutral() -> None:
    """Prompts say nothing good or bad, none was tuned on, and the words of the pairs do not count."""
    example = module("steer_sentiment.py")
    prompts, tuning = example.sentences(example.PROMPTS), example.sentences(example.TUNING)
    assert len(set(prompts)) == 50
    assert not set(prompts) & set(tuning)
    assert {example.sentiment(prompt) for prompt in [*prompts, *tuning]} == {0.0}
    assert not {word for pair in example.PAIRS for text in pair for word in example.words(text)} & set(example.VALENCE)
    assert not set(example.GOOD.split()) & set(example.BAD.split())
    assert all(word.strip() in example.VALENCE for pair in example.NEXT for word in pair)
    assert example.sentiment("A good, good meal; a sad end.") == pytest.approx(100 / 7)


def test_steer_sentiment(tmp_path: Path) -> None:
    """Up, down, and controls that do much less; the direction is a file that steers."""
    printed = run("steer_sentiment.py", "--small", "--out", str(tmp_path))
    line = re.compile(
        r"^(\S+)" + r" +([+-][\d.]+) \[[+-][\d.]+, +[+-][\d.]+\]" * 3 + r"(?: +([\d.]+) +([\d.]+))?$", re.M
    )
    rows = [found.groups() for found in line.finditer(printed)]
    means = {name: list(map(float, scores)) for name, *scores, surprise, _ in rows if surprise}
    changes = {name: list(map(float, scores)) for name, *scores, surprise, _ in rows if not surprise}
    assert list(means) == ["plain", "+", "−", "random", "shuffled"]
    assert list(changes) == ["+", "−", "random", "shuffled"]

    for place in range(3):  # greedy, sampled, preference
        assert means["+"][place] > means["plain"][place] > means["−"][place]
    preference = {name: scores[2] for name, scores in changes.items()}
    smaller = min(preference["+"], -preference["−"])
    assert smaller > 1.5
    assert max(abs(preference["random"]), abs(preference["shuffled"])) < smaller / 2

    strengths = {name: float(strength) for name, *_, surprise, strength in rows if surprise}
    assert strengths["plain"] == 0
    assert all(strengths[name] == pytest.approx(strengths["+"], rel=0.1) for name in changes)

    file = read_vectors(tmp_path / "sentiment.safetensors")
    assert len(file.layers) == 1
    assert file.provenance["quality"]["change"].keys() == changes.keys()
    assert tuple(ms.add(tmp_path / "sentiment.safetensors", strength=1.5).ops[0].layers) == file.layers
    texts = json.loads((tmp_path / "steer_sentiment.json").read_text(encoding="utf-8"))
    assert {name: len(of) for name, of in texts.items()} == dict.fromkeys(means, 6)


def test_causal_tracing(tmp_path: Path) -> None:
    """The country's row decides in the first layers, the last token's in the last; rows before it are the control."""
    printed = run("causal_tracing.py", "--small", "--out", str(tmp_path))
    assert "left out" not in printed
    table = {
        int(found[1]): list(map(float, found[2].split()))
        for found in re.finditer(r"^ +(\d+) ((?: +-?\d\.\d\d){7})$", printed, re.M)
    }
    assert table[0] == pytest.approx([0, 0, 0, 0, 1, 0, 0], abs=0.05)
    assert table[29] == pytest.approx([0, 0, 0, 0, 0, 0, 1], abs=0.05)
    control = re.search(r"^control, .*: at most ([\d.]+)$", printed, re.M)
    assert control is not None
    assert float(control[1]) < 1e-3
    assert "more effect than the country's from layer 25 on" in printed

    page = (tmp_path / "causal_tracing.html").read_text(encoding="utf-8")
    assert page.count("<table>") == 3  # the mean, and each pair
    assert page.count("<td ") == 3 * 7 * 7
    assert not re.search(r"https?:|<script|<link|src=", page)
    assert (tmp_path / "causal_tracing.png").read_bytes().startswith(b"\x89PNG")
