"""vLLM's example connector for hidden states, with its copy by CUDA replaced by one that a CPU has."""

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class OnCpu(ExampleHiddenStatesConnector):
    """Writes a request's rows when it ends, in the process that has them."""

    def _submit_async_write(self, pending: Any) -> None:
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        rows = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        save_file({"hidden_states": rows.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = _Done()
