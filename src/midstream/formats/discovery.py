"""What a server says of itself, and what a client negotiates with: `GET /v1/midstream/capabilities`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from midstream.core.sites import Site, SiteLayout
from midstream.core.wire import Wire

WIRE: Final = 1
"""The version of what client and server say to each other; another is not understood."""
OWN_ENGINE: Final = "midstream "
"""How the engine's version begins where it is `midstream serve`, whatever stands behind that."""


class Versions(Wire):
    """What runs there."""

    wire: int
    midstream: str
    engine: str


class Model(Wire):
    """ModelFacts, and the fingerprints of backends/fingerprints.py. eos: the ids that end a text."""

    facts: dict[str, Any]
    fingerprints: dict[str, str | None]
    eos: tuple[int, ...]


class Capture(Wire):
    """Sites → layer → width, heads and head size; and why the others are refused."""

    layouts: dict[Site, dict[int, tuple[int, int | None, int | None]]]
    refused: dict[Site, str]

    def by_site(self) -> Mapping[Site, Mapping[int, SiteLayout]]:
        """As the rest of midstream has them."""
        return {site: {layer: SiteLayout(*one) for layer, one in of.items()} for site, of in self.layouts.items()}


class Engine(Wire):
    """What its engine takes. grammar_eos: what ends a text under a constraint, besides."""

    vocabulary: int
    has_tokenizer: bool
    grammar_eos: tuple[int, ...] = ()
    lora: bool
    ranks: int


class Limits(Wire):
    """Bytes of activations that are held and how many seconds, and of artifacts."""

    held_bytes: int
    held_seconds: float
    artifact_bytes: int


class Capabilities(Wire):
    """All of it."""

    root: ClassVar[str] = "capabilities"

    versions: Versions
    backend: str
    model: Model
    capture: Capture
    interventions: tuple[str, ...]
    constraints: tuple[str, ...]
    engine: Engine
    limits: Limits
    artifact_transports: tuple[str, ...]
