"""vllm-lens' real client, from its wheel, against our server: unchanged, and with the rows that are true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import midstream as ms
from on_vllm.kit import Checkpoint, relative
from on_vllm.lens_client import CHAT, TEXT, vector
from on_vllm.serving import Server, Servers

LENS = Path(sys.prefix) / "lens"
Told = tuple[dict[str, Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def told(
    bytes_llama: tuple[Path, ms.LanguageModel],
    servers: Servers,
    small_server: Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> Told:
    assert LENS.is_dir(), "make setup-vllm unpacks vllm-lens' wheel there"
    out = tmp_path_factory.mktemp("lens")
    server = servers.get(bytes_llama[0])
    return asked(server.url, small_server.url, out)


def asked(url: str, small_url: str, out: Path) -> Told:
    """What vllm-lens' client got: tensors, and the rest."""
    script = Path(__file__).parent / "lens_client.py"
    done = subprocess.run(
        [sys.executable, str(script), url, small_url, str(out)],
        env={**os.environ, "PYTHONPATH": str(LENS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out / "tensors.safetensors"), json.loads((out / "said.json").read_text())


def due(lm: ms.LanguageModel, prompt: Any, layers: list[int], **given: Any) -> tuple[Tensor, str | None]:
    cap = lm.capture([prompt], layers=layers, max_tokens=5, ignore_eos=True, **given)
    return torch.stack([cap.rows(layer) for layer in sorted(layers)]), cap.outputs[0].text


def check_rows(told: Told, lm: ms.LanguageModel) -> None:
    """Completions and chats, inline and by handle."""
    tensors, said = told
    for name in ("inline", "binary"):
        for key, prompt, layers in ((name, TEXT, [0, 2]), (f"chat {name}", CHAT, [1])):
            rows, text = due(lm, prompt, layers)
            assert said[key] == text
            assert relative(tensors[key], rows) < 1e-4


def check_steers(told: Told, lm: ms.LanguageModel) -> None:
    """Steering vectors of every form."""
    tensors, said = told
    specs = {
        "every position": ms.add(vector(1, 128)[0], layers=[1], strength=4.0),
        "norm match": ms.add(vector(1, 128)[0], layers=[1], strength=0.5, norm_match=True),
        "some positions": ms.add(vector(1, 2, 128)[0], layers=[0], strength=4.0, positions=[3, 7]),
    }
    for name, spec in specs.items():
        rows, text = due(lm, TEXT, [1], steering=spec)
        assert said[name] == text
        assert relative(tensors[name], rows) < 1e-4
    assert len({said[name] for name in specs} | {said["plain"]}) > 2


def test_rows_of_completions_and_chats(told: Told, bytes_llama: tuple[Path, ms.LanguageModel]) -> None:
    check_rows(told, bytes_llama[1])


def test_steering_of_every_form(told: Told, bytes_llama: tuple[Path, ms.LanguageModel]) -> None:
    check_steers(told, bytes_llama[1])


def test_its_errors_are_in_its_form(told: Told) -> None:
    said = told[1]
    assert "code of a caller is never run: use steering" in said["hooks"]
    assert "no layer 9" in said["no such layer"]
    assert "Set n to 1" in said["several"]
    assert 'use capture with "sites": ["q", "k"]' in said["qk"]


def test_rows_of_requests_that_were_preempted(told: Told, checkpoint: Callable[[str], Checkpoint]) -> None:
    """Where its own server gives rows that are not those of the text."""
    tensors, said = told
    source = checkpoint("llama")
    for place in range(4):
        ids = tuple(said[f"tight {place}"])
        assert len(ids) == 48 + 59
        assert relative(tensors[f"tight {place}"][0], source.oracle(ids)["resid_post", 1]) < 1e-4
