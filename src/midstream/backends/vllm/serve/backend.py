"""ServedBackend: one or more `vllm serve`, behind the seam."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from midstream.backends.fingerprints import Fingerprints, fingerprints
from midstream.backends.registered import Registered
from midstream.backends.tokenizers import load_tokenizer
from midstream.core.backend import BackendCapabilities, BackendSpec, ModelFacts
from midstream.core.errors import BusyError, ModelLoadError, SessionClosedError
from midstream.core.sites import SITES
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.discovery import Capabilities
from midstream.taps.pages import PAGES

from ..capabilities import engine_capabilities
from . import negotiation
from .artifacts import Uploads
from .calls import Asking
from .loop import Loop
from .options import ServeOptions
from .pool import Pool
from .session import ServedFacts, ServedHost, ServedSession
from .transport import Server

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, eq=False)
class _Reached:
    """Servers that answered."""

    loop: Loop
    pool: Pool
    asking: Asking
    capabilities: Capabilities
    tokenizer: Any


class ServedBackend(Registered):
    """Asks its servers what they are when the first session is opened."""

    def __init__(self, spec: BackendSpec, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> None:
        super().__init__(registry)
        self.spec, self.options = spec, ServeOptions.read(spec)
        self._given_tokenizer = tokenizer
        self._reached: _Reached | None = None
        self._session: ServedSession | None = None
        self._released = False

    def capabilities_for_spec(self, spec: BackendSpec) -> BackendCapabilities:
        """What this kind of backend can do with a model that has every site; asks nobody."""
        return engine_capabilities(SITES, {}, backend="vllm-serve")

    def negotiated_capabilities(self) -> BackendCapabilities:
        """What the servers can do."""
        said = self._servers().capabilities
        capture = said.capture
        return engine_capabilities(
            tuple(capture.layouts), capture.refused, said.constraints, "vllm-serve", said.interventions
        )

    def open_session(self) -> ServedSession:
        """The one session at a time, whose calls may run side by side."""
        if self._session is not None:
            raise BusyError("this backend has an open session: close it first, sessions are exclusive")
        reached = self._servers()
        said = reached.capabilities
        host = ServedHost(
            ServedFacts(said.capture.by_site(), said.capture.refused), said.engine.vocabulary, said.engine.has_tokenizer
        )
        self._session = ServedSession(
            reached.asking,
            host,
            ModelFacts(**said.model.facts),
            reached.tokenizer,
            self.registry,
            self.negotiated_capabilities,
            self._session_closed,
        )
        return self._session

    def release(self) -> None:
        """Close the session and let go of all connections; idempotent."""
        if self._session is not None:
            self._session.close()
        if self._reached is not None:
            self._reached.loop.run(self._reached.pool.close)
            self._reached.loop.close()
            self._reached = None
        PAGES.give_up()
        self._released = True

    def _session_closed(self) -> None:
        self._session = None

    def _servers(self) -> _Reached:
        if self._released:
            raise SessionClosedError("this backend was released: load the model again")
        if self._reached is None:
            loop = Loop()
            try:
                self._reached = loop.run(self._reach, loop)
            except BaseException:
                loop.close()
                raise
        return self._reached

    async def _reach(self, loop: Loop) -> _Reached:
        options, key = self.options, self.spec.secrets.get("api_key")
        pool = Pool([Server(url, options, key) for url in options.base_url], options.max_concurrency)
        try:
            found = await negotiation.found(pool, self.spec.model or None)
            said = found.capabilities
            tokenizer, here = self._here(said)
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
            loop, pool, Uploads(self.registry, shared), model, said.model.facts["model_fingerprint"],
            frozenset(said.model.eos), frozenset(said.engine.grammar_eos),
        )  # fmt: skip
        return _Reached(loop, pool, asking, said, tokenizer)

    def _here(self, said: Capabilities) -> tuple[Any, Fingerprints]:
        """The tokenizer that is used here, and what is known here of the model: from the folder or hub id that the
        caller named, else from the one that the server names, where it is to be had."""
        from transformers import AutoConfig

        options = self.options
        source = self._source(said)
        name = options.tokenizer_name_or_path or source
        remote = {"trust_remote_code": options.trust_remote_code}
        tokenizer = self._given_tokenizer
        if tokenizer is None and name is not None:
            tokenizer = load_tokenizer(name, **remote)
        elif tokenizer is None and _HUB_ID.fullmatch(hub := self.spec.model or said.model.facts["model_ref"]):
            with suppress(ModelLoadError):  # then a prompt that is a text is refused
                tokenizer = load_tokenizer(hub, **remote)
        config = None
        if source is not None and Path(source).is_dir():
            config = AutoConfig.from_pretrained(source, **remote)
        return tokenizer, fingerprints(config, source, tokenizer)

    def _source(self, said: Capabilities) -> str | None:
        """A folder of the model that is here."""
        from midstream.backends.bundled import SMOLLM2, smollm2_path

        named = str(smollm2_path()) if self.spec.model == SMOLLM2 else self.spec.model
        for one in (named, said.model.facts["model_ref"]):
            if one and Path(one).is_dir():
                return one
        return None
