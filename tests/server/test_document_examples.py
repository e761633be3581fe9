"""The examples of docs/server.md, as they stand, on a server of a smaller model."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from server.kit import Serve

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CURL = [one for one in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if one.startswith("curl")]


def smaller(text: str, server: Serve) -> str:
    """The same for a model of four layers."""
    text = text.replace("http://127.0.0.1:8000", server.url).replace('"smollm2"', '"tiny"')
    return text.replace("[10, 20]", "[0, 1]").replace("[10]", "[1]")


@pytest.mark.parametrize("example", PYTHON)
def test_python(server: Serve, example: str) -> None:
    exec(compile(smaller(example, server), "docs/server.md", "exec"), {})


@pytest.mark.parametrize("example", CURL)
def test_curl(server: Serve, example: str) -> None:
    done = subprocess.run(["bash", "-c", smaller(example, server)], capture_output=True, text=True, check=True)
    assert '"activations"' in done.stdout


def test_there_are_some() -> None:
    assert len(PYTHON) >= 2
    assert CURL
