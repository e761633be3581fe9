"""Replays of recorded graphs, played on a CPU: the taps that a graph would record, on a real engine's passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import midstream as ms
from midstream.backends.vllm.plugin.tap_op import at_work
from midstream.taps.fixed import FixedTaps
from on_vllm.kit import Checkpoint, Engines, relative

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14]]
GENERATED: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


class Recorded:
    """What a recorded graph does at its places, whatever the pass wants."""

    def __init__(self, fixed: FixedTaps) -> None:
        self.fixed, self.count = fixed, 0

    def at(self, place: int, delta: Tensor, residual: Tensor | None) -> None:
        if place in self.fixed.places:
            self.count += 1
            self.fixed.at(place, delta, residual)


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


@pytest.fixture
def replaying(
    source: Checkpoint, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ms.LanguageModel, Recorded]]:
    """An engine whose every pass with wishes is a replay."""
    lm = engines.get(source.folder, kept_row_bytes=0)
    llm = lm._backend._engine.llm  # pyright: ignore[reportAttributeAccessIssue]
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    running = worker.midstream_collect.__self__.running
    chosen = running.examined.chosen.items()
    places = {place.number: 128 for (site, _), place in chosen if site in ("resid_pre", "resid_post")}
    recorded = Recorded(FixedTaps(places, 64, torch.float32, torch.device("cpu")))
    original = running.passing

    @contextmanager
    def passing(step: Any, device: torch.device) -> Iterator[None]:
        with original(step, device, recorded.fixed), at_work(recorded):
            yield

    monkeypatch.setattr(running, "passing", passing)
    yield lm, recorded
    assert recorded.count, "nothing was replayed: nothing is shown"


def same(ours: ms.CaptureResult, theirs: ms.CaptureResult) -> None:
    assert not ours.errors
    assert ours.labels == theirs.labels
    assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
    for key, rows in theirs.tensors.items():
        assert relative(ours.tensors[key], rows) < 1e-4, key
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        for mine, right in zip(one.steering, other.steering, strict=True):
            assert (mine.selected, mine.computed) == (right.selected, right.computed)
            assert mine.relative == pytest.approx(right.relative, rel=1e-4)


def adding(seed: int, **given: Any) -> ms.InterventionSpec:
    vector = torch.randn(128, generator=torch.Generator().manual_seed(seed))
    return ms.add(vector, **{"layers": [0, 1], "strength": 3.0, **given})


def test_captures_and_adds(replaying: tuple[ms.LanguageModel, Recorded], source: Checkpoint) -> None:
    lm, _ = replaying
    specs = [adding(1, rows="prompt[-1], generated"), None, adding(2, site="resid_pre") + adding(3, layers=[1])]
    for rows in (None, "generated", "prompt[-1]"):
        given: dict[str, Any] = {"sites": ["resid_pre", "resid_post"], "rows": rows, "steering": specs, **GENERATED}
        same(lm.capture(PROMPTS, **given), source.hf.capture(PROMPTS, **given))


def test_a_steer_goes_on_when_requests_before_it_have_ended(
    replaying: tuple[ms.LanguageModel, Recorded], source: Checkpoint
) -> None:
    lm, _ = replaying
    specs = [None, None, adding(1, rows="generated")]
    free = source.hf.generate(PROMPTS, steering=specs, **GENERATED)
    early = [token for one in free[:2] for token in one.token_ids[1:4] if token not in free[2].token_ids]
    given: dict[str, Any] = {"layers": [2], "steering": specs, "stop_token_ids": early, **GENERATED}
    theirs = source.hf.capture(PROMPTS, **given)
    assert len(theirs.outputs[2].token_ids) == 8
    assert max(len(one.token_ids) for one in theirs.outputs[:2]) < 8
    same(lm.capture(PROMPTS, **given), theirs)


def test_more_rows_than_a_graph_reads_fail_their_requests(replaying: tuple[ms.LanguageModel, Recorded]) -> None:
    lm, _ = replaying
    cap = lm.capture([[3 + place for place in range(65)]], layers=[0])
    assert "65 rows, and a recorded graph reads 64" in str(cap.errors[0])
    assert not lm.capture([[5]], layers=[0]).errors
