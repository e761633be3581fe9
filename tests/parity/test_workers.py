"""Batches side by side give the rows that they give one after another, and leave nothing behind."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.backends.huggingface import batching, forward, workers
from midstream.taps.passes import Passes

PROMPTS = [[Random(place).randrange(1, 90) for _ in range(1 + place % 13)] for place in range(40)]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Small batches, so that there are many, on two threads."""
    monkeypatch.setattr(forward, "TOKEN_BUDGET", 24)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_rows_labels_and_receipts_are_those_of_one_thread(two_threads: Any, tiny: Any, monkeypatch: Any) -> None:
    lm, seen = tiny("llama").lm, list[int]()
    asked = {"sites": ["resid_pre", "resid_post", "attn_out", "q"], "rows": "prompt, !prompt[0]"}
    many = lm.capture(PROMPTS, progress=lambda done, total: seen.append(done), **asked)
    monkeypatch.setattr(workers, "MAX_WORKERS", 1)
    one = lm.capture(PROMPTS, **asked)
    assert many.labels == one.labels
    assert many.receipt == one.receipt
    for key, rows in one.tensors.items():
        torch.testing.assert_close(many.tensors[key], rows, rtol=1e-5, atol=1e-5)
    assert seen == sorted(seen)
    assert seen[-1] == sum(map(len, PROMPTS))


def test_a_shared_prefix_is_one_for_all_workers(two_threads: Any, tiny: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(batching, "SHARED_WORTH", 1)
    lm, prefix = tiny("llama").lm, [7, 8, 9, 10, 11, 12]
    prompts = [prefix + ids for ids in PROMPTS]
    many = lm.capture(prompts, layers=[1])
    monkeypatch.setattr(workers, "MAX_WORKERS", 1)
    torch.testing.assert_close(many.rows(1), lm.capture(prompts, layers=[1]).rows(1), rtol=1e-5, atol=1e-5)


def test_torchs_threads_and_ours_are_as_before(two_threads: Any, tiny: Any) -> None:
    tiny("llama").lm.capture(PROMPTS, layers=[0])
    assert torch.get_num_threads() == 2
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert counts == [2]
    assert not [one for one in threading.enumerate() if one.name.startswith("midstream")]


def test_an_error_in_one_batch_ends_the_call(two_threads: Any, tiny: Any, monkeypatch: Any) -> None:
    lm, calls = tiny("llama").lm, list[int]()
    run = forward._run_batch

    def failing(*given: Any) -> int:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return run(*given)

    monkeypatch.setattr(forward, "_run_batch", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        lm.capture(PROMPTS, layers=[0])
    monkeypatch.undo()
    assert torch.get_num_threads() == 2
    assert len(lm.capture(PROMPTS, layers=[0]).labels) == sum(map(len, PROMPTS))


def test_who_must_not_notice_gets_one_thread(two_threads: Any, tiny: Any) -> None:
    one = tiny("llama")
    anatomy = one.lm.session.taps.anatomy
    assert workers.worker_count(anatomy, Passes(), 5) == 2
    assert workers.worker_count(anatomy, Passes(), 1) == 1
    with one.lm.session.entries_applied([]):
        pass
    handle = anatomy.blocks[0].register_forward_hook(lambda *_: None)
    try:
        assert workers.worker_count(anatomy, Passes(), 5) == 1
    finally:
        handle.remove()
    unlisted = tiny("granite").lm.session.taps.anatomy
    assert workers.worker_count(unlisted, Passes(), 5) == 1


def test_another_threads_forward_is_not_recorded(two_threads: Any, tiny: Any) -> None:
    """Nor stopped: it runs to its end while batches run side by side."""
    one = tiny("llama")
    stop, finished = threading.Event(), list[int]()

    def go_on() -> None:
        while not stop.is_set():
            with torch.inference_mode():
                finished.append(len(one.model(torch.tensor([[1, 2, 3]])).logits))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        cap = one.lm.capture(PROMPTS * 3, layers=[0])
    finally:
        stop.set()
        thread.join()
    assert finished
    assert isinstance(cap, ms.CaptureResult)
    assert len(cap.labels) == 3 * sum(map(len, PROMPTS))
