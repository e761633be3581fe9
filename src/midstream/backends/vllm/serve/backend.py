"""ServedBackend: one or more `vllm serve`, behind the seam."""

from __future__ import annotations

from typing import Any

from midstream.backends.registered import Registered
from midstream.core.backend import BackendCapabilities, BackendSpec
from midstream.core.errors import BusyError, SessionClosedError
from midstream.core.sites import SITES
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.pages import PAGES

from ..capabilities import engine_capabilities
from .loop import Loop
from .options import ServeOptions
from .reaching import Reached, reached
from .session import ServedSession


class ServedBackend(Registered):
    """Asks its servers what they are when the first session is opened."""

    def __init__(self, spec: BackendSpec, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> None:
        super().__init__(registry)
        self.spec, self.options = spec, ServeOptions.read(spec)
        self._given_tokenizer = tokenizer
        self._reached: tuple[Loop, Reached] | None = None
        self._session: ServedSession | None = None
        self._released = False

    def capabilities_for_spec(self, spec: BackendSpec) -> BackendCapabilities:
        """What this kind of backend can do with a model that has every site; asks nobody."""
        return engine_capabilities(SITES, {}, backend="vllm-serve")

    def negotiated_capabilities(self) -> BackendCapabilities:
        """What the servers can do."""
        return self._servers()[1].capabilities

    def open_session(self) -> ServedSession:
        """The one session at a time, whose calls may run side by side."""
        if self._session is not None:
            raise BusyError("this backend has an open session: close it first, sessions are exclusive")
        self._session = ServedSession(*self._servers(), self.registry, self._session_closed)
        return self._session

    def release(self) -> None:
        """Close the session and let go of all connections; idempotent."""
        if self._session is not None:
            self._session.close()
        if self._reached is not None:
            loop, servers = self._reached
            loop.run(servers.asking.pool.close)
            loop.close()
            self._reached = None
        PAGES.give_up()
        self._released = True

    def _session_closed(self) -> None:
        self._session = None

    def _servers(self) -> tuple[Loop, Reached]:
        if self._released:
            raise SessionClosedError("this backend was released: load the model again")
        if self._reached is None:
            loop = Loop()
            try:
                found = loop.run(reached, self.spec, self.options, self._given_tokenizer, self.registry)
            except BaseException:
                loop.close()
                raise
            self._reached = loop, found
        return self._reached
