"""Files from the cache of vLLM's own extraction, and taps beside it: a pass then holds drafts of tokens too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.core.errors import ModelLoadError, SpecError
from midstream.formats import hidden_states_file
from on_vllm.kit import Checkpoint, relative
from on_vllm.test_files import PROMPTS, check, generated, params, path_of, rows_of, transfer

EXTRACTED = [0, 2, 3]
EXTRACTION: dict[str, Any] = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": EXTRACTED}},
}


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extracted")


@pytest.fixture(scope="module")
def llm(source: Checkpoint, storage: Path, users_llm: Callable[..., Any]) -> Iterator[Any]:
    given = {"kv_transfer_config": transfer(storage), "speculative_config": EXTRACTION, "max_num_batched_tokens": 64}
    with users_llm(source.folder, skip_tokenizer_init=True, **given) as made:
        yield made


@pytest.mark.parametrize("again", [False, True], ids=["computed", "in the prefix cache"])
def test_each_request_says_where_its_rows_come_from(llm: Any, source: Checkpoint, again: bool) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    files = [
        {"source": "cache", "include_output_tokens": True},
        {"source": "taps", "aux_layer_ids": [1], "include_output_tokens": True},
        {"source": "cache", "aux_layer_ids": [3]},
        {"source": "cache", "aux_layer_ids": [2, 0], "select": "prompt[-1], generated"},
    ]
    outputs = generated(llm, files, max_tokens=40)
    whole = [[*ids, *one.outputs[0].token_ids[:-1]] for ids, one in zip(PROMPTS, outputs, strict=True)]
    plain = source.hf.generate(PROMPTS, max_tokens=40, ignore_eos=True)
    assert [list(one.token_ids[:-1]) for one in plain] == [ids[len(p) :] for ids, p in zip(whole, PROMPTS, strict=True)]
    check(load_hidden_states(path_of(outputs[0])), rows_of(source, whole[0], EXTRACTED), whole[0])
    check(load_hidden_states(path_of(outputs[1])), rows_of(source, whole[1], [1]), whole[1])
    check(load_hidden_states(path_of(outputs[2])), rows_of(source, PROMPTS[2], [3]), PROMPTS[2])
    some = hidden_states_file.read(path_of(outputs[3]))
    assert some.layer_ids == (0, 2)
    assert some.positions is None  # of a prompt of one token, all
    check({"hidden_states": some.hidden_states, "token_ids": some.token_ids},
          rows_of(source, whole[3], [0, 2]), whole[3])  # fmt: skip


def test_every_choice_and_every_preempted_request(llm: Any, source: Checkpoint) -> None:
    wishes = {"source": "cache", "include_output_tokens": True}
    (output,) = generated(llm, wishes, PROMPTS[1:2], n=3, temperature=1.5, seed=1)
    for path, choice in zip(output.kv_transfer_params["hidden_states_paths"], output.outputs, strict=True):
        ids = [*PROMPTS[1], *choice.token_ids[:-1]]
        check(hidden_states_file.read_tensors(path), rows_of(source, ids, EXTRACTED), ids)


def test_taps_are_right_where_passes_hold_drafts(llm: Any, source: Checkpoint) -> None:
    lm = ms.load(llm, backend="vllm")
    steer = ms.add(torch.randn(128, generator=torch.Generator().manual_seed(3)), layers=[1], strength=3.0)
    scoped = ms.add(torch.ones(128), layers=[0], strength=2.0, rows="generated[3:9]")
    given: dict[str, Any] = {"sites": ["resid_post", "q"], "max_tokens": 30, "ignore_eos": True}
    for steering in (None, steer, [scoped, None, steer, scoped]):
        ours = lm.capture(PROMPTS, steering=steering, **given)
        theirs = source.hf.capture(PROMPTS, steering=steering, **given)
        assert ours.labels == theirs.labels
        for key, rows in theirs.tensors.items():
            assert relative(ours.tensors[key], rows) < 1e-4, key
        for mine, due in zip(ours.outputs, theirs.outputs, strict=True):
            assert [(one.layer, one.selected) for one in mine.steering] == [
                (one.layer, one.selected) for one in due.steering
            ]
    with pytest.raises(SpecError, match=r"E_SELECTION at select\.generation_tokens: this engine's passes hold drafts"):
        lm.capture(PROMPTS, rows="generated{5}", max_tokens=3)
    assert lm.capture(PROMPTS, rows="prompt{5}", max_tokens=3).receipt.complete


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"source": "cache", "aux_layer_ids": [1]}, "1 is not in this engine's extraction, [0, 2, 3] from its boot"),
        ({"source": "disk"}, "E_BAD_PARAM at kv_transfer_params.aux_layer_ids: name the layers"),
        ({"source": "disk", "aux_layer_ids": [1]}, "E_BAD_PARAM at kv_transfer_params.source"),
        ({"aux_layer_ids": [1], "select": "generated{7}"}, "passes hold drafts of tokens"),
    ],
)
def test_refused_on_the_way_in(llm: Any, files: Any, message: str) -> None:
    with pytest.raises(SpecError) as raised:
        llm.llm_engine.add_request("one", {"prompt_token_ids": [5]}, params(files))
    assert message in str(raised.value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_engine_without_extraction_has_no_such_cache() -> None:
    from midstream.backends.vllm.plugin.file_settings import FileSettings, file_wishes

    with pytest.raises(SpecError, match=r"E_BAD_PARAM at kv_transfer_params\.source: this engine extracts nothing"):
        file_wishes({"source": "cache"}, FileSettings(), 3)


@pytest.mark.parametrize("files", [True, False])
def test_other_drafts_are_refused(files: bool, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from midstream.backends.vllm.plugin.places import check_supported

    made = SimpleNamespace(**transfer(tmp_path)) if files else None
    extracts = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[1]))
    drafts = SimpleNamespace(method="ngram" if files else "extract_hidden_states", draft_model_config=extracts)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), speculative_config=drafts, kv_transfer_config=made
    )
    with pytest.raises(ModelLoadError, match=r"no engine with speculative decoding yet, but for vLLM's extract_hidden"):
        check_supported(config)


@pytest.mark.slow
def test_from_a_process_of_its_own(source: Checkpoint, tmp_path: Path, users_llm: Callable[..., Any]) -> None:
    """The blocks of a request that has ended are another's in the next pass."""
    given = {
        "kv_transfer_config": transfer(tmp_path),
        "speculative_config": EXTRACTION,
        "num_gpu_blocks_override": 20,
        "enable_prefix_caching": False,
    }
    many = [[5 + i, *PROMPTS[1]] for i in range(24)]
    with users_llm(source.folder, processes=True, skip_tokenizer_init=True, **given) as llm:
        outputs = generated(llm, {"source": "cache", "include_output_tokens": True}, many)
        for output, ids in zip(outputs, many, strict=True):
            whole = [*ids, *output.outputs[0].token_ids[:-1]]
            check(hidden_states_file.read_tensors(path_of(output), 60.0), rows_of(source, whole, EXTRACTED), whole)
