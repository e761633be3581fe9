"""What the rows of a pass are, from the batch of runner V2: its own class, filled by hand. The runner is not run."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from midstream.backends.vllm.plugin import rows_v1, rows_v2
from midstream.taps.step import StepBatch


def batch_of(req_ids: list[str], starts: list[int], computed: list[int]) -> InputBatch:
    """A batch with what is read of it; the rest is there, and None."""
    known = {
        "req_ids": req_ids,
        "num_reqs": len(req_ids),
        "query_start_loc_np": np.array(starts, dtype=np.int32),
        "num_computed_tokens_np": np.array(computed, dtype=np.int32),
        "num_tokens": starts[-1],
        "logits_indices": torch.tensor([stop - 1 for stop in starts[1:]]),
    }
    return InputBatch(**{field.name: known.get(field.name) for field in fields(InputBatch)})  # pyright: ignore


def columns(step: StepBatch) -> dict[str, list[int]]:
    names = ("row", "request", "position", "token_id", "prompt_len")
    return {name: getattr(step, name).tolist() for name in names}


def test_rows_of_runner_v2() -> None:
    """Two of three requests have wishes: one in the middle of its prompt, one past it."""
    batch = batch_of(["a", "plain", "b"], [0, 3, 7, 8], [2, 0, 5])
    prompts = {4: [10, 11, 12, 13, 14, 15], 1: [20, 21, 22, 23]}
    step = rows_v2.step_batch(batch, 16, {"a": 4, "b": 1}, lambda of: len(prompts[of]), prompts.__getitem__)
    assert step.size == 16
    assert columns(step) == {
        "row": [0, 1, 2, 7],
        "request": [4, 4, 4, 1],
        "position": [2, 3, 4, 5],
        "token_id": [12, 13, 14, -1],  # what was sampled is on the device: its reader knows it
        "prompt_len": [6, 6, 6, 4],
    }


def test_runner_v1_says_the_same() -> None:
    table = np.zeros((3, 16), dtype=np.int32)
    table[0, :6], table[2, :6] = [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]
    batch = SimpleNamespace(
        num_reqs=3,
        req_ids=["a", "plain", "b"],
        num_computed_tokens_cpu=np.array([2, 0, 5], dtype=np.int32),
        token_ids_cpu=table,
    )
    runner: Any = SimpleNamespace(
        input_batch=batch, query_start_loc=SimpleNamespace(np=np.array([0, 3, 7, 8, 8], dtype=np.int32))
    )
    step = rows_v1.step_batch(runner, 16, {"a": 4, "b": 1}, {4: 6, 1: 4}.__getitem__)
    assert columns(step)["row"] == [0, 1, 2, 7]
    assert columns(step)["position"] == [2, 3, 4, 5]
    assert columns(step)["token_id"] == [12, 13, 14, 25]
    assert columns(step)["prompt_len"] == [6, 6, 6, 4]


def test_a_pass_of_plain_requests_has_no_rows() -> None:
    step = rows_v2.step_batch(batch_of(["a"], [0, 2], [0]), 2, {}, len, list)  # pyright: ignore
    assert len(step) == 0
