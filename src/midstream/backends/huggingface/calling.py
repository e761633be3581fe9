"""A model's forward as decoding calls it: ids padded on the left, one cache, and the logits of what comes next."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from midstream.core.errors import spec_error
from midstream.taps.locate import TapMap

from .forward import cache_argument, input_device, moved, new_cache


class Caller:
    """Calls one model. padded: whether rows of different lengths may share a call. E_UNKNOWN_KIND: it has no cache."""

    def __init__(self, taps: TapMap) -> None:
        self.model: Any = taps.anatomy.model
        self.device = input_device(self.model)
        self.padded = taps.pads_left
        names = inspect.signature(self.model.forward).parameters
        self._takes = {name: name in names for name in ("position_ids", "logits_to_keep")}
        self._cache_name = cache_argument(self.model)
        if self._cache_name is None or new_cache(self.model) is None:
            raise spec_error(
                "E_UNKNOWN_KIND",
                "max_tokens",
                f"{self.model.config.model_type}'s cache cannot be decoded here: capture prompts alone, or use "
                "extra={'use_cache': True}, the model's own generate",
            )

    def __call__(
        self, ids: Tensor, mask: Tensor, cache: Any, inputs: dict[str, Any] | None = None, every: bool = False
    ) -> Tensor:
        """One pass; logits `[rows, tokens, vocabulary]`, of the last token of each row, or of `every` one.

        ids: `[rows, tokens]`. mask: `[rows, columns]`, of the tokens in the cache and then these; padding is 0. inputs:
        a multimodal prompt's tensors; then the wrapper finds positions itself.
        """
        kwargs: dict[str, Any] = {self._cache_name or "cache": cache, "use_cache": True}
        if self._takes["logits_to_keep"] and not every:
            kwargs["logits_to_keep"] = 1
        if self.padded:
            kwargs["attention_mask"] = mask.to(self.device)
            if inputs is None and self._takes["position_ids"]:
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                kwargs["position_ids"] = positions.to(self.device)
        with torch.inference_mode():
            output = self.model(input_ids=ids.to(self.device), **kwargs, **moved(self.model, inputs or {}))
        return output[0] if isinstance(output, tuple) else output.logits
