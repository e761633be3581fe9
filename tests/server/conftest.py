"""Servers of a tiny llama that reads bytes, in float32: one for all tests that change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import midstream as ms
from server.kit import Serve
from unit.tiny_checkpoint import save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def lm(tiny: Path) -> Iterator[ms.LanguageModel]:
    with ms.load(str(tiny)) as model:
        yield model


@pytest.fixture(scope="session")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    made = Serve(tmp_path_factory.mktemp("serve"), ["--model", f"tiny={tiny}"])
    try:
        yield made.start()
    finally:
        made.close()


@pytest.fixture
def client(server: Serve) -> Iterator[httpx2.Client]:
    with server.client() as made:
        yield made
