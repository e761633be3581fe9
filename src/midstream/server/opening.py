"""Models opened for a server: embedded, on a vLLM engine beside it, or on servers upstream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.backends.serving import ServingEngine
from midstream.backends.vllm.serve.options import api_key_of_servers
from midstream.core.backend import BackendSpec
from midstream.core.errors import spec_error
from midstream.core.interventions import InterventionSpec
from midstream.formats.artifacts import ArtifactRegistry

from .asking import Served


@dataclass(frozen=True)
class Engines:
    """What kind of engine every model of a server gets. engine: arguments of vLLM's."""

    backend: str = "huggingface"
    upstream: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_batch: int = 64


async def started(
    given: Sequence[str], engines: Engines, registry: ArtifactRegistry, steering: InterventionSpec | None
) -> list[Served]:
    """Models by `[alias=]reference`, which answer; SpecError where there is none, ModelLoadError where one cannot."""
    if not given and not engines.upstream:
        raise spec_error("E_BAD_PARAM", "--model", "which model? give --model smollm2, or --upstream URL")
    if len(given) > 1 and (engines.upstream or engines.backend == "vllm"):
        raise spec_error("E_BAD_PARAM", "--model", f"{len(given)} models on one engine: give one")
    found: list[Served] = []
    for one in given or [""]:
        alias, equals, reference = one.partition("=")
        name = reference if equals else one
        if equals and not (alias and reference):
            raise spec_error("E_BAD_PARAM", "--model", f"{one!r:.80} is no ALIAS=MODEL")
        engine = await asyncio.to_thread(_engine, name, engines, registry)
        await engine.start()
        if steering is not None:
            engine.capabilities.require_spec(steering, "--steering")
        found.append(Served(name or engine.facts.model_ref, engine, (alias,) if equals else (), steering))
    return found


def _engine(name: str, engines: Engines, registry: ArtifactRegistry) -> ServingEngine:
    if engines.upstream:
        return _upstream(name, engines, registry)
    if engines.backend == "vllm":
        return _vllm(name, engines, registry)
    from midstream.backends.huggingface.continuous.engine import EmbeddedEngine

    spec = BackendSpec("huggingface", name, {"dtype": engines.dtype, "device": engines.device})
    return EmbeddedEngine(spec, registry=registry, max_batch=engines.max_batch)


def _vllm(name: str, engines: Engines, registry: ArtifactRegistry) -> ServingEngine:
    from midstream.backends.vllm.asynchronous import AsyncVllmEngine

    options = {"engine_kwargs": dict(engines.engine), "dtype": engines.dtype}
    return AsyncVllmEngine(BackendSpec("vllm", name, options), registry=registry)


def _upstream(name: str, engines: Engines, registry: ArtifactRegistry) -> ServingEngine:
    from midstream.backends.vllm.serve.upstream import UpstreamEngine

    options = {"base_url": list(engines.upstream), **api_key_of_servers()}
    return UpstreamEngine(BackendSpec("vllm-serve", name, options), registry=registry)
