"""The commands on the real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.cli import main

pytestmark = pytest.mark.real_model


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_capture_and_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, page = tmp_path / "acts.safetensors", tmp_path / "page.html"
    line = ("capture", "--model", "smollm2", "-p", "The capital of France is", "-p", "Why is the sky blue?")
    code, printed, words = run(capsys, *line, "--layers", "10,20", "--rows", "prompt[-1]", "--out", out)
    assert (code, printed) == (0, "")
    assert "Loading" not in words
    found = ms.CaptureResult.load(out)
    assert found.rows(10).shape == (2, 576)
    assert [found.tokens(index)[0].text for index in (0, 1)] == [" is", "?"]
    code, printed, _ = run(capsys, "inspect", out, "--json", "--heatmap", page)
    assert code == 0
    held: dict[str, Any] = json.loads(printed)
    assert held["model"] == "smollm2"
    assert [(one["layer"], one["rows"], one["dtype"]) for one in held["norms"]] == [
        (10, 2, "bfloat16"), (20, 2, "bfloat16"),
    ]  # fmt: skip
    assert "·is" in page.read_text()


def test_a_continuation_is_that_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("capture", "-m", "smollm2", "-p", "The capital of France is", "--max-tokens", "4", "--layers", "29")
    code, printed, _ = run(capsys, *line, "--rows", "generated", "--json")
    assert code == 0
    (prompt,) = json.loads(printed)["prompts"]
    with ms.load("smollm2") as lm:
        want = lm.capture("The capital of France is", layers=[29], rows="generated", max_tokens=4)
    assert prompt["generated"][0]["text"] == want.outputs[0].text
    assert prompt["positions"] == [5, 6, 7]


def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, printed, words = run(capsys, "demo", "--out", tmp_path / "demo")
    assert code == 0
    found = ms.CaptureResult.load(tmp_path / "demo" / "acts.safetensors")
    assert found.layer_ids == (0, 5, 10, 15, 20, 25, 29)
    assert len(found) == 6
    assert "about 20 s" in words
    lines = [line.split() for line in printed.splitlines() if line.strip()]
    france, spain = lines[2], lines[3]
    assert france[-7:] == ["1.00"] * 7
    assert spain[-7:-2] == ["1.00"] * 5  # the two differ in the answer, which is made in the last layers
    assert float(spain[-1]) < 0.97
    assert torch.isfinite(found.rows(29).float()).all()
    assert "126" in (tmp_path / "demo" / "heatmap.html").read_text()


def test_verify_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("verify", "--model", "smollm2", "--dtype", "float32", "--layers", "0,11,29", "--max-tokens", "4")
    code, printed, _ = run(capsys, *line, "-p", "The capital of France is", "-p", "Why?", "--json")
    found = json.loads(printed)
    assert code == 0, [one for one in found["parity"] if not one["holds"]]
    assert len(found["parity"]) == 7 * 3
    assert max(one["error_max"] for one in found["parity"]) < 1e-4
    assert list(found["refused"]) == ["router_logits"]


@pytest.mark.slow
def test_verify_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = run(capsys, "verify", "--model", "smollm2", "--json")
    found = json.loads(printed)
    assert code == 0, [one for one in found["parity"] if not one["holds"]]
    assert found["dtype"] == "bfloat16"
    assert len(found["parity"]) == 7 * (30 + 1)  # each layer, and all of a site together
    assert min(one["rows"] for one in found["parity"]) > 1000
