"""A server's engine, put to the self-test and opened: from then on its routes answer for it."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import atexit
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from midstream.backends.fingerprints import fingerprints
from midstream.core.errors import ModelLoadError
from midstream.core.generation import CONSTRAINT_KINDS
from midstream.core.ops import KINDS
from midstream.formats import discovery
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.held import Held

from ..arguments import eos_of
from ..facts import model_facts
from ..plugin.activation import settings_of
from ..requests import EngineSettings
from .answering import Answering
from .app import SAID, STATE
from .engine import AsyncEngine


async def opened(client: Any, state: Any, args: Any) -> None:
    """Give an app's state what our routes answer with; nothing where the engine was not asked for taps."""
    settings = settings_of(client.vllm_config)
    if settings is None:
        return
    if (count := getattr(args, "api_server_count", None) or 1) > 1:
        raise ModelLoadError(f"--api-server-count {count}: a handle is known to one server alone; give 1")
    engine = await AsyncEngine.examined(client)
    config = client.model_config
    registry = ArtifactRegistry(_folder(settings), settings.artifact_bytes)
    held = Held(settings.held_bytes, settings.held_seconds)
    answering = Answering(engine, held, registry, config.dtype)
    engine.admission.open(answering.check)
    setattr(state, STATE, answering)
    setattr(state, SAID, _said(engine, settings, args).model_dump(mode="json"))


def _folder(settings: EngineSettings) -> Path:
    """Where artifacts are: the directory that was named, or one that goes with this process."""
    if settings.artifact_dir is not None:
        return Path(settings.artifact_dir)
    made = tempfile.mkdtemp(prefix="midstream-artifacts-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _said(engine: AsyncEngine, settings: EngineSettings, args: Any) -> discovery.Capabilities:
    import vllm

    client, found = engine.client, engine.facts
    config = client.model_config
    facts = model_facts(config, config.model, found.fingerprint)
    template = getattr(args, "chat_template", None)
    with suppress(OSError, ValueError):  # a template itself is no name of a file
        template = Path(template).read_text() if template is not None else None
    ends = eos_of(config.model, config.trust_remote_code)
    return discovery.Capabilities(
        versions=discovery.Versions(wire=discovery.WIRE, midstream=version("midstream"), engine=str(vllm.__version__)),
        backend="vllm",
        model=discovery.Model(
            facts=asdict(facts),
            fingerprints=asdict(fingerprints(config.hf_config, config.model, engine.tokenizer, template)),
            eos=tuple(sorted(one for one in ends if one < engine.vocabulary)),
        ),
        capture=discovery.Capture(
            layouts={
                site: {layer: (one.width, one.heads, one.head_size) for layer, one in layers.items()}
                for site, layers in found.layouts.items()
            },
            refused=dict(found.refused),
        ),
        interventions=tuple(KINDS),
        constraints=CONSTRAINT_KINDS if engine.has_tokenizer else (),
        engine=discovery.Engine(
            vocabulary=engine.vocabulary,
            has_tokenizer=engine.has_tokenizer,
            grammar_eos=tuple(engine.grammar_eos),
            lora=client.vllm_config.lora_config is not None,
            ranks=len(found.folders),
        ),
        limits=discovery.Limits(
            held_bytes=settings.held_bytes,
            held_seconds=settings.held_seconds,
            artifact_bytes=settings.artifact_bytes,
        ),
        artifact_transports=("http",) if settings.artifact_dir is None else ("http", "directory"),
    )
