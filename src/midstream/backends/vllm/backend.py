"""VllmBackend: one engine in this process, behind the seam."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from midstream.backends.registered import Registered
from midstream.core.backend import BackendCapabilities, BackendSpec
from midstream.core.errors import BusyError, SessionClosedError
from midstream.core.generation import CONSTRAINT_KINDS
from midstream.core.sites import SITES
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.pages import PAGES

from .arguments import check_options, eos_of, planned
from .capabilities import engine_capabilities
from .engine import Engine, adopted, boot
from .facts import model_facts
from .offline import VllmSession
from .reuse import ROWS_KEPT


class VllmBackend(Registered):
    """Boots its engine when the first session is opened, and frees it at `release`."""

    def __init__(self, spec: BackendSpec, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> None:
        check_options(spec)
        super().__init__(registry)
        self.spec = spec
        self._given_tokenizer = tokenizer
        self._engine: Engine | None = None
        self._tokenizer: Any = None
        self._session: VllmSession | None = None
        self._released = False
        self._undo = ExitStack()
        self._llm: Any = None

    @classmethod
    def adopt(cls, llm: Any, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> VllmBackend:
        """A `vllm.LLM` that the caller made with `additional_config={"midstream": {}}`; `release` leaves it running."""
        found = cls(BackendSpec("vllm", str(llm.llm_engine.model_config.model)), tokenizer, registry)
        found._llm = llm
        return found

    def capabilities_for_spec(self, spec: BackendSpec) -> BackendCapabilities:
        """What this kind of backend can do with a model that has every site; boots nothing."""
        return engine_capabilities(SITES, {})

    def negotiated_capabilities(self) -> BackendCapabilities:
        """What this engine can do: the sites that its self-test kept, and why it refused the others."""
        facts = self._booted().facts
        constraints = CONSTRAINT_KINDS if self._booted().has_tokenizer else ()
        return engine_capabilities(tuple(facts.layouts), facts.refused, constraints)

    def open_session(self) -> VllmSession:
        """The one session at a time; another is refused until it is closed."""
        if self._session is not None:
            raise BusyError("this backend has an open session: close it first, sessions are exclusive")
        engine = self._booted()
        self._session = VllmSession(
            engine,
            model_facts(engine.llm.llm_engine.model_config, self.spec.model, engine.facts.fingerprint),
            frozenset(token for token in self._eos if token < engine.vocabulary),
            self._tokenizer,
            self.registry,
            self.negotiated_capabilities,
            self._session_closed,
        )
        return self._session

    def release(self) -> None:
        """Close the session and free the engine; idempotent, also after a failed boot."""
        if self._session is not None:
            self._session.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._undo.close()
        PAGES.give_up()
        self._released = True

    def _session_closed(self) -> None:
        self._session = None

    # --- the boot

    def _booted(self) -> Engine:
        if self._released:
            raise SessionClosedError("this backend was released: load the model again")
        if self._engine is None and self._llm is not None:
            self._engine = adopted(self._llm)
            config = self._llm.llm_engine.model_config
            self._tokenizer = self._given_tokenizer or (
                self._llm.get_tokenizer() if self._engine.has_tokenizer else None
            )
            self._eos = eos_of(config.model, config.trust_remote_code)
        elif self._engine is None:
            plan = planned(self.spec, self._given_tokenizer, self._undo)
            self._tokenizer, self._eos = plan.tokenizer, plan.eos
            kept = int(self.spec.options.get("kept_row_bytes", ROWS_KEPT))
            self._engine = boot(plan.source, plan.arguments, plan.settings, kept)
        return self._engine
