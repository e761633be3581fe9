"""Engines that boot slowly: compiled, in processes of their own, over two ranks; and many requests on one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import midstream as ms
from midstream.core.errors import SelfTestError
from on_vllm.kit import Checkpoint, Engines, assert_rows, relative

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(3, 150, size=size).tolist() for size in (70, 33, 5, 1)]


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


def spec_of(source: Checkpoint) -> Any:
    vector = torch.randn(128, generator=torch.Generator().manual_seed(0))
    return ms.add(vector, layers=[1], strength=3.0, rows="prompt[-1], generated")


def check(lm: ms.LanguageModel, source: Checkpoint) -> None:
    """Captures, steers and scores, against the oracle and the model in process."""
    cap = lm.capture(PROMPTS, sites=list(lm.capabilities.capture.sites), max_tokens=4, ignore_eos=True)
    assert_rows(cap, source)
    spec = spec_of(source)
    given: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "steering": [spec, None, spec, None]}
    for sites in (["resid_post"], ["resid_pre", "resid_post", "head_out"]):
        ours = lm.capture(PROMPTS, sites=sites, **given)
        theirs = source.hf.capture(PROMPTS, sites=sites, **given)
        assert ours.labels == theirs.labels
        for key, rows in theirs.tensors.items():
            assert relative(ours.tensors[key], rows) < 1e-4, key
        assert all(line.complete for one in ours.outputs for line in one.steering)
    torch.testing.assert_close(
        lm.score(PROMPTS, [[3, 4]] * 4), source.hf.score(PROMPTS, [[3, 4]] * 4), atol=5e-4, rtol=1e-4
    )


@pytest.mark.parametrize("graph", [(), ("resid_pre", "resid_post")])
def test_a_compiled_engine(source: Checkpoint, engines: Engines, graph: tuple[str, ...]) -> None:
    """Steps that want what the graph does not show run without it; those that do not, with it."""
    options = {"enforce_eager": False, "max_num_seqs": 8}
    lm = engines.get(source.folder, engine_kwargs=options, graph_sites=list(graph))
    assert lm._backend._engine.facts.graph == frozenset(graph)  # pyright: ignore[reportAttributeAccessIssue]
    check(lm, source)
    engines.close()


def test_an_engine_in_a_process_of_its_own(
    source: Checkpoint, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    lm = engines.get(source.folder, engine_kwargs={"max_num_seqs": 16})
    check(lm, source)
    again = lm.capture([PROMPTS[0]], sites=list(lm.capabilities.capture.sites))
    assert again.receipt.reused == 64
    engines.close()


def test_an_engine_that_is_killed_is_said_to_be_dead(
    source: Checkpoint, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both who waits for a step and who waits for an answer of our plugin; and the next engine works."""
    engines.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    lm = engines.get(source.folder, engine_kwargs={"max_num_seqs": 17})
    stream = lm.stream(PROMPTS[1], max_tokens=100, ignore_eos=True, layers=[0])
    next(stream)
    children = psutil.Process().children(recursive=True)
    with ThreadPoolExecutor(2) as pool:
        for child in children:
            child.suspend()
        waiting = [pool.submit(list, stream), pool.submit(lm._backend._engine.call, "describe")]  # pyright: ignore
        assert not wait(waiting, timeout=2).done
        for child in children:
            child.kill()
        for one in waiting:
            with pytest.raises(ms.EngineError, match="has died"):
                one.result(timeout=60)
    with pytest.raises(ms.EngineError, match="has died"):
        lm.capture([PROMPTS[1]])
    engines.close()
    assert_rows(engines.get(source.folder).capture([PROMPTS[1]]), source)


def test_two_ranks(source: Checkpoint, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.close()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    lm = engines.get(source.folder, engine_kwargs={"tensor_parallel_size": 2})
    check(lm, source)
    heads = ms.add(torch.ones(64), layers=[1], site="head_out", heads=[1, 2], strength=2.0)
    norm = ms.clamp(torch.ones(96), layers=[1], site="head_out", heads=[0, 1, 3], value=1.5)
    for spec in (heads, norm):
        given: dict[str, Any] = {"steering": spec, "max_tokens": 3, "ignore_eos": True}
        ours, theirs = lm.capture(PROMPTS, **given), source.hf.capture(PROMPTS, **given)
        for key, rows in theirs.tensors.items():
            assert relative(ours.tensors[key], rows) < 1e-4, key
    engines.close()


def test_a_thousand_requests_leave_memory_flat(source: Checkpoint, engines: Engines) -> None:
    lm = engines.get(source.folder, kept_row_bytes=64 << 20)
    process, spec = psutil.Process(), spec_of(source)

    def fifty(seed: int) -> None:
        prompts = [np.random.default_rng(seed * 50 + i).integers(3, 150, size=60).tolist() for i in range(50)]
        lm.capture(prompts, max_tokens=3, ignore_eos=True, steering=[spec, None] * 25)
        stream = lm.stream(prompts[0], max_tokens=20, ignore_eos=True, layers=[0])
        next(stream)
        stream.close()

    for seed in range(30):
        fifty(seed)
    gc.collect()
    before = process.memory_info().rss
    for seed in range(30, 50):
        fifty(seed)
    gc.collect()
    assert process.memory_info().rss - before < 40 << 20


def test_a_graph_whose_taps_do_not_fire_is_refused(
    source: Checkpoint, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a hook put on a compiled engine would do: nothing, silently. Here loading says so."""
    engines.close()
    from midstream.backends.vllm.plugin import places

    original = places.touch

    def eager_only(place: int, in_graph: bool, delta: Any, residual: Any) -> None:
        original(place, False, delta, residual)

    monkeypatch.setattr(places, "touch", eager_only)
    with pytest.raises(SelfTestError, match="fired 0 times in the compiled graph"):
        engines.get(source.folder, engine_kwargs={"enforce_eager": False}, graph_sites=["resid_post"])


def test_the_real_model_against_its_reference(engines: Engines, tmp_path: Path) -> None:
    """SmolLM2 in bfloat16: `midstream verify --backend vllm` holds."""
    engines.close()
    from typer.testing import CliRunner

    from midstream.cli import app

    engine = '{"enforce_eager": true, "max_model_len": 512, "kv_cache_memory_bytes": 268435456}'
    done = CliRunner().invoke(app, ["verify", "-m", "smollm2", "--backend", "vllm", "--engine", engine])
    assert done.exit_code == 0, done.output
    assert "hold: 7 sites" in done.output
