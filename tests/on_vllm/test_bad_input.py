"""What an engine cannot do is refused in one line, before it runs; what fails in one request fails it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.core.errors import PromptError, SpecError, UnsupportedOperationError
from midstream.core.items import GenerationItem, HookEntry, StackEntry
from midstream.core.prompts import PreparedPrompt
from on_vllm.kit import Checkpoint, Engines, assert_rows


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


@pytest.fixture
def lm(source: Checkpoint, engines: Engines) -> ms.LanguageModel:
    return engines.get(source.folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": [7]}, "E_LAYER_RANGE at capture.layers"),
        ({"site": "router_logits"}, "E_SITE at sites: this model has no router_logits: it has no experts"),
        ({"rows": "prompt[a]"}, "E_SELECTION at rows"),
        ({"dtype": "int8"}, "E_BAD_PARAM at dtype"),
        ({"extra": {"num_beams": 2}}, "E_UNKNOWN_KIND at generation.extra"),
        ({"max_tokens": 400}, "max_model_len is 256"),
        ({"stop": "x"}, "E_BAD_PARAM at generation.stop: stop strings need a tokenizer"),
        ({"steering": ms.add(torch.ones(3), layers=[0])}, "E_BAD_PARAM at steering.ops[0].vector"),
        ({"steering": ms.add(torch.ones(128), layers=[9])}, "E_LAYER_RANGE at steering.ops[0].layers"),
        ({"steering": ms.function(lambda rows, labels: None, layers=[0])}, "E_UNKNOWN_KIND at steering.ops[0].kind"),
        (
            {"steering": {"ops": [{"kind": "add", "layers": [0], "vector": "sha256:" + "0" * 64}]}},
            "E_ARTIFACT_MISSING at steering.ops[0].vector",
        ),
        (
            {"steering": {"ops": [{"kind": "add", "layers": [0], "vector": "sha256:" + "0" * 64, "strenght": 1}]}},
            "E_UNKNOWN_FIELD at steering.ops[0].strenght",
        ),
        (
            {"steering": ms.add(torch.ones(12_000, 128), layers=[0], positions=range(10_000, 22_000))},
            "E_SPEC_TOO_LARGE at steering",
        ),
        ({"constraint": {"regex": "a"}}, "E_CONSTRAINT at generation.constraint"),
    ],
)
def test_refused_before_the_engine_runs(lm: ms.LanguageModel, given: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, PromptError)) as raised:
        lm.capture([[5, 6, 7]], **given)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_altered_artifact_is_refused_before_the_engine_runs(lm: ms.LanguageModel) -> None:
    registry = lm._backend.registry  # pyright: ignore[reportAttributeAccessIssue]
    held = registry.put(torch.full((128,), 0.125).numpy())
    data = registry.get_bytes(held)
    (file,) = [file for file in registry.directory.iterdir() if held.removeprefix("sha256:") in file.name]
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(SpecError, match=r"E_ARTIFACT_HASH at steering\.ops\[0\]\.vector: .*altered"):
        lm.capture([[5, 6, 7]], steering={"ops": [{"kind": "add", "layers": [0], "vector": held}]})
    file.unlink()


def test_what_needs_the_model_in_this_process(lm: ms.LanguageModel) -> None:
    prompt = PreparedPrompt((5, 6))
    params = ms.GenerationParams(max_tokens=1)
    for item in (
        GenerationItem(prompt, state_entries=(HookEntry({}),)),
        GenerationItem(prompt, output_entries=(StackEntry(),)),
    ):
        with pytest.raises(UnsupportedOperationError, match="backend='huggingface' has it"):
            lm.session.generate([item], params)


def test_prompts_that_cannot_be(lm: ms.LanguageModel) -> None:
    with pytest.raises(PromptError, match="prompt 1 has token id 160; the model has ids 0 to 159"):
        lm.capture([[5], [160]])
    with pytest.raises(SpecError, match="no prompts"):
        lm.capture([])
    assert lm.generate([], max_tokens=1) == []
    assert lm.score([], []).shape == (0, 0)
    assert lm.score([[5]], [[]]).shape == (1, 0)
    for token, said in ((-1, "a negative token id -1"), (160, "token id 160; the model has ids 0 to 159")):
        with pytest.raises(PromptError, match=f"reference 1 has {said}"):
            lm.score([[5], [5]], [[6], [token]])


def test_a_fault_in_one_request_is_its_own(lm: ms.LanguageModel, source: Checkpoint) -> None:
    """What only the worker can see: an artifact that is gone by then."""
    engine: Any = lm._backend._engine  # pyright: ignore[reportAttributeAccessIssue]
    good, bad = ms.add(torch.ones(128), layers=[0]), ms.add(torch.full((128,), 0.5), layers=[0])
    engine._staged.update(dict.fromkeys(bad.artifacts(), 1))  # as if they were there
    cap = lm.capture([[5, 6, 7], [8, 9], [10, 11]], steering=[good, bad, None], max_tokens=3, ignore_eos=True)
    assert list(cap.errors) == [1]
    assert "E_ARTIFACT_MISSING at steering.ops[0].vector" in str(cap.errors[1])
    theirs = source.hf.capture([[5, 6, 7]], steering=good, max_tokens=3, ignore_eos=True)
    assert cap.outputs[0].token_ids == theirs.outputs[0].token_ids
    assert cap.sample(0)[2].shape == (5, 128)
    with pytest.raises(SpecError, match="E_ARTIFACT_MISSING"):
        cap.sample(1)
    with pytest.raises(ms.PartialBatchError) as raised:
        lm.generate([[5, 6, 7], [8, 9]], max_tokens=2, steering=[good, bad])
    assert list(raised.value.completions) == [0]
    for artifact in bad.artifacts():
        del engine._staged[artifact]
    lm.generate([[8, 9]], max_tokens=2, steering=bad)


def test_a_failed_steer_leaves_no_block_behind(lm: ms.LanguageModel, source: Checkpoint) -> None:
    """Its blocks were cached as if they had been steered: a retry must not find them."""
    engine: Any = lm._backend._engine  # pyright: ignore[reportAttributeAccessIssue]
    prompt = [7 + place % 90 for place in range(100)]
    bad = ms.add(torch.full((128,), 2.5), layers=[0])
    engine._staged.update(dict.fromkeys(bad.artifacts(), 1))
    with pytest.raises(ms.PartialBatchError):
        lm.generate([prompt], max_tokens=2, steering=bad)
    for artifact in bad.artifacts():
        del engine._staged[artifact]
    (ours,) = lm.generate([prompt], max_tokens=4, ignore_eos=True, steering=bad)
    (theirs,) = source.hf.generate([prompt], max_tokens=4, ignore_eos=True, steering=bad)
    assert ours.token_ids == theirs.token_ids
    assert all(not line.reused for line in ours.steering)


def test_a_call_while_a_stream_is_open_is_refused(lm: ms.LanguageModel) -> None:
    stream = lm.stream([5, 6, 7], max_tokens=20, ignore_eos=True)
    next(stream)
    with pytest.raises(ms.BusyError, match="busy with another call"):
        lm.generate([[5]], max_tokens=1)
    stream.close()
    lm.generate([[5]], max_tokens=1)


def test_hundreds_of_small_captures_take_no_room_of_their_own(lm: ms.LanguageModel) -> None:
    """Their rows share segments, which are used again when they are full."""
    segments = _worker(lm).running.segments
    for seed in range(300):
        lm.capture([[(seed * 7 + place * 3) % 150 + 3 for place in range(40)]], rows="prompt")
    assert segments.nbytes <= 512 << 20
    assert len(segments.in_use) <= 12


def test_values_that_an_integer_cannot_hold_fail_their_request(lm: ms.LanguageModel, source: Checkpoint) -> None:
    big = ms.add(torch.full((128,), 1e12), layers=[2])
    cap = lm.capture([[5, 6], [7, 8]], layers=[2], dtype="int32", steering=[big, None])
    assert list(cap.errors) == [0]
    assert "too large for int32" in str(cap.errors[0])
    assert cap.sample(1)[2].dtype == torch.int32
    half = lm.capture([[5, 6], [7, 8]], layers=[2], dtype="float16", steering=[big, None])
    assert [one.receipt.overflowed for one in half.outputs if one.receipt] == [256, 0]


def test_requests_whose_ids_begin_alike_are_kept_apart(lm: ms.LanguageModel, source: Checkpoint) -> None:
    cap = lm.capture([[5], [5, 6], [5, 6, 7]], max_tokens=3, ignore_eos=True)
    assert_rows(cap, source)


def test_after_all_of_it_the_engine_holds_nothing(lm: ms.LanguageModel) -> None:
    worker = _worker(lm)
    running = worker.running
    assert not running._requests
    assert not running.number_of
    kept = set(lm._backend._engine.store._kept)  # pyright: ignore[reportAttributeAccessIssue]
    holders = {one for of in running._tape._holders.values() for one in of}
    assert holders == kept


def _worker(lm: ms.LanguageModel) -> Any:
    """The taps of an engine whose worker is in this process."""
    llm = lm._backend._engine.llm  # pyright: ignore[reportAttributeAccessIssue]
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.midstream_collect.__self__
