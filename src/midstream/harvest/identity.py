"""What the bytes of a harvest follow from: model, tokenizer, spec, input, and what computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from midstream.backends.fingerprints import fingerprints
from midstream.core.backend import Capability
from midstream.core.capture import CaptureSpec
from midstream.core.errors import UnsupportedOperationError, spec_error
from midstream.core.probe import Probe
from midstream.core.prompts import PreparedPrompt
from midstream.language_model import LanguageModel

from .inputs import Scanned
from .spec import HarvestSpec

COMPILE_TOKENS: Final = 1 << 20
"""Compiling takes as long as up to 120,000 tokens of SmolLM2 on two cores, and saves a sixth of the others' time."""


@dataclass(frozen=True)
class Subject:
    """A model, and what a harvest needs to know of it. row_bytes: of one row of all captured sites."""

    lm: LanguageModel
    name: str
    context: int
    row_bytes: int

    @classmethod
    def of(cls, lm: LanguageModel, spec: HarvestSpec, probes: Sequence[Probe]) -> Subject:
        """Ask a model for one row, so that what it has not is refused before the input is read.

        Raises E_LAYER_RANGE, E_SITE, and E_BAD_PARAM for a probe or a context that does not fit it.
        """
        capture = spec.capture.model_copy(update={"select": None})
        found = lm.session.capture([PreparedPrompt((0,))], capture)
        for one in probes:
            one.score(found.rows(one.layer, one.site))
        size = sum(rows.shape[1] * rows.itemsize for rows in found.tensors.values())
        return cls(lm, named(lm.facts.model_ref), _context(lm, spec), size)


def named(reference: str) -> str:
    """A model's reference without the place where it lies here."""
    return Path(reference).name if Path(reference).exists() or Path(reference).is_absolute() else reference


def _context(lm: LanguageModel, spec: HarvestSpec) -> int:
    own = lm.facts.context_length
    context = spec.context or own
    if context is None:
        raise spec_error("E_BAD_PARAM", "harvest.context", "this model sets no bound: say how long a sequence may be")
    if own is not None and context > own:
        raise spec_error("E_BAD_PARAM", "harvest.context", f"{context} is more than the model's {own}")
    spec.check_stride(context, "harvest.stride")
    return context


def identity_of(
    subject: Subject, spec: HarvestSpec, probes: Sequence[Probe], scanned: Scanned, *, compiled: bool
) -> dict[str, Any]:
    """Everything that another harvest would have to share to have the same bytes."""
    lm, facts = subject.lm, subject.lm.facts
    marks = fingerprints(None, None, lm.tokenizer)
    steering = lm.default_steering()
    return {
        "model": {
            "name": subject.name,
            "type": facts.model_type,
            "dtype": facts.dtype,
            "fingerprint": facts.model_fingerprint,
        },
        "tokenizer": {"fingerprint": marks.tokenizer, "template": marks.template},
        "spec": spec.canonical(),
        "probes": [one.described() for one in probes],
        "steering": None if steering is None else steering.described(),
        "input": {"records": scanned.records, "sha256": scanned.sha256},
        "execution": _execution(lm) | ({"compiled": True} if compiled else {}),
    }


def compiles(lm: LanguageModel, spec: HarvestSpec, scanned: Scanned, asked: bool | None) -> bool:
    """Whether a harvest runs on compiled blocks: as asked, or (None) for a large input where the model allows it.

    That follows from the input, the spec and the model alone. E_UNKNOWN_KIND where it is asked for and cannot be.
    """
    if asked is False or (asked is None and scanned.tokens < COMPILE_TOKENS):
        return False
    try:
        lm.capabilities.require([Capability.IN_PROCESS_TORCH], "compiled")
        if lm.default_steering() is not None:
            raise spec_error("E_UNKNOWN_KIND", "compiled", "cannot be: the model is steered")
        session: Any = lm.session
        session.check_compilable(spec.capture)
    except UnsupportedOperationError:
        if asked:
            raise
        return False
    return True


def _execution(lm: LanguageModel) -> dict[str, Any]:
    """What changes bits without changing the arithmetic that was asked for."""
    import torch

    kind = lm.capabilities.backend
    if Capability.IN_PROCESS_TORCH not in lm.capabilities.atoms:
        return {"backend": kind}
    model: Any = lm.session.model  # pyright: ignore[reportAttributeAccessIssue]
    device = model.get_input_embeddings().weight.device.type
    threads = torch.get_num_threads() if device == "cpu" else None
    version = torch.__version__.partition("+")[0]
    return {"backend": kind, "device": device, "threads": threads, "torch": version}


def capture_of(probes: Sequence[Probe], capture: CaptureSpec) -> CaptureSpec:
    """What has to be captured for some probes: their sites and layers, with the rows and type of `capture`."""
    if not probes:
        return capture
    sites = tuple(dict.fromkeys(one.site for one in probes))
    layers = tuple(sorted({one.layer for one in probes}))
    return capture.model_copy(update={"sites": sites, "layers": layers})
