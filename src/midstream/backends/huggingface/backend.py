"""HuggingFaceBackend: a model that it loads, or one that the caller has loaded, behind the seam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.backends.registered import Registered
from midstream.core.backend import (
    EVERYTHING,
    BackendCapabilities,
    BackendSpec,
    Capability,
    CaptureKinds,
    ConstraintKinds,
    InterventionKinds,
    ProcessorKinds,
)
from midstream.core.errors import BusyError, ModelLoadError, SessionClosedError
from midstream.core.generation import CONSTRAINT_KINDS
from midstream.core.interventions import IN_PROCESS
from midstream.core.ops import KINDS, STEERED
from midstream.core.sites import SITES, Site
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.locate import TapMap, same_parts
from midstream.taps.pages import PAGES

from .loading import load_pretrained
from .selftest import examine
from .session import HuggingFaceSession


def _capabilities(
    spec: BackendSpec, sites: tuple[Site, ...], refused: dict[Site, str], constraints: bool
) -> BackendCapabilities:
    """Of a model that has these sites, and a tokenizer that constraints can be written in, or none."""
    steered: tuple[Site, ...] = tuple(site for site in STEERED if site in sites)
    return BackendCapabilities(
        spec.kind,
        EVERYTHING["huggingface"] - (frozenset() if constraints else {Capability.GUIDED_DECODING}),
        CaptureKinds(sites),
        InterventionKinds((*KINDS, *IN_PROCESS), steered),
        ConstraintKinds(CONSTRAINT_KINDS if constraints else ()),
        ProcessorKinds(("logits_processors", "stopping_criteria")),
        refused,
    )


class HuggingFaceBackend(Registered):
    """One model in this process. Made by `HuggingFaceBackend(spec)`, which loads, or by `adopt`, which does not.

    The self-test runs when the first session is opened, and again when a provider gives another model.
    """

    def __init__(self, spec: BackendSpec, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> None:
        super().__init__(registry)
        self.spec = spec
        self._model_of: Callable[[], Any] | None = None
        self._tokenizer_of: Callable[[], Any] = lambda: None
        self._session: HuggingFaceSession | None = None
        self._given_tokenizer = tokenizer  # instead of the model's own
        self._taps: TapMap | None = None
        self._released = False

    @classmethod
    def adopt(
        cls, spec: BackendSpec, model_provider: Callable[[], Any], tokenizer_provider: Callable[[], Any]
    ) -> HuggingFaceBackend:
        """A backend over a model that the caller owns; the providers are read on each access."""
        backend = cls(spec)
        backend._model_of, backend._tokenizer_of = model_provider, tokenizer_provider
        return backend

    def capabilities_for_spec(self, spec: BackendSpec) -> BackendCapabilities:
        """What this kind of backend can do with a model that has every site; loads nothing."""
        return _capabilities(spec, SITES, {}, constraints=True)

    def negotiated_capabilities(self) -> BackendCapabilities:
        """What this model can do: the sites that its self-test kept, and why it refused the others."""
        taps = self._examined()
        sites: tuple[Site, ...] = tuple(site for site in SITES if taps.layouts.get(site))
        return _capabilities(self.spec, sites, dict(taps.refused), constraints=self._tokenizer_of() is not None)

    def open_session(self) -> HuggingFaceSession:
        """The one session at a time; another is refused until it is closed."""
        if self._session is not None:
            raise BusyError("this backend has an open session: close it first, sessions are exclusive")
        self._examined()
        self._session = HuggingFaceSession(
            self._examined, lambda: self._tokenizer_of(), self.spec.model, self._session_closed, self.registry
        )
        return self._session

    def release(self) -> None:
        """Close the session and let go of the model; idempotent."""
        if self._session is not None:
            self._session.close()
        self._taps, self._model_of, self._tokenizer_of = None, None, lambda: None
        PAGES.give_up()
        self._released = True

    def _tokenizer_beside(self, own: Any) -> Any:
        return own if self._given_tokenizer is None else self._given_tokenizer

    def _session_closed(self) -> None:
        self._session = None

    def _examined(self) -> TapMap:
        if self._released:
            raise SessionClosedError("this backend was released: load the model again")
        if self._model_of is None:
            loaded = load_pretrained(self.spec.model, **dict(self.spec.options))
            self._model_of, self._tokenizer_of = lambda: loaded.model, lambda: self._tokenizer_beside(loaded.tokenizer)
        model = self._model_of()
        if any(module.training for module in model.modules()):
            raise ModelLoadError("the model is in training mode, where dropout changes its rows: call model.eval()")
        if self._taps is None or not same_parts(self._taps.anatomy, model):
            self._taps = examine(model)
        return self._taps
