"""Options of a small engine."""

from __future__ import annotations

from typing import Any

#: Small enough for many engines one after another; `enforce_eager` boots in seconds.
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 32,
}
