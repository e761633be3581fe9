"""One engine at a time, shared by the tests that follow one another with the same wishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import midstream as ms
from on_vllm.checkpoints import saved
from on_vllm.kit import Checkpoint, Engines


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            folder, model = saved(name, tmp_path_factory.mktemp(name))
            made[name] = Checkpoint(name, folder, model, ms.load(model))
        return made[name]

    return get


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    held = Engines()
    yield held
    held.close()
