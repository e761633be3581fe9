"""One engine at a time, shared by the tests that follow one another with the same wishes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import midstream as ms
from midstream.formats.artifacts import ArtifactRegistry
from on_vllm.checkpoints import saved, wide
from on_vllm.kit import ENGINE, Checkpoint, Engines
from on_vllm.serving import Server, Servers
from parity.tiny import build
from unit.tiny_checkpoint import byte_tokenizer


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
    held.servers.close()


@pytest.fixture(scope="session")
def servers(engines: Engines) -> Servers:
    return engines.servers


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `small_server` keeps its artifacts."""
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ArtifactRegistry:
    """Where engines that serve find the tensors of specs."""
    return ArtifactRegistry(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="session")
def small_server(checkpoint: Callable[[str], Checkpoint], servers: Servers, shared: Path) -> Server:
    """One with little room, for a short time, a directory of artifacts, and a cache that four requests do not fit."""
    room = str(1 << 16)
    given = ("--held-bytes", room, "--held-seconds", "1.5", "--artifact-bytes", room, "--artifact-dir", str(shared))
    return servers.get(checkpoint("llama").folder, *given, num_gpu_blocks_override=9)


@pytest.fixture(scope="session")
def bytes_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ms.LanguageModel]:
    """A llama that reads bytes: its folder, with a tokenizer; and in process."""
    import transformers as hf

    folder = tmp_path_factory.mktemp("bytes")
    tokenizer = byte_tokenizer()
    config = hf.LlamaConfig(
        **wide(vocab_size=len(tokenizer), intermediate_size=96, num_key_value_heads=2, bos_token_id=0, eos_token_id=1)
    )
    model = build(lambda: hf.LlamaForCausalLM(config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, ms.load(model, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def users_llm(engines: Engines) -> Callable[..., Any]:
    """A context manager: a `vllm.LLM` that somebody made himself, in this process unless told otherwise."""

    @contextmanager
    def made(folder: Path, *, processes: bool = False, **options: Any) -> Iterator[Any]:
        engines.close()
        before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        from midstream.compat.vllm import LLM

        llm = None
        try:
            llm = LLM(str(folder), **{"dtype": "float32", **ENGINE, **options})
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
            if before is not None:
                os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before

    return made
