"""Servers that answered: what they are, and how they are asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from anyio import to_thread

from midstream.backends.fingerprints import Fingerprints, fingerprints
from midstream.backends.tokenizers import load_tokenizer
from midstream.core.backend import BackendCapabilities, BackendSpec, ModelFacts
from midstream.core.errors import ModelLoadError
from midstream.core.sites import Site, SiteLayout
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.discovery import Capabilities

from ..capabilities import engine_capabilities
from ..checks import Layouts
from ..reuse import RowStore
from . import negotiation
from .artifacts import Uploads
from .asking import Asking
from .options import ServeOptions
from .pool import Pool
from .transport import Server

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, eq=False)
class ServedFacts:
    """What servers say of their model's sites."""

    layouts: Mapping[Site, Mapping[int, SiteLayout]]
    refused: Mapping[Site, str]


@dataclass(frozen=True, eq=False)
class ServedHost:
    """An engine behind a server, which keeps its own rows for reuse."""

    facts: Layouts
    vocabulary: int
    has_tokenizer: bool
    store: RowStore = field(default_factory=lambda: RowStore(1, 0))

    def release(self, ids: Sequence[str]) -> None:
        """A server lets go of rows itself."""


@dataclass(frozen=True, eq=False)
class Reached:
    """Servers that answered. said: what all of them say of themselves. tokenizer: the one that is used here."""

    asking: Asking
    said: Capabilities
    tokenizer: Any

    @cached_property
    def capabilities(self) -> BackendCapabilities:
        """What the servers can do."""
        said, capture = self.said, self.said.capture
        return engine_capabilities(
            tuple(capture.layouts), capture.refused, said.constraints, "vllm-serve", said.interventions
        )

    @cached_property
    def host(self) -> ServedHost:
        """The engine behind them."""
        return ServedHost(self.asking.facts, self.said.engine.vocabulary, self.said.engine.has_tokenizer)

    @property
    def facts(self) -> ModelFacts:
        """The model's facts."""
        return ModelFacts(**self.said.model.facts)


async def reached(spec: BackendSpec, options: ServeOptions, tokenizer: Any, registry: ArtifactRegistry) -> Reached:
    """Ask all servers what they are; ModelLoadError where one cannot be used. tokenizer: the caller's own."""
    key = spec.secrets.get("api_key")
    pool = Pool([Server(url, options, key) for url in options.base_url], options.max_concurrency)
    try:
        found = await negotiation.found(pool, spec.model or None)
        said = found.capabilities
        tokenizer, here = await to_thread.run_sync(_here, spec, options, said, tokenizer)
        negotiation.compare(here, negotiation.of_server(said), options.checkpoint)
        model = found.model
        if options.lora is not None:
            model = await negotiation.adapter(pool, options.lora, said)
        if options.artifact_dir is not None and "directory" not in said.artifact_transports:
            message = f"{options.base_url[0]} reads no artifact_dir: start it with --artifact-dir, or leave it out"
            raise ModelLoadError(message)
    except BaseException:
        await pool.close()
        raise
    shared = None if options.artifact_dir is None else ArtifactRegistry(options.artifact_dir)
    asking = Asking(
        pool, Uploads(registry, shared), model, said.model.facts["model_fingerprint"], frozenset(said.model.eos),
        frozenset(said.engine.grammar_eos), ServedFacts(said.capture.by_site(), said.capture.refused),
    )  # fmt: skip
    return Reached(asking, said, tokenizer)


def _here(spec: BackendSpec, options: ServeOptions, said: Capabilities, tokenizer: Any) -> tuple[Any, Fingerprints]:
    """The tokenizer that is used here, and what is known here of the model: from the folder or hub id that the
    caller named, else from the one that the server names, where it is to be had."""
    from transformers import AutoConfig

    source = _source(spec, said)
    name = options.tokenizer_name_or_path or source
    remote = {"trust_remote_code": options.trust_remote_code}
    if tokenizer is None and name is not None:
        tokenizer = load_tokenizer(name, **remote)
    elif tokenizer is None and _HUB_ID.fullmatch(hub := spec.model or said.model.facts["model_ref"]):
        with suppress(ModelLoadError):  # then a prompt that is a text is refused
            tokenizer = load_tokenizer(hub, **remote)
    config = None
    if source is not None and Path(source).is_dir():
        config = AutoConfig.from_pretrained(source, **remote)
    return tokenizer, fingerprints(config, source, tokenizer)


def _source(spec: BackendSpec, said: Capabilities) -> str | None:
    """A folder of the model that is here."""
    from midstream.backends.bundled import SMOLLM2, smollm2_path

    named = str(smollm2_path()) if spec.model == SMOLLM2 else spec.model
    for one in (named, said.model.facts["model_ref"]):
        if one and Path(one).is_dir():
            return one
    return None
