"""vLLM's hidden-states file: its tensors, its lock, and the way back to a capture."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from midstream.compat import load_hidden_states
from midstream.core.errors import CaptureError, FileFormatError, SpecError, UnsupportedOperationError
from midstream.core.generation import Completion
from midstream.core.result import CaptureResult
from midstream.core.sites import SiteLayout
from midstream.formats.hidden_states_file import HiddenStatesFile, as_capture, read, read_tensors, save_capture
from unit.captures import GENERATED, PROMPTS, bits, made, same, whole_labels

# vLLM's reader, as its documentation gives the protocol: open the lock, wait for a shared flock, load.
READER = """
import fcntl, sys, time
from pathlib import Path
from safetensors.numpy import load_file
path = sys.argv[1]
while not Path(path + ".lock").exists():
    time.sleep(0.0005)
with open(path + ".lock") as lock:
    fcntl.flock(lock, fcntl.LOCK_SH)
    states = load_file(path)
sys.stdout.write(f"{tuple(states['hidden_states'].shape)} {states['token_ids'].tolist()}")
"""

# vLLM's writer: the lock is taken before anybody knows of the file, and let go when the file is there.
WRITER = """
import fcntl, os, sys, numpy
from safetensors.numpy import save_file
path = sys.argv[1]
lock = os.open(path + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
fcntl.flock(lock, fcntl.LOCK_EX)
sys.stdout.write("locked\\n"); sys.stdout.flush()
sys.stdin.readline()
if sys.argv[2] == "write":
    states = numpy.arange(24.0, dtype=numpy.float16).reshape(3, 2, 4)
    save_file({"hidden_states": states, "token_ids": numpy.array([5, 6, 7])}, path)
os.close(lock)
sys.stdin.readline()
"""


class Writer:
    """A second process that holds the lock of `path` until it is told to go on."""

    def __init__(self, path: Path, what: str = "write") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "locked\n"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def stock_file(path: Path, tokens: int = 3) -> Path:
    """A file as vLLM leaves it when its reader has cleared the lock away."""
    states = torch.arange(tokens * 8.0).reshape(tokens, 2, 4)
    save_file({"hidden_states": states, "token_ids": torch.arange(tokens)}, path)
    return path


# --- writing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_file_per_sample(tmp_path: Path, dtype: torch.dtype) -> None:
    result = made(("resid_post",), (0, 2), dtype)
    paths = save_capture(result, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == [f"sample-00000{n}.safetensors" for n in range(3)]
    for sample, path in enumerate(paths):
        tensors = load_file(path)
        assert set(tensors) == {"hidden_states", "token_ids"}
        rows = result.sample(sample)
        assert bits(tensors["hidden_states"]) == bits(torch.stack([rows[0], rows[2]], 1))
        consumed = [*PROMPTS[sample], *GENERATED[sample][:-1]]
        assert tensors["token_ids"].dtype == torch.int64
        assert tensors["token_ids"].tolist() == consumed
        assert Path(f"{path}.lock").exists()
        file = read(path)
        assert file.layer_ids == (1, 3)
        assert (file.model_ref, file.model_fingerprint) == ("models/tiny", "f0f0")
        assert (file.prompt_len, file.generated) == (len(PROMPTS[sample]), GENERATED[sample])
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 6
    assert made().save_hidden_states(tmp_path / "more") == [tmp_path / "more" / path.name for path in paths]


def test_aux_ids_of_both_sites(tmp_path: Path) -> None:
    """Aux id k is resid_pre[k] and resid_post[k − 1]; k = 0 are the embeddings, k = L what the last block leaves."""
    keys: list[Any] = [("resid_post", 2), ("resid_pre", 0), ("resid_pre", 2), ("resid_post", 1), ("mlp_out", 0)]
    tensors = {key: torch.full((8, 4), float(place)) for place, key in enumerate(keys)}
    tensors["resid_post", 1] = tensors["resid_pre", 2]
    result = made(("resid_pre", "resid_post", "mlp_out"), (0, 1, 2), tensors=tensors)
    file = read(save_capture(result, tmp_path)[0])
    assert file.layer_ids == (0, 2, 3)
    assert file.hidden_states[0, :, 0].tolist() == [1, 2, 0]


def test_written_again_over_itself(tmp_path: Path) -> None:
    save_capture(made(layers=(0,)), tmp_path)
    paths = save_capture(made(layers=(0, 2)), tmp_path)
    assert read(paths[0]).layer_ids == (1, 3)
    assert len(list(tmp_path.iterdir())) == 6


def test_prompt_rows_alone_as_vllm_writes_them(tmp_path: Path) -> None:
    keep = ~whole_labels().generated
    result = made(labels=whole_labels().take(keep))
    file = read(save_capture(result, tmp_path)[0])
    assert file.token_ids.tolist() == [11, 12, 13]
    assert file.generated == (31, 32, 33)


@pytest.mark.parametrize(
    ("keep", "sample"), [([1, 2, 3, 4, 5, 6, 7], 0), ([0, 2, 3, 4, 5, 6, 7], 0), ([0, 1, 2, 3, 5, 6, 7], 0)]
)
def test_rows_selected_in_part(tmp_path: Path, keep: list[int], sample: int) -> None:
    result = made(labels=whole_labels().take(np.array(keep)))
    with pytest.raises(SpecError, match=rf"E_SELECTION at select: sample {sample} has 4 of its 5 rows"):
        save_capture(result, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sample_without_a_row(tmp_path: Path) -> None:
    result = made(labels=whole_labels().take(whole_labels().sample != 1))
    with pytest.raises(SpecError, match="sample 1 has 0 of its 1 rows"):
        save_capture(result, tmp_path / "out")


def test_other_sites_and_choices_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperationError, match=r"E_SITE at sites: .* this capture has: mlp_out, q"):
        save_capture(made(("mlp_out", "q")), tmp_path)
    two = (Completion((11,), (12,)), Completion((11,), (13,)))
    outputs = (Completion((11,), (12,), choices=two), *made().outputs[1:])
    with pytest.raises(SpecError, match="E_SELECTION at n: sample 0 has 2 choices"):
        save_capture(made(outputs=outputs), tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="is a file: name a directory"):
        save_capture(made(), tmp_path / "file")
    unlabelled = as_capture(HiddenStatesFile(torch.ones(3, 1, 4), torch.empty(0, dtype=torch.int64)), [1])
    with pytest.raises(CaptureError, match="no labels"):
        save_capture(unlabelled, tmp_path)


def test_failed_samples_get_no_file_and_a_warning(tmp_path: Path) -> None:
    keep = whole_labels().sample != 1
    result = made(labels=whole_labels().take(keep), errors={1: CaptureError("lost")})
    with pytest.warns(UserWarning, match=r"failed samples \[1\]"):
        paths = save_capture(result, tmp_path)
    assert [path.name for path in paths] == ["sample-000000.safetensors", "sample-000002.safetensors"]


# --- reading


def test_a_file_of_vllms_own(tmp_path: Path) -> None:
    file = read(stock_file(tmp_path / "cmpl-1-0.safetensors"))
    assert file.hidden_states.shape == (3, 2, 4)
    assert file.token_ids.tolist() == [0, 1, 2]
    assert (file.layer_ids, file.prompt_len, file.generated) == (None, None, ())


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    path = stock_file(tmp_path / "a")
    with torch.inference_mode():
        file, states = read(path), read_tensors(path)
    os.truncate(path, 0)
    assert file.hidden_states.sum() == states["hidden_states"].sum() == sum(range(24))
    assert not file.hidden_states.is_inference()


def test_compat_returns_what_vllms_function_does(tmp_path: Path) -> None:
    path = save_capture(made(), tmp_path)[0]
    ours, stock = load_hidden_states(str(path)), load_file(path)
    assert {name: bits(one) for name, one in ours.items()} == {name: bits(one) for name, one in stock.items()}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": torch.ones(2)}, "no tensor hidden_states"),
        ({"hidden_states": torch.ones(2, 3)}, "no tensor hidden_states"),
        ({"hidden_states": torch.ones(2, 3, 4), "token_ids": torch.ones(3)}, "token_ids is [3] for 2 rows"),
        ({"hidden_states": torch.ones(2, 3, 4), "token_ids": torch.ones(2, 1)}, "token_ids is [2, 1]"),
    ],
)
def test_other_files(tmp_path: Path, tensors: dict[str, Tensor], words: str) -> None:
    save_file(tensors, tmp_path / "a")
    with pytest.raises(FileFormatError) as caught:
        read(tmp_path / "a")
    assert words in str(caught.value)
    assert str(tmp_path / "a") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format":2}', "damaged, or of a newer midstream: E_BAD_PARAM at midstream.hidden_states.format"),
        ('{"layer_ids":[1]}', "1 layer ids for 3 layers"),
        ('{"layer_ids":[-1]}', "E_BAD_PARAM"),
        ("[", "is not JSON"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path: Path, text: str, words: str) -> None:
    save_file({"hidden_states": torch.ones(2, 3, 4)}, tmp_path / "a", {"midstream.hidden_states": text})
    with pytest.raises(FileFormatError, match=words):
        read(tmp_path / "a")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        read(tmp_path / "a")
    Path(f"{tmp_path / 'a'}.lock").touch()
    with pytest.raises(FileNotFoundError, match=r"let go of .* without writing it"):
        read(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"half")
    with pytest.raises(FileFormatError, match="is not a hidden-states file, or is damaged"):
        read(tmp_path / "a")


# --- the lock, between two processes


def test_a_reader_waits_for_vllms_writer(tmp_path: Path) -> None:
    path = tmp_path / "req-1.safetensors"
    found: list[HiddenStatesFile] = []
    with Writer(path) as writer:
        reader = threading.Thread(target=lambda: found.append(read(path, timeout=30)))
        reader.start()
        time.sleep(0.2)
        assert not found
        writer.go_on()
        reader.join(30)
    assert found[0].token_ids.tolist() == [5, 6, 7]
    assert found[0].hidden_states.dtype == torch.float16


def test_a_reader_without_timeout_waits_too(tmp_path: Path) -> None:
    path = tmp_path / "req-1.safetensors"
    with Writer(path) as writer:
        threading.Timer(0.2, writer.go_on).start()
        assert load_hidden_states(path)["token_ids"].tolist() == [5, 6, 7]


def test_a_reader_gives_up(tmp_path: Path) -> None:
    path = tmp_path / "req-1.safetensors"
    with Writer(path), pytest.raises(TimeoutError, match=r"is still being written after 0.1 s"):
        read(path, timeout=0.1)


@pytest.mark.parametrize("end", ["aborted", "killed"])
def test_a_writer_that_ends_without_a_file(tmp_path: Path, end: str) -> None:
    path = tmp_path / "req-1.safetensors"
    with Writer(path, "abort") as writer:
        threading.Timer(0.1, writer.go_on if end == "aborted" else writer.process.kill).start()
        with pytest.raises(FileNotFoundError, match="without writing it"):
            read(path, timeout=30)


def test_vllms_reader_meets_our_writer(tmp_path: Path) -> None:
    """A reader that takes the lock as soon as it sees it always finds the whole file behind it."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        path = folder / "sample-000000.safetensors"
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(0.05 if attempt else 1)  # before and after the reader has started up
        save_capture(made(), folder)
        out, error = reader.communicate(timeout=60)
        assert out == "(5, 2, 4) [11, 12, 13, 31, 32]", error


def test_a_lock_is_held_from_the_moment_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        replace(source, target)
        if str(target).endswith(".lock"):
            with open(target) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    seen.append(False)
                except BlockingIOError:
                    seen.append(True)

    monkeypatch.setattr(os, "replace", watched)
    save_capture(made(), tmp_path)
    assert seen == [True] * 3


def test_our_writer_waits_for_a_reader(tmp_path: Path) -> None:
    paths = save_capture(made(layers=(0,)), tmp_path)
    done = threading.Event()

    def again() -> None:
        save_capture(made(layers=(0, 2)), tmp_path)
        done.set()

    with open(f"{paths[0]}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        writer = threading.Thread(target=again)
        writer.start()
        assert not done.wait(0.2)
        assert read(paths[0]).layer_ids == (1,)
    writer.join(30)
    assert read(paths[0]).layer_ids == (1, 3)


# --- back to a capture


def test_round_trip_through_a_capture(tmp_path: Path) -> None:
    result = made(layers=(0, 1))
    paths = save_capture(result, tmp_path)
    for sample, path in enumerate(paths):
        back = as_capture(read(path))
        rows = result.sample(sample)
        assert back.sites == ("resid_post",)
        assert {layer: bits(tensor) for layer, tensor in back.sample(0).items()} == {
            layer: bits(tensor) for layer, tensor in rows.items()
        }
        labels = result.labels.take(result.labels.sample == sample)
        assert back.labels.position.tolist() == labels.position.tolist()
        assert back.labels.token_id.tolist() == labels.token_id.tolist()
        assert back.labels.choice.tolist() == labels.choice.tolist()
        assert back.labels.phase.tolist() == labels.phase.tolist()
        assert back.outputs[0].prompt_token_ids == result.outputs[sample].prompt_token_ids
        assert back.outputs[0].token_ids == result.outputs[sample].token_ids
        assert back.labelled
        (again,) = save_capture(back, tmp_path / f"again-{sample}")
        assert again.read_bytes() == path.read_bytes()
        assert same(CaptureResult.load(back.save(tmp_path / "capture")), back)


def test_a_stock_file_needs_layer_ids(tmp_path: Path) -> None:
    file = read(stock_file(tmp_path / "a"))
    with pytest.raises(SpecError, match=r"E_LAYER_RANGE at layer_ids: .* which 2 layers .* layer_ids=\[…\]"):
        as_capture(file)
    for wrong in ([1], [1, 1], [-1, 2], [1, 2, 3]):
        with pytest.raises(SpecError, match="E_LAYER_RANGE at layer_ids"):
            as_capture(file, layer_ids=wrong)
    back = as_capture(file, layer_ids=[5, 0])
    assert list(back.tensors) == [("resid_pre", 0), ("resid_post", 4)]
    assert torch.equal(back.rows(4, "resid_post"), file.hidden_states[:, 0])
    assert torch.equal(back.rows(0, "resid_pre"), file.hidden_states[:, 1])
    assert back.layouts["resid_post"][4] == SiteLayout(4)
    assert not back.labels.generated.any()
    assert back.rows(4, "resid_post").untyped_storage().nbytes() == 3 * 4 * 4


def test_a_file_without_token_ids_is_not_labelled(tmp_path: Path) -> None:
    save_file({"hidden_states": torch.ones(3, 1, 4)}, tmp_path / "a")
    back = as_capture(read(tmp_path / "a"), layer_ids=[1])
    assert not back.labelled
    assert back.rows(0).shape == (3, 4)
