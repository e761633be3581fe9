"""How an engine comes up and goes: its environment, its options, and engines that never asked for us."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.core.errors import ModelLoadError, SessionClosedError, SpecError
from on_vllm.kit import ENGINE, Checkpoint, Engines, assert_rows


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


def load(source: Checkpoint, **options: Any) -> ms.LanguageModel:
    engine = ENGINE | options.pop("engine_kwargs", {})
    return ms.load(str(source.folder), backend="vllm", dtype="float32", engine_kwargs=engine, **options)


def test_one_engine_after_another_and_nothing_left_behind(source: Checkpoint, engines: Engines) -> None:
    import vllm  # noqa: F401 (its import alone sets variables)

    engines.close()
    before, threads = dict(os.environ), torch.get_num_threads()
    for _ in range(2):
        with load(source) as lm:
            folder = lm._backend._engine.facts.folders[0]  # pyright: ignore[reportAttributeAccessIssue]
            assert_rows(lm.capture([[5, 6, 7]]), source)
            assert folder.exists()
        assert not folder.exists()
        assert dict(os.environ) == before
        torch.set_num_threads(threads)
        assert torch.get_num_threads() == threads
    with pytest.raises(SessionClosedError):
        lm.capture([[5]])


def test_an_engine_that_does_not_ask_is_left_alone(source: Checkpoint, engines: Engines) -> None:
    """Our plugin is loaded, and a request even speaks to it: nothing changes, nothing is wrapped."""
    engines.close()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm import LLM, SamplingParams

        llm = LLM(str(source.folder), dtype="float32", skip_tokenizer_init=True, **ENGINE)
        core: Any = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        assert not [name for name in vars(worker) if name.startswith("midstream")]
        assert "_model_forward" not in vars(worker.model_runner)
        assert all("forward" not in vars(module) for module in worker.model_runner.get_model().modules())
        params = SamplingParams(max_tokens=4, temperature=0.0, detokenize=False, extra_args={"midstream": "{}"})
        (out,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        (want,) = source.hf.generate([[5, 6, 7]], max_tokens=4, ignore_eos=True)
        assert tuple(out.outputs[0].token_ids)[:4] == want.token_ids[: len(out.outputs[0].token_ids)]
        with pytest.raises(NotImplementedError):
            llm.collective_rpc("midstream_describe")
        with pytest.raises(ModelLoadError, match="was not asked for taps: make it with additional_config="):
            ms.load(llm, backend="vllm")
        llm.llm_engine.engine_core.shutdown()
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        del llm, core, worker
        cleanup_dist_env_and_memory()
    finally:
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_kwargs": {"dtype": "bfloat16"}}, "E_BAD_PARAM at dtype: float32 here and bfloat16 in engine_kwargs"),
        ({"engine_kwargs": {"speculative_config": {}}}, "E_BAD_PARAM at engine_kwargs.speculative_config"),
        ({"device": "cuda"}, "E_BAD_PARAM at device"),
        ({"surprise": 1}, "E_UNKNOWN_FIELD at options: unknown ['surprise']"),
        ({"graph_sites": ["nowhere"]}, "E_SITE at graph_sites[0]"),
    ],
)
def test_options_that_contradict_are_refused(source: Checkpoint, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        load(source, **options)
    assert message in str(raised.value)


def test_models_that_cannot_be_loaded(tmp_path: Path, source: Checkpoint, engines: Engines) -> None:
    engines.close()
    with pytest.raises(ModelLoadError, match="cannot load"):
        ms.load(str(tmp_path / "nothing"), backend="vllm", engine_kwargs=ENGINE)
    with pytest.raises(ModelLoadError, match="vLLM cannot serve"):
        load(source, engine_kwargs={"max_model_len": 10**9})
    with pytest.raises(ModelLoadError, match="pipeline_parallel_size=2"):
        load(source, engine_kwargs={"pipeline_parallel_size": 2})
    with pytest.raises(ModelLoadError, match="cannot be served"):
        ms.load(source.model, backend="vllm")
    with load(source) as lm:  # a failed boot leaves room for the next
        assert_rows(lm.capture([[5, 6]]), source)


def test_a_checkpoint_replaces_the_weights(
    source: Checkpoint, checkpoint: Callable[[str], Checkpoint], tmp_path: Path, engines: Engines
) -> None:
    engines.close()
    changed = source.model
    other = tmp_path / "other"
    with torch.no_grad():
        weight = changed.get_input_embeddings().weight
        kept = weight.clone()
        weight.mul_(1.5)
        changed.save_pretrained(other)
        want = ms.load(changed).capture([[5, 6, 7]])
        weight.copy_(kept)
    (other / "config.json").unlink()
    with load(source, checkpoint=str(other)) as lm:
        got = lm.capture([[5, 6, 7]])
    for key, rows in want.tensors.items():
        torch.testing.assert_close(got.tensors[key], rows, atol=1e-3, rtol=1e-3)
    with pytest.raises(ModelLoadError, match="no checkpoint"):
        load(source, checkpoint=str(tmp_path / "none"))


@pytest.mark.parametrize("number", ["0.28.1", "0.33.0", "1.0"])
def test_versions_that_are_not_known_are_refused(
    source: Checkpoint, engines: Engines, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    import vllm

    engines.close()
    monkeypatch.setattr(vllm, "__version__", number)
    with pytest.raises(ModelLoadError, match=f"vLLM {number} is not known here: install one from 0.29 to before 0.33"):
        load(source)


def test_a_plugin_that_is_not_allowed_is_named(
    source: Checkpoint, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose workers have no taps, as where VLLM_PLUGINS leaves ours out."""
    from midstream.backends.vllm.plugin import activation

    engines.close()
    monkeypatch.setattr(activation, "settings_of", lambda config: None)
    with pytest.raises(ModelLoadError, match="VLLM_PLUGINS"):
        load(source)
