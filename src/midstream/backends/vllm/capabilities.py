"""What a vLLM engine can do, and what it cannot by its nature."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.core.backend import (
    EVERYTHING,
    BackendCapabilities,
    BackendKind,
    Capability,
    CaptureKinds,
    ConstraintKinds,
    InterventionKinds,
)
from midstream.core.generation import CONSTRAINT_KINDS
from midstream.core.ops import KINDS, STEERED
from midstream.core.sites import Site


def engine_capabilities(
    sites: tuple[Site, ...],
    refused: Mapping[Site, str],
    constraints: tuple[str, ...] = CONSTRAINT_KINDS,
    backend: BackendKind = "vllm",
    interventions: tuple[str, ...] = tuple(KINDS),
) -> BackendCapabilities:
    """Of an engine whose model has these sites; one without a tokenizer has no constraints."""
    steered: tuple[Site, ...] = tuple(site for site in STEERED if site in sites)
    atoms = EVERYTHING[backend] - (frozenset() if constraints else {Capability.GUIDED_DECODING})
    return BackendCapabilities(
        backend,
        atoms,
        CaptureKinds(sites),
        InterventionKinds((*interventions, "patch"), steered),  # a patch is lowered before it is sent
        ConstraintKinds(constraints),
        refused=dict(refused),
    )
