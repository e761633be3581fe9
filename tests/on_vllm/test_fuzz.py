"""Random specs, selections and schedules: a mixed batch on the engine gives what the model in process gives."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import midstream as ms
from midstream.core.interventions import InterventionSpec
from on_vllm.kit import Checkpoint, Engines, relative

HIDDEN, LAYERS = 128, 3
ROWS = [
    None, "prompt", "generated", "prompt[-1]", "prompt[0]", "sequence[5:]", "prompt[2:40], generated[1:]",
    "prompt, generated, !prompt[0]", "sequence, !generated[0]", "prompt{5,6,7,8,9}, generated{3,4,5}", "sequence[60]",
]  # fmt: skip
SITES = ["resid_pre", "resid_post", "attn_out", "mlp_out", "head_out"]
#: Chunks of 48 tokens, or few blocks so that requests are preempted, or neither.
SCHEDULES: list[dict[str, Any]] = [
    {}, {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}, {"num_gpu_blocks_override": 11},
]  # fmt: skip


def random_op(random: Random, rng: np.random.Generator) -> dict[str, Any]:
    kind = random.choice(["add", "add", "ablate", "clamp", "replace", "rotate", "affine", "low_rank"])
    site = random.choice(SITES) if kind in ("add", "ablate", "clamp", "replace") else "resid_post"
    layers = sorted(random.sample(range(LAYERS), random.randint(1, LAYERS)))
    op: dict[str, Any] = {"kind": kind, "site": site, "layers": layers, "scope": random.choice(ROWS)}
    width = HIDDEN
    if site == "head_out":
        op["heads"] = sorted(random.sample(range(4), random.randint(1, 4)))
        width = 32 * len(op["heads"])

    def draw(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    if kind == "add":
        op |= {"vector": draw(width), "strength": random.choice([-2.0, 0.0, 0.5, 3.0])}
        if site in ("resid_pre", "resid_post") and random.random() < 0.3:
            op["norm_match"] = True
    elif kind == "ablate":
        op |= {"directions": draw(random.randint(1, 3), width), "strength": random.choice([0.3, 1.0])}
    elif kind == "clamp":
        op |= {"direction": draw(width), "value": random.choice([-1.0, 0.0, 2.0])}
    elif kind == "replace":
        op |= {"vector": draw(width), "strength": random.choice([0.4, 1.0])}
    elif kind == "rotate":
        op |= {"basis": draw(2, HIDDEN), "angle": 0.7, "mode": random.choice(["to", "by"])}
    elif kind == "affine":
        op |= {"matrix": np.eye(HIDDEN, dtype=np.float32) + 0.05 * draw(HIDDEN, HIDDEN), "bias": draw(HIDDEN)}
        op["strength"] = 0.5
    else:
        op |= {"P": 0.1 * draw(3, HIDDEN), "bias": draw(3), "Q": 0.1 * draw(HIDDEN, 3), "strength": 1.0}
    if random.random() < 0.2:
        op["cap_norm"] = True
    return {name: value for name, value in op.items() if value is not None}


def random_spec(random: Random, rng: np.random.Generator) -> InterventionSpec | None:
    if random.random() < 0.3:
        return None
    return InterventionSpec.read([random_op(random, rng) for _ in range(random.randint(1, 3))])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["plain", "chunks", "preempted"])
def test_random_batches(schedule: dict[str, Any], checkpoint: Callable[[str], Checkpoint], engines: Engines) -> None:
    source = checkpoint("llama")
    lm = engines.get(source.folder, engine_kwargs=schedule)
    pool = [np.random.default_rng(seed).integers(3, 150, size=120).tolist() for seed in (8, 9)]
    for seed in range(12):
        random, rng = Random(seed), np.random.default_rng(seed)
        prompts = [
            random.choice(pool)[: random.randint(1, 110)] + rng.integers(3, 150, size=random.randint(1, 9)).tolist()
            for _ in range(random.randint(1, 6))
        ]
        specs = [random_spec(random, rng) for _ in prompts]
        given: dict[str, Any] = {
            "sites": random.sample([*SITES, "q", "k"], random.randint(1, 4)),
            "layers": sorted(random.sample(range(LAYERS), random.randint(1, LAYERS))),
            "per_prompt_rows": [random.choice(ROWS) for _ in prompts],
            "max_tokens": random.randint(1, 12),
            "ignore_eos": True,
            "steering": specs,
        }
        ours, theirs = lm.capture(prompts, **given), source.hf.capture(prompts, **given)
        assert not ours.errors, (seed, ours.errors)
        check(seed, ours, theirs, given["max_tokens"])


def check(seed: int, ours: ms.CaptureResult, theirs: ms.CaptureResult, max_tokens: int) -> None:
    if max_tokens > 1:
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs], seed
    assert ours.labels == theirs.labels, seed
    assert ours.receipt.selected == theirs.receipt.selected
    assert ours.receipt.complete
    for key, rows in theirs.tensors.items():
        assert relative(ours.tensors[key], rows) < 1e-4, (seed, key)
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        mine = [(line.op, line.layer, line.selected, line.skipped) for line in one.steering]
        assert mine == [(line.op, line.layer, line.selected, line.skipped) for line in other.steering], seed
        assert all(line.complete for line in one.steering)
