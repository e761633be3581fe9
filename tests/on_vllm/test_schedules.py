"""Whatever the scheduler does, rows, labels and steering are those of each request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import midstream as ms
from on_vllm.kit import WHERE, Checkpoint, Engines, assert_rows, relative

RNG = np.random.default_rng(0)
LONG = [RNG.integers(3, 150, size=size).tolist() for size in (200, 90, 130, 33, 64, 7, 1)]
SITES = ["resid_pre", "resid_post", "attn_out", "head_out", "q", "k"]


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


def vector(seed: int = 0, width: int = 128) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def same(ours: ms.CaptureResult, theirs: ms.CaptureResult) -> None:
    assert ours.labels == theirs.labels
    assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
    for key, rows in theirs.tensors.items():
        assert relative(ours.tensors[key], rows) < 1e-4, key


CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}


def test_prompts_in_chunks(source: Checkpoint, engines: Engines) -> None:
    lm = engines.get(source.folder, engine_kwargs=CHUNKED)
    for rows in (None, "prompt[-1]", "prompt[30:70], generated", "prompt{5,6,7}"):
        cap = lm.capture(LONG, sites=SITES, rows=rows, max_tokens=4, ignore_eos=True)
        assert cap.receipt.complete
        assert_rows(cap, source)


def test_steering_in_chunks_counts_each_row_once(source: Checkpoint, engines: Engines) -> None:
    lm = engines.get(source.folder, engine_kwargs=CHUNKED)
    spec = ms.add(vector(), layers=[0, 1], strength=3.0, rows="prompt[0], prompt[100], generated")
    given: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "steering": spec}
    ours, theirs = lm.capture(LONG, **given), source.hf.capture(LONG, **given)
    same(ours, theirs)
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert [line.selected for line in one.steering] == [line.selected for line in other.steering]
        assert all(line.complete and not line.reused for line in one.steering)


def test_seeds_do_not_depend_on_chunks(source: Checkpoint, engines: Engines) -> None:
    """vLLM turns a seeded generator back after a chunk, by an offset that a CPU's has not."""
    given: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.5, "n": 2, "seed": 3}
    chunked = engines.get(source.folder, engine_kwargs=CHUNKED).generate(LONG, **given)
    whole = engines.get(source.folder).generate(LONG, **given)
    assert [[one.token_ids for one in of.choices] for of in chunked] == [
        [one.token_ids for one in of.choices] for of in whole
    ]
    assert len({one.token_ids for of in whole for one in of.choices}) > len(LONG)


def test_gates_see_a_prompt_of_many_chunks(source: Checkpoint, engines: Engines) -> None:
    lm = engines.get(source.folder, engine_kwargs=CHUNKED)
    generator = torch.Generator().manual_seed(3)
    gate = {
        "layers": [0], "pooling": "mean", "readout": {"kind": "cosine", "d": torch.randn(128, generator=generator)},
        "rule": {"kind": "per_layer", "threshold": 0.0, "compare": "ge", "combine": "all"},
    }  # fmt: skip
    spec = ms.add(vector(1), layers=[1, 2], strength=4.0, gate=gate)
    given: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "steering": spec}
    for _ in range(2):  # the second time the prompts are in the cache
        ours, theirs = lm.capture(LONG, **given), source.hf.capture(LONG, **given)
        same(ours, theirs)
        decided = [[line.skipped for line in one.steering] for one in ours.outputs]
        assert decided == [[line.skipped for line in one.steering] for one in theirs.outputs]
        assert len({str(one) for one in decided}) == 2, "all gates decided alike: nothing is shown"


def test_preemption_and_restart(source: Checkpoint, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = engines.get(source.folder, engine_kwargs={"num_gpu_blocks_override": 9})
    prompts = [RNG.integers(3, 150, size=48).tolist() for _ in range(4)]
    spec = ms.add(vector(2), layers=[1], strength=2.0, rows="prompt[-2:], generated[10:]")
    steering = [None, spec, None, spec]
    given: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "steering": steering, "sites": SITES}
    scheduler = lm._backend._engine.llm.llm_engine.engine_core.engine_core.scheduler  # pyright: ignore
    preempted: list[Any] = []
    original = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a), original(*a, **k))[1])
    ours = lm.capture(prompts, **given)
    assert preempted, "nothing was preempted: nothing is shown"
    theirs = source.hf.capture(prompts, **given)
    same(ours, theirs)
    for one, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert [line.computed for line in one.steering] == [line.computed for line in other.steering]


