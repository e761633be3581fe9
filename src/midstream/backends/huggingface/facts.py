"""ModelFacts of a transformers model, and the fingerprint that tells two models apart."""

from __future__ import annotations

from typing import Any

import torch

from midstream.core.backend import ModelFacts
from midstream.taps.fingerprint import fingerprint_of
from midstream.taps.locate import text_config


def model_facts(model: Any, model_ref: str) -> ModelFacts:
    """The facts of `model`, from its text config; a multimodal wrapper keeps its own model_type."""
    return ModelFacts.of(
        model.config,
        text_config(model),
        model_ref=model_ref,
        model_fingerprint=fingerprint(model),
        dtype=compute_dtype(model),
        context_length=context_length(model),
    )


def compute_dtype(model: Any) -> str:
    """The dtype that the model computes in: of its first floating parameter, else its config's.

    A quantised model's first parameter may hold packed integers.
    """
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return str(floating or text_config(model).dtype or torch.float32).removeprefix("torch.")


def context_length(model: Any) -> int | None:
    """How many positions the model has; None where its config sets no bound."""
    length = getattr(text_config(model), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def fingerprint(model: Any) -> str:
    """See taps.fingerprint: of the model's config and its parameters as they are now."""
    return fingerprint_of(model.config, model.named_parameters())
