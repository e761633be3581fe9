"""vLLM's own extraction (`extract_hidden_states`): states of some layers, fixed at boot, in blocks of its cache."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from midstream.core.errors import CaptureError
from midstream.taps.step import Ints

METHOD: Final = "extract_hidden_states"
"""What `speculative_config` calls it."""


def extracted_ids(vllm_config: Any) -> tuple[int, ...] | None:
    """The layers that an engine extracts, by vLLM's ids, ascending; None in one that extracts none."""
    given = vllm_config.speculative_config
    if given is None or given.method != METHOD:
        return None
    return tuple(sorted(given.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids))


def group_of(kv_cache_config: Any) -> int:
    """Which of a cache's groups has the states, where it has several."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = [] if kv_cache_config is None else kv_cache_config.kv_cache_groups
    found = [place for place, one in enumerate(groups) if isinstance(one.kv_cache_spec, HiddenStateCacheSpec)]
    return found[0] if found else 0


@dataclass(frozen=True, eq=False)
class Extraction:
    """The states of one worker. cache: `[blocks, layers, rows of a block, hidden]`."""

    aux_layer_ids: tuple[int, ...]
    cache: Tensor

    @classmethod
    def of(cls, vllm_config: Any) -> Extraction | None:
        """That of an engine whose cache is there; None where it extracts nothing."""
        ids = extracted_ids(vllm_config)
        if ids is None:
            return None
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        (layer,) = get_layers_from_vllm_config(vllm_config, CacheOnlyAttentionLayer).values()
        return cls(ids, layer.kv_cache)

    def rows(self, blocks: Sequence[int], positions: Ints, aux_layer_ids: Sequence[int]) -> Tensor:
        """`[rows, layers, hidden]` at some positions of the sequence that has these blocks, on the CPU: a copy."""
        size = self.cache.shape[2]
        if len(positions) and int(positions.max()) >= len(blocks) * size:
            raise CaptureError(f"{len(blocks)} blocks of {size} rows have no position {int(positions.max())}")
        places = torch.tensor([self.aux_layer_ids.index(one) for one in aux_layer_ids], device=self.cache.device)
        block = torch.from_numpy(np.asarray(blocks, dtype=np.int64)[positions // size]).to(self.cache.device)
        row = torch.from_numpy(positions % size).to(self.cache.device)
        return self.cache[block[:, None], places[None, :], row[:, None]].cpu()