def test_a_prompt_again_has_the_same_rows_without_computing_them(source: Checkpoint, engines: Engines) -> None:
    lm = engines.get(source.folder)
    first = lm.capture(LONG, sites=SITES)
    again = lm.capture(LONG, sites=SITES)
    assert_rows(first, source)
    assert again.labels == first.labels
    for key, rows in first.tensors.items():
        assert torch.equal(again.tensors[key], rows) or relative(again.tensors[key], rows) < 1e-5
    blocks = sum(len(prompt) // 32 * 32 for prompt in LONG)
    assert first.receipt.reused == 0
    assert again.receipt.reused == blocks
    assert again.receipt.complete
    shorter = lm.capture([LONG[0][:100]], sites=SITES)
    assert shorter.receipt.reused == 96
    assert_rows(shorter, source)


def test_prompts_that_begin_alike_share_rows_in_one_call(source: Checkpoint, engines: Engines) -> None:
    lm = engines.get(source.folder)
    prefix = RNG.integers(3, 150, size=70).tolist()
    prompts = [prefix + RNG.integers(3, 150, size=size).tolist() for size in (3, 40, 1)]
    cap = lm.capture(prompts, max_tokens=3, ignore_eos=True)
    assert cap.receipt.reused == 2 * 64
    assert_rows(cap, source)


@WHERE
def test_choices_share_their_prompt(source: Checkpoint, engines: Engines, where: str) -> None:
    lm = engines.at(where, source.folder)
    given: dict[str, Any] = {"n": 3, "max_tokens": 5, "temperature": 1.5, "seed": 7, "ignore_eos": True}
    cap = lm.capture([LONG[3], LONG[5]], **given)
    assert_rows(cap, source)
    for output in cap.outputs:
        assert len({one.token_ids for one in output.choices}) > 1
    assert (cap.labels.choice == -1).sum() == len(LONG[3]) + len(LONG[5])
    again = lm.capture([LONG[3], LONG[5]], **given)
    assert [one.token_ids for of in again.outputs for one in of.choices] == [
        one.token_ids for of in cap.outputs for one in of.choices
    ]


@WHERE
def test_per_prompt_rows_and_storage_types(source: Checkpoint, engines: Engines, where: str) -> None:
    lm = engines.at(where, source.folder)
    each = ["prompt[-1]", None, "prompt[0:3]", "generated"]
    prompts = LONG[:4]
    for dtype in (None, "float16", "bfloat16", "float64", "int32"):
        given: dict[str, Any] = {"per_prompt_rows": each, "max_tokens": 3, "dtype": dtype, "ignore_eos": True}
        ours, theirs = lm.capture(prompts, **given), source.hf.capture(prompts, **given)
        assert ours.labels == theirs.labels
        for key, rows in theirs.tensors.items():
            got = ours.tensors[key]
            assert got.dtype == rows.dtype
            if dtype == "int32":
                assert (got - rows).abs().max() <= 1
            else:
                assert relative(got, rows) < (1e-4 if dtype in (None, "float64") else 1e-2)


@WHERE
def test_plain_requests_beside_steered_ones_are_bit_equal(source: Checkpoint, engines: Engines, where: str) -> None:
    lm = engines.at(where, source.folder)
    spec = ms.ablate(vector(4), layers=[0, 1, 2])
    given: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    before = lm.generate(LONG, **given)
    beside = lm.generate(LONG, steering=[spec, None] * 3 + [spec], **given)
    after = lm.generate(LONG, **given)
    assert [one.token_ids for one in before] == [one.token_ids for one in after]
    if where == "vllm":  # a server's batches are as requests arrive: bits follow them
        assert [one.logprobs for one in before] == [one.logprobs for one in after]
    assert [one.token_ids for one in beside[1::2]] == [one.token_ids for one in before[1::2]]
    assert [one.token_ids for one in beside[::2]] != [one.token_ids for one in before[::2]]


@WHERE
def test_a_steered_prefix_is_never_found_by_others(source: Checkpoint, engines: Engines, where: str) -> None:
    lm = engines.at(where, source.folder)
    prompt = RNG.integers(3, 150, size=100).tolist()
    given: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    spec = ms.add(vector(5), layers=[0], strength=8.0, rows="prompt[-1]")
    for ids, steering in (
        (prompt, spec), (prompt, None), (prompt + prompt[:20], spec), (prompt[:64], spec), (prompt[:96], None),
    ):  # fmt: skip
        ours, theirs = (
            lm.capture([ids], steering=steering, **given),
            source.hf.capture([ids], steering=steering, **given),
        )
        same(ours, theirs)


def test_a_steer_deep_in_a_prompt_shares_what_is_clean(source: Checkpoint, engines: Engines) -> None:
    lm = engines.get(source.folder)
    prompt = RNG.integers(3, 150, size=220).tolist()
    lm.generate([prompt], max_tokens=1)
    spec = ms.add(vector(6), layers=[0], strength=8.0, rows="sequence[200:]")
    (one,) = lm.generate([prompt], max_tokens=2, steering=spec)
    (line,) = one.steering
    assert (line.selected, line.reused) == (21, 0)
    whole = ms.add(vector(6), layers=[0], strength=8.0)
    lm.generate([prompt], max_tokens=1, steering=whole)
    (again,) = lm.generate([prompt], max_tokens=1, steering=whole)
    assert (again.steering[0].selected, again.steering[0].reused) == (220, 192)
    assert again.steering[0].complete


@WHERE
def test_scores_of_steered_references(source: Checkpoint, engines: Engines, where: str) -> None:
    lm = engines.at(where, source.folder)
    spec = ms.add(vector(8), layers=[1], strength=3.0, rows="generated[1:]")
    prompts, references = LONG[:4], [[3, 4, 5, 6]] * 4
    steering = [spec, None, spec, None]
    ours = lm.score(prompts, references, steering=steering)
    theirs = source.hf.score(prompts, references, steering=steering)
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4)


