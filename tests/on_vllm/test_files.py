"""Hidden-states files that an engine writes from taps: vLLM's own reader, its options, and what goes wrong."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midstream.core.errors import ModelLoadError, SpecError
from midstream.formats import hidden_states_file
from on_vllm.kit import Checkpoint, relative

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 150, size=size).tolist() for size in (70, 33, 5, 1)]
SETTINGS: dict[str, Any] = {"num_writer_threads": 2}


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


def transfer(storage: Path, **more: Any) -> dict[str, Any]:
    from midstream.backends.vllm import hidden_states_files

    return hidden_states_files(storage, **{**SETTINGS, **more})


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def llm(source: Checkpoint, storage: Path, users_llm: Callable[..., Any]) -> Iterator[Any]:
    given = {"kv_transfer_config": transfer(storage), "max_num_batched_tokens": 64, "skip_tokenizer_init": True}
    with users_llm(source.folder, **given) as made:
        yield made


def params(files: Any, **given: Any) -> Any:
    from vllm import SamplingParams

    extra = None if files is None else {"kv_transfer_params": files}
    merged = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4, "detokenize": False, **given}
    return SamplingParams(extra_args=extra, **merged)


def generated(llm: Any, files: Any, prompts: Any = PROMPTS, **given: Any) -> list[Any]:
    return llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        [params(one, **given) for one in files] if isinstance(files, list) else params(files, **given),
        use_tqdm=False,
    )


def path_of(output: Any) -> str:
    return output.kv_transfer_params["hidden_states_path"]


def rows_of(source: Checkpoint, ids: Any, aux: list[int]) -> torch.Tensor:
    true = source.oracle(tuple(ids))
    return torch.stack([true["resid_post", k - 1] if k else true["resid_pre", 0] for k in aux], dim=1)


def check(file: Any, states: torch.Tensor, ids: Any) -> None:
    assert file["token_ids"].tolist() == list(ids)
    for place in range(states.shape[1]):
        assert relative(file["hidden_states"][:, place], states[:, place]) < 1e-4


@pytest.mark.parametrize("again", [False, True], ids=["computed", "in the prefix cache"])
def test_vllms_own_reader_reads_them(llm: Any, source: Checkpoint, storage: Path, again: bool) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    for output, ids in zip(generated(llm, {"aux_layer_ids": [0, 2, 3]}), PROMPTS, strict=True):
        path = path_of(output)
        assert Path(path).parent == storage
        check(load_hidden_states(path), rows_of(source, ids, [0, 2, 3]), ids)
        ours = hidden_states_file.read(path)
        assert ours.layer_ids == (0, 2, 3)
        assert (ours.prompt_len, ours.generated) == (len(ids), tuple(output.outputs[0].token_ids))
        cleanup_hidden_states(path)
    assert not list(storage.iterdir())


def test_each_request_has_its_own_wishes(llm: Any, source: Checkpoint) -> None:
    files = [
        {"aux_layer_ids": [3], "include_output_tokens": True},
        None,
        {"aux_layer_ids": [1, 2], "select": "prompt[-1], generated"},
        {"aux_layer_ids": [0], "include_output_tokens": False},
    ]
    outputs = generated(llm, files)
    whole = [[*ids, *one.outputs[0].token_ids[:-1]] for ids, one in zip(PROMPTS, outputs, strict=True)]
    check(hidden_states_file.read_tensors(path_of(outputs[0])), rows_of(source, whole[0], [3]), whole[0])
    assert outputs[1].kv_transfer_params is None
    some = hidden_states_file.read(path_of(outputs[2]))
    at = list(range(4, 8))
    assert some.positions is not None
    assert some.positions.tolist() == at
    check({"hidden_states": some.hidden_states, "token_ids": some.token_ids},
          rows_of(source, whole[2], [1, 2])[at], [whole[2][i] for i in at])  # fmt: skip
    cap = hidden_states_file.as_capture(some)
    assert cap.labels.position.tolist() == at
    assert cap.labels.generated.tolist() == [False, True, True, True]
    check(hidden_states_file.read_tensors(path_of(outputs[3])), rows_of(source, PROMPTS[3], [0]), PROMPTS[3])


def test_every_choice_has_a_file(llm: Any, source: Checkpoint) -> None:
    (output,) = generated(
        llm, {"aux_layer_ids": [2], "include_output_tokens": True}, PROMPTS[1:2], n=3, temperature=1.5, seed=1
    )
    paths = output.kv_transfer_params["hidden_states_paths"]
    assert len(set(paths)) == 3
    for path, choice in zip(paths, output.outputs, strict=True):
        ids = [*PROMPTS[1], *choice.token_ids[:-1]]
        check(hidden_states_file.read_tensors(path), rows_of(source, ids, [2]), ids)


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        (
            {"hidden_states_path": "/etc/x"},
            {},
            "E_BAD_PARAM at kv_transfer_params.hidden_states_path: no path is taken",
        ),
        ({"aux_layer_ids": [4]}, {}, "E_LAYER_RANGE at kv_transfer_params.aux_layer_ids: 4 is not in 0..3"),
        ({"aux_layer_ids": []}, {}, "E_BAD_PARAM at kv_transfer_params.aux_layer_ids"),
        ({"aux_layer_ids": [-1]}, {}, "E_BAD_PARAM at kv_transfer_params.aux_layer_ids"),
        ({"include_output_tokens": True}, {}, "E_BAD_PARAM at kv_transfer_params.aux_layer_ids: name the layers"),
        ({"aux_layer_ids": [1], "select": "prompt[a]"}, {}, "E_SELECTION at kv_transfer_params.select"),
        ({"aux_layer_ids": [1], "select": "prompt", "include_output_tokens": True}, {}, "give one of the two"),
        ({"aux_layer_ids": [1], "include_output_tokens": "yes"}, {}, "is true or false"),
        ({"aux_layers": [1]}, {}, "E_UNKNOWN_FIELD at kv_transfer_params.aux_layers"),
        ([1], {}, "E_BAD_PARAM at kv_transfer_params"),
    ],
)
def test_refused_on_the_way_in(llm: Any, files: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        llm.llm_engine.add_request("one", {"prompt_token_ids": [5]}, params(files, **given))
    assert message in str(raised.value)
    assert not llm.llm_engine.has_unfinished_requests()


def test_what_a_file_does_not_go_with_is_refused() -> None:
    from types import SimpleNamespace

    from midstream.backends.vllm.plugin.admission import Admission
    from midstream.backends.vllm.plugin.file_settings import FileSettings

    admission = Admission(FileSettings(), 3)
    wanted: dict[str, Any] = {"kv_transfer_params": {"aux_layer_ids": [1]}}
    with pytest.raises(SpecError, match=r"E_BAD_PARAM at stop: .*use stop_token_ids"):
        admission.wishes_of("a", SimpleNamespace(max_tokens=1, stop=["x"], extra_args=wanted))
    for text, message in (
        ('{"id":"a"}', "a call of an lm gets no file"),
        ('{"id":"b"}', "is written by calls of an lm"),
    ):
        with pytest.raises(SpecError, match=message):
            admission.wishes_of("a", SimpleNamespace(max_tokens=1, stop=[], extra_args={**wanted, "midstream": text}))


def test_an_aborted_request_leaves_nothing(llm: Any, storage: Path) -> None:
    for path in storage.iterdir():
        path.unlink()
    engine = llm.llm_engine
    for one in ("first", "second"):
        engine.add_request(one, {"prompt_token_ids": PROMPTS[0]}, params({"aux_layer_ids": [1]}, max_tokens=30))
    engine.step()
    assert len(list(storage.glob("*.lock"))) == 1, "the second waits: a step takes 64 tokens"
    engine.abort_request(["first", "second"])
    while engine.has_unfinished_requests():
        engine.step()
    assert not list(storage.iterdir())
    check_alive(llm)


def check_alive(llm: Any) -> None:
    (output,) = generated(llm, {"aux_layer_ids": [1]}, PROMPTS[2:3])
    assert len(hidden_states_file.read(path_of(output)).hidden_states) == 5


def test_ids_that_begin_one_another_have_each_its_own_file(llm: Any, source: Checkpoint) -> None:
    engine = llm.llm_engine
    prompts = {"a": [5, 6], "a-b": [7, 8, 9], "1_a": [10], "a-12345678": [11, 12, 13, 14]}
    for one, ids in prompts.items():
        engine.add_request(one, {"prompt_token_ids": ids}, params({"aux_layer_ids": [2]}))
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    for one, ids in prompts.items():
        check(hidden_states_file.read_tensors(path_of(found[one])), rows_of(source, ids, [2]), ids)


def test_a_disk_that_is_full(
    llm: Any, storage: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from midstream.backends.vllm.plugin import files

    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "midstream.files"):
        patch.setattr(files, "write_file", full)
        outputs = generated(llm, {"aux_layer_ids": [1]})
        for output in outputs:
            with pytest.raises(FileNotFoundError, match="no file"):
                hidden_states_file.read(path_of(output))
            assert not Path(path_of(output) + ".lock").exists()
    assert sum("No space left" in one.message for one in caplog.records) == len(outputs)
    check_alive(llm)


def test_a_request_whose_name_is_a_path_writes_in_the_storage(llm: Any, storage: Path) -> None:
    engine = llm.llm_engine
    engine.add_request("../../evil", {"prompt_token_ids": [5, 6]}, params({"aux_layer_ids": [1]}))
    found: list[Any] = []
    while engine.has_unfinished_requests():
        found += engine.step()
    path = Path(path_of(found[-1]))
    assert path.parent == storage
    assert len(hidden_states_file.read(path).hidden_states) == 2


def test_defaults_no_locks_and_a_bound(source: Checkpoint, tmp_path: Path, users_llm: Callable[..., Any]) -> None:
    size = 70 * 2 * 128 * 4
    given = transfer(tmp_path / "new", aux_layer_ids=[1, 3], use_synchronization_lock=False, max_storage_bytes=3 * size)
    with users_llm(source.folder, kv_transfer_config=given, skip_tokenizer_init=True) as llm:
        paths = [path_of(generated(llm, None, [[*PROMPTS[0][:-1], 20 + i]])[0]) for i in range(6)]
    # what is being written as the engine ends is finished first
    assert [Path(path).exists() for path in paths] == [False] * 3 + [True] * 3
    assert not list((tmp_path / "new").glob("*.lock"))
    assert hidden_states_file.read(paths[-1]).layer_ids == (1, 3)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"allow_custom_save_path": True}, "allow_custom_save_path: no path is taken from a request"),
        ({"num_writer_threads": 0}, "E_BAD_PARAM at kv_connector_extra_config.num_writer_threads"),
        ({"use_synchronization_lock": "false"}, "E_BAD_PARAM at kv_connector_extra_config.use_synchronization_lock"),
        ({"layers": [1]}, "E_UNKNOWN_FIELD at kv_connector_extra_config.layers"),
        ({"aux_layer_ids": [-1]}, "E_BAD_PARAM at kv_connector_extra_config.aux_layer_ids"),
        ({"max_storage_bytes": -1}, "E_BAD_PARAM at kv_connector_extra_config.max_storage_bytes"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    from types import SimpleNamespace

    from midstream.backends.vllm.plugin.file_settings import FileSettings

    given = {**transfer(tmp_path), "kv_connector_extra_config": extra}
    with pytest.raises(ModelLoadError) as raised:
        FileSettings.read(SimpleNamespace(kv_transfer_config=SimpleNamespace(**given)))
    assert message in str(raised.value)
    with pytest.raises(ModelLoadError, match=r"aux_layer_ids: 7 is not in 0\.\.3"):
        FileSettings(aux_layer_ids=(7,)).check_layers(3)


def test_a_storage_that_cannot_be_written(tmp_path: Path) -> None:
    from midstream.backends.vllm.plugin.file_settings import FileSettings

    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"shared_storage_path .*file/below: Not a directory: name another"):
        FileSettings(shared_storage_path=str(tmp_path / "file" / "below")).check_directory()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_from_processes_of_their_own(
    ranks: int, source: Checkpoint, tmp_path: Path, users_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ranks == 2:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    given = {"kv_transfer_config": transfer(tmp_path), "skip_tokenizer_init": True, "tensor_parallel_size": ranks}
    with users_llm(source.folder, processes=True, **given) as llm:
        for _ in range(2):
            outputs = generated(llm, {"aux_layer_ids": [0, 3], "include_output_tokens": True})
            for output, ids in zip(outputs, PROMPTS, strict=True):
                whole = [*ids, *output.outputs[0].token_ids[:-1]]
                check(hidden_states_file.read_tensors(path_of(output), 60.0), rows_of(source, whole, [0, 3]), whole)


@pytest.mark.slow
def test_a_data_set_written_by_vllms_own_extraction_is_the_same(
    source: Checkpoint, tmp_path: Path, users_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers are fixed at boot; ours are named by each request."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks" / "peers")
    files: dict[str, list[dict[str, torch.Tensor]]] = {}
    ours = {"kv_transfer_config": transfer(tmp_path / "ours")}
    stock = {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}},
        },
        "kv_transfer_config": {
            "kv_connector": "OnCpu",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "extraction_on_cpu",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "stock")},
        },
        "additional_config": {"midstream": None},
    }
    for name, engine, wishes in (
        ("ours", ours, {"aux_layer_ids": [0, 2, 3], "include_output_tokens": True}),
        ("stock", stock, {"include_output_tokens": True}),
    ):
        with users_llm(source.folder, skip_tokenizer_init=True, enable_prefix_caching=False, **engine) as llm:
            outputs = generated(llm, wishes)
            generated(llm, None, PROMPTS[:1])  # vLLM writes what ended last in a step after
            files[name] = [hidden_states_file.read_tensors(path_of(one), 60.0) for one in outputs]
    for mine, theirs in zip(files["ours"], files["stock"], strict=True):
        assert mine["token_ids"].tolist() == theirs["token_ids"].tolist()
        assert mine["hidden_states"].shape == theirs["hidden_states"].shape
        for place in range(3):
            assert relative(mine["hidden_states"][:, place], theirs["hidden_states"][:, place]) < 1e-4
