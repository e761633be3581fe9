"""What is refused before the model runs: parameters, prompts, and captures that memory cannot hold."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from midstream.core.errors import PromptError, spec_error
from midstream.core.generation import GenerationParams
from midstream.core.prompts import PreparedPrompt
from midstream.taps.locate import text_config

from .facts import context_length
from .forward import rotary_boundary

_OURS: Final = frozenset({
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "labels",
    "logits_to_keep", "output_attentions", "output_hidden_states", "return_dict", "kwargs",
})  # fmt: skip
"""Arguments of a forward that a capture sets itself: from a prompt they would contradict its labels."""


def check_params(params: GenerationParams, tokenizer: Any) -> None:
    """Refuse stop strings that nothing could find."""
    if params.stop and tokenizer is None:
        raise spec_error("E_BAD_PARAM", "generation.stop", "stop strings need a tokenizer: use stop_token_ids")


def check_prompts(model: Any, prompts: Sequence[PreparedPrompt], max_tokens: int) -> None:
    """PromptError, naming the prompt, for ids and lengths that the model has not, and data that it does not take."""
    vocabulary, context, boundary = text_config(model).vocab_size, context_length(model), rotary_boundary(model)
    for index, prompt in enumerate(prompts):
        length = len(prompt.token_ids)
        if (largest := max(prompt.token_ids)) >= vocabulary:
            raise PromptError(f"prompt {index} has token id {largest}; the model has ids 0 to {vocabulary - 1}")
        needed = length + max_tokens - 1
        if context is not None and needed > context:
            raise PromptError(
                f"prompt {index} has {length} tokens and max_tokens is {max_tokens}: {needed} positions, but the "
                f"context has {context}; shorten it"
            )
        if boundary is not None and length <= boundary < needed:
            raise PromptError(
                f"prompt {index} has {length} tokens and max_tokens is {max_tokens}: past {boundary} positions this "
                "model turns its rows by other frequencies, which no cache crosses; use fewer max_tokens"
            )
        if prompt.multi_modal_data:
            _check_multimodal(model, index, prompt.multi_modal_data)


def _check_multimodal(model: Any, index: int, data: Mapping[str, Any]) -> None:
    """In process, multi_modal_data is tensors by the names of the model's own forward arguments."""
    takes = [name for name in inspect.signature(model.forward).parameters if name not in _OURS]
    if unknown := [name for name in data if name not in takes]:
        seen = [name for name in takes if any(part in name for part in ("pixel", "image", "audio", "video"))]
        raise PromptError(
            f"prompt {index}: {type(model).__name__} takes no {', '.join(unknown)}; "
            f"give tensors as its processor makes them: {', '.join(seen) or 'it reads text alone'}"
        )
    for name, value in data.items():
        if not isinstance(value, torch.Tensor):
            raise PromptError(f"prompt {index}: {name} is a {type(value).__name__}: give a tensor")