@WHERE
def test_gated_scores(source: Checkpoint, engines: Engines, where: str) -> None:
    """A gate that reads as deep as its op acts: it is decided before the reference runs."""
    lm = engines.at(where, source.folder)
    gate = {
        "layers": [2], "pooling": "mean", "readout": {"kind": "cosine", "d": vector(9)},
        "rule": {"kind": "per_layer", "threshold": 0.0, "compare": "ge", "combine": "all"},
    }  # fmt: skip
    spec = ms.add(vector(1), layers=[0, 1], strength=4.0, gate=gate)
    references = [[3, 4, 5, 6]] * len(LONG)
    ours, theirs = (one.score(LONG, references, steering=spec) for one in (lm, source.hf))
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4)
    plain = source.hf.score(LONG, references)
    assert (theirs == plain).all(1).any()
    assert not (theirs == plain).all()


@WHERE
def test_streams_and_stop_strings(source: Checkpoint, engines: Engines, where: str) -> None:
    lm = engines.at(where, source.folder)
    whole = lm.generate([LONG[3]], max_tokens=8, ignore_eos=True)[0]
    chunks = list(lm.stream(LONG[3], max_tokens=8, ignore_eos=True, layers=[1]))
    assert sum((one.token_ids for one in chunks), ()) == whole.token_ids
    last = chunks[-1]
    assert last.completion is not None
    assert last.capture is not None
    assert last.completion.token_ids == whole.token_ids
    assert_rows(last.capture, source)
    stopped = lm.generate([LONG[3]], max_tokens=8, ignore_eos=True, stop_token_ids=[whole.token_ids[3]])[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]


def test_an_interrupted_stream_leaves_the_engine_free(source: Checkpoint, engines: Engines) -> None:
    lm = engines.get(source.folder)
    stream = lm.stream(LONG[3], max_tokens=50, ignore_eos=True, layers=[1])
    next(stream)
    stream.close()
    cap = lm.capture([LONG[4]], layers=[1])
    assert_rows(cap, source)
