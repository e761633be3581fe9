"""Every site of every family that vLLM and the in-process backend share, against hand-written arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import midstream as ms
from on_vllm.checkpoints import CHECKPOINTS
from on_vllm.kit import Checkpoint, Engines, assert_rows, relative

PROMPTS = [[5, 9, 13], [7], list(range(20, 40)), [5, 9, 14, 30, 31, 32]]


@dataclass(frozen=True)
class Truth:
    """What the model in process says, asked before vLLM changes classes of transformers."""

    completions: list[ms.Completion]
    scores: torch.Tensor
    steered: dict[str, tuple[ms.InterventionSpec, ms.CaptureResult]]


GENERATED: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
STEERED: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}


def truth_of(source: Checkpoint) -> Truth:
    steered: dict[str, tuple[ms.InterventionSpec, ms.CaptureResult]] = {}
    for site in source.hf.capabilities.interventions.sites:
        spec = spec_at(source, site)
        steered[site] = (spec, source.hf.capture(PROMPTS, sites=[site, "resid_post"], steering=spec, **STEERED))
    completions = source.hf.generate(PROMPTS, **GENERATED)
    return Truth(completions, source.hf.score(PROMPTS, [[3, 4, 5]] * len(PROMPTS)), steered)


def spec_at(source: Checkpoint, site: str) -> ms.InterventionSpec:
    layouts = source.hf.session.taps.layouts[site]  # pyright: ignore[reportAttributeAccessIssue]
    layers = list(layouts)[-2:]
    if site == "router_logits":
        return ms.router(layers=layers, on=[1], off=[0], rows="generated, prompt[-1]")
    layout = layouts[layers[0]]
    heads = [0, 2] if site == "head_out" else None
    width = layout.width if heads is None else 2 * layout.head_size
    vector = torch.randn(width, generator=torch.Generator().manual_seed(len(site)))
    return ms.add(vector, layers=layers, site=site, strength=2.0, heads=heads, rows="sequence[1:]")


@pytest.fixture(scope="module")
def truths() -> dict[str, Truth]:
    return {}


#: A server boots for longer: two families show that the way there changes nothing.
LOADED = [("vllm", name) for name in CHECKPOINTS] + [("vllm-serve", "llama"), ("vllm-serve", "qwen3_moe")]


@pytest.fixture(params=LOADED, ids="-".join)
def loaded(
    request: Any, checkpoint: Callable[[str], Checkpoint], engines: Engines, truths: dict[str, Truth]
) -> tuple[Checkpoint, ms.LanguageModel, Truth]:
    where, name = request.param
    source = checkpoint(name)
    if name not in truths:
        truths[name] = truth_of(source)
    return source, engines.at(where, source.folder), truths[name]


def test_every_site_of_prompts_and_what_follows(loaded: tuple[Checkpoint, ms.LanguageModel, Truth]) -> None:
    source, lm, _ = loaded
    sites = list(lm.capabilities.capture.sites)
    assert set(source.hf.capabilities.capture.sites) - set(sites) == set(), lm.capabilities.refused
    cap = lm.capture(PROMPTS, sites=sites, max_tokens=4, ignore_eos=True)
    assert not cap.errors
    assert cap.receipt.complete
    assert_rows(cap, source)
    for prompt, output in zip(PROMPTS, cap.outputs, strict=True):
        assert len(output.token_ids) == 4
        assert output.prompt_token_ids == tuple(prompt)


def test_tokens_and_scores_are_those_in_process(loaded: tuple[Checkpoint, ms.LanguageModel, Truth]) -> None:
    _, lm, truth = loaded
    ours = lm.generate(PROMPTS, **GENERATED)
    assert [one.token_ids for one in ours] == [one.token_ids for one in truth.completions]
    assert [one.finish_reason for one in ours] == [one.finish_reason for one in truth.completions]
    scores = lm.score(PROMPTS, [[3, 4, 5]] * len(PROMPTS))
    torch.testing.assert_close(scores, truth.scores, atol=2e-4, rtol=1e-4)


def test_steering_at_every_site(loaded: tuple[Checkpoint, ms.LanguageModel, Truth]) -> None:
    _, lm, truth = loaded
    assert set(truth.steered) == set(lm.capabilities.interventions.sites)
    for site, (spec, theirs) in truth.steered.items():
        ours = lm.capture(PROMPTS, sites=[site, "resid_post"], steering=spec, **STEERED)
        assert ours.labels == theirs.labels, site
        for key, rows in theirs.tensors.items():
            assert relative(ours.tensors[key], rows) < 1e-4, (site, key)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert [(line.op, line.layer, line.selected) for line in one.steering] == [
                (line.op, line.layer, line.selected) for line in other.steering
            ]
            assert all(line.complete for line in one.steering)
