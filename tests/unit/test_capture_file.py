"""Capture files: everything comes back bit for bit, and what is no capture file is said so in one line."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from midstream.core.capture import STORAGE_DTYPES, CaptureReceipt, CaptureSpec, Labels
from midstream.core.errors import CaptureError, FileFormatError, PromptError
from midstream.core.generation import Completion
from midstream.core.result import CaptureResult
from midstream.core.sites import SITES
from midstream.formats import hidden_states_file
from midstream.formats.capture_file import load, read_header, save
from unit.captures import GENERATED, PROMPTS, bits, made, same, whole_labels


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    result = made(("resid_post", "resid_pre", "q"), (10, 2, 0), getattr(torch, dtype))
    path = save(result, tmp_path / "a.safetensors")
    assert path == tmp_path / "a.safetensors"
    back = load(path)
    tensors = {(site, layer): result.tensors[site, layer] for site in result.sites for layer in (0, 2, 10)}
    assert same(made(("resid_post", "resid_pre", "q"), (10, 2, 0), getattr(torch, dtype), tensors=tensors), back)
    assert back.sites == ("resid_post", "resid_pre", "q")
    assert list(back.sample(0, "q")) == [0, 2, 10]
    assert [token.text for token in back.tokens(1)] == ["<11>"]


rows_of_bits = st.integers(0, 5).flatmap(
    lambda rows: st.tuples(
        st.just(rows), st.sampled_from(STORAGE_DTYPES), st.integers(1, 3), st.randoms(use_true_random=False)
    )
)


@settings(deadline=None, max_examples=60)
@given(rows_of_bits, st.booleans())
def test_round_trip_of_any_bits_and_strides(tmp_path_factory: Any, drawn: Any, strided: bool) -> None:
    rows, name, width, random = drawn
    dtype = getattr(torch, name)
    whole = torch.frombuffer(bytearray(random.randbytes((2 * rows + 1) * width * dtype.itemsize)), dtype=dtype)
    whole = whole.reshape(2 * rows + 1, width)
    tensor = whole[1::2] if strided else whole[:rows]
    tensor = tensor[:rows]
    one = np.zeros(rows, dtype=np.int64)
    labels = Labels(one, one - 1, np.arange(rows), one + 7, one > 0)
    result = made(layers=(3,), width=width, labels=labels, tensors={("resid_post", 3): tensor})
    path = save(result, tmp_path_factory.mktemp("files") / "a.safetensors")
    assert bits(load(path).rows(3)) == bits(tensor.contiguous())
    assert read_header(path).shapes == {"resid_post.3": (rows, width)}


def test_loaded_tensors_are_ordinary_and_own_their_memory(tmp_path: Path) -> None:
    result = made()
    path = save(result, tmp_path / "a.safetensors")
    with torch.inference_mode():
        back = load(path)
    os.truncate(path, 0)  # a mapped tensor would kill the process now
    assert bits(back.rows(0)) == bits(result.rows(0))
    weights = torch.ones(4, requires_grad=True)
    rows = torch.nan_to_num(back.rows(0), 0, 0, 0)
    (rows @ weights).sum().backward()
    assert weights.grad is not None
    back.rows(0).zero_()
    back.labels.position[0] = 5
    for tensor in back.tensors.values():
        assert not tensor.is_inference()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_trimmed_view_takes_only_its_rows(tmp_path: Path) -> None:
    """What the recorder hands over may be the front of a larger buffer."""
    buffer = torch.randn(100_000, 4)
    path = save(made(layers=(0,), tensors={("resid_post", 0): buffer[:8]}), tmp_path / "a")
    assert path.stat().st_size < 10_000
    assert bits(load(path).rows(0)) == bits(buffer[:8])


def test_without_any_row_there_are_no_layers(tmp_path: Path) -> None:
    labels = whole_labels().take(np.zeros(8, dtype=bool))
    back = load(save(made(labels=labels, tensors={}), tmp_path / "a"))
    assert back.layer_ids == ()
    assert len(back) == 3
    assert back.sites == ("resid_post",)
    assert len(back.labels) == 0


def test_choices_and_everything_a_completion_holds(tmp_path: Path) -> None:
    receipt = CaptureReceipt(5, 3, 2)
    choices = (
        Completion((1, 2), (3, 4), 'a\n"b" \ud83d 你', "stop", receipt),
        Completion((1, 2), (5,), None, "eos", None),
    )
    outputs = (Completion((1, 2), (3, 4), "a", "stop", receipt, choices), Completion((9,)), Completion((8,)))
    back = load(save(made(outputs=outputs), tmp_path / "a"))
    assert back.outputs == outputs
    assert back.outputs[0].choices == choices


def test_errors_come_back_in_their_place(tmp_path: Path) -> None:
    errors = {2: PromptError("prompt 2 is\nempty")}
    keep = whole_labels().sample != 2
    result = made(labels=whole_labels().take(keep), errors=errors)
    back = load(save(result, tmp_path / "a"))
    with pytest.raises(CaptureError, match="prompt 2 is empty"):
        back.sample(2)
    assert bits(back.sample(0)[0]) == bits(result.sample(0)[0])


def test_texts_of_the_tokens_that_occur(tmp_path: Path) -> None:
    asked: list[list[int]] = []

    def decode(ids: Any) -> list[str]:
        asked.append(list(ids))
        return [f"«{token}»" for token in ids]

    back = load(save(made(decode=decode), tmp_path / "a"))
    occurring = sorted({token for ids in (*PROMPTS, *GENERATED) for token in ids})
    assert asked == [occurring]
    assert back.decode is not None
    assert back.decode([33, 11]) == ["«33»", "«11»"]  # 33 was sampled last: it has no row
    with pytest.raises(CaptureError, match="no text for token 99"):
        back.decode([99])
    assert load(save(made(decode=None), tmp_path / "b")).decode is None
    again = load(save(back, tmp_path / "c"))
    assert again.tokens(0) == back.tokens(0)


def test_the_layout_on_disk(tmp_path: Path) -> None:
    """What docs/semantics.md says of the file, seen with safetensors alone."""
    path = save(made(("resid_post", "mlp_out"), (0, 2)), tmp_path / "a")
    names = {"labels.sample", "labels.choice", "labels.position", "labels.token_id", "labels.phase"}
    names |= {"prompts.ids", "prompts.offsets", "resid_post.0", "resid_post.2", "mlp_out.0", "mlp_out.2"}
    tensors = load_file(path)
    assert set(tensors) == names
    assert tensors["labels.phase"].dtype == torch.uint8
    assert tensors["labels.phase"].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert tensors["labels.choice"].tolist() == [-1, -1, -1, 0, 0, -1, -1, -1]
    assert tensors["prompts.ids"].tolist() == [11, 12, 13, 11, 21, 22]
    assert tensors["prompts.offsets"].tolist() == [0, 3, 4, 6]
    with safe_open(path, "pt") as file:
        assert set(file.metadata()) == {"midstream"}
        metadata = json.loads(file.metadata()["midstream"])
    assert set(metadata) == {
        "format",
        "model_ref",
        "model_fingerprint",
        "spec",
        "receipt",
        "layouts",
        "outputs",
        "errors",
        "tokens",
        "steering",
    }
    assert metadata["format"] == 1
    assert metadata["spec"] == made(("resid_post", "mlp_out"), (0, 2)).spec.canonical()


def test_the_same_capture_gives_the_same_bytes(tmp_path: Path) -> None:
    assert save(made(), tmp_path / "a").read_bytes() == save(made(), tmp_path / "b").read_bytes()


def test_the_methods_of_the_result(tmp_path: Path) -> None:
    path = made().save(tmp_path / "a")
    assert same(made(), CaptureResult.load(path))
    assert same(made(), CaptureResult.load(str(path)))


def test_header(tmp_path: Path) -> None:
    result = made(("resid_post", "q"), (0, 2), torch.bfloat16, errors={1: CaptureError("lost")})
    path = save(result, tmp_path / "a")
    header = read_header(path)
    assert (header.rows, header.samples, header.format) == (8, 3, 1)
    assert header.sites == ("resid_post", "q")
    assert header.layers == (0, 2)
    assert header.shapes["q.2"] == (8, 4)
    assert set(header.dtypes.values()) == {"bfloat16"}
    assert header.bytes == path.stat().st_size
    assert header.layouts == result.layouts
    assert (header.spec, header.receipt) == (result.spec, result.receipt)
    assert (header.model_ref, header.model_fingerprint) == ("models/tiny", "f0f0")
    assert header.errors == {1: "lost"}


def test_rows_without_labels_are_not_saved(tmp_path: Path) -> None:
    labels = whole_labels().take(np.zeros(8, dtype=bool))
    result = made(labels=labels, tensors={("resid_post", 0): torch.ones(3, 4)})
    with pytest.raises(CaptureError, match="no labels"):
        save(result, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# --- files that are not ours, or no longer


def fails(path: Path, words: str, kind: type[Exception] = FileFormatError) -> None:
    """`load` and `read_header` refuse in one line that names the file."""
    for reader in (load, read_header):
        with pytest.raises(kind) as caught:
            reader(path)
        assert str(path) in str(caught.value)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_no_such_file_and_other_kinds(tmp_path: Path) -> None:
    fails(tmp_path / "nope", "no file", FileNotFoundError)
    fails(tmp_path, "is a directory", IsADirectoryError)
    os.mkfifo(tmp_path / "pipe")
    fails(tmp_path / "pipe", "is a device or a pipe")
    (tmp_path / "text").write_text("hello, this is no tensor file at all")
    fails(tmp_path / "text", "is not a capture file, or is damaged")
    (tmp_path / "empty").write_bytes(b"")
    fails(tmp_path / "empty", "is not a capture file, or is damaged")
    save_file({"w": torch.ones(2)}, tmp_path / "weights", {"format": "pt"})
    fails(tmp_path / "weights", "is a safetensors file but not a capture file")
    (hidden,) = hidden_states_file.save_capture(
        made(outputs=(Completion((11, 12, 13)),), labels=whole_labels().take(np.arange(3))), tmp_path / "hidden"
    )
    fails(hidden, "hidden_states_file.read")


def test_every_truncation(tmp_path: Path) -> None:
    content = save(made(), tmp_path / "a").read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "a").write_bytes(content[:length])
        fails(tmp_path / "a", "damaged")


def changed(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> Path:
    """The file with its tensors and metadata changed, as another tool might."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["midstream"])
    change(tensors, metadata)
    save_file(tensors, path, {"midstream": json.dumps(metadata)})
    return path


CHANGES: list[tuple[str, Callable[[dict[str, Tensor], dict[str, Any]], object]]] = [
    ("has the capture format 2; this midstream reads 1: install a newer", lambda t, m: m.update(format=2)),
    ("has the capture format None", lambda t, m: m.pop("format")),
    ("has the capture format '1'", lambda t, m: m.update(format="1")),
    ("labels.position has 7 labels", lambda t, m: t.update({"labels.position": t["labels.position"][:7].clone()})),
    ("labels.phase is I64", lambda t, m: t.update({"labels.phase": t["labels.phase"].long()})),
    ("not I64 of one dimension", lambda t, m: t.update({"labels.choice": t["labels.choice"][None].clone()})),
    ("has no tensor labels.choice", lambda t, m: t.pop("labels.choice")),
    ("3 offsets for 3 prompts", lambda t, m: t.update({"prompts.offsets": t["prompts.offsets"][:3].clone()})),
    ("resid_post.0 is [8, 3]", lambda t, m: t.update({"resid_post.0": t["resid_post.0"][:, :3].clone()})),
    ("resid_post.2 is [7, 4]", lambda t, m: t.update({"resid_post.2": t["resid_post.2"][:7].clone()})),
    ("resid_post.2 is of type BOOL", lambda t, m: t.update({"resid_post.2": t["resid_post.2"] > 0})),
    ("a tensor 'resid_post.9'", lambda t, m: t.update({"resid_post.9": t["resid_post.0"].clone()})),
    ("metadata is damaged: E_UNKNOWN_FIELD at midstream.extra", lambda t, m: m.update(extra=1)),
    ("metadata is damaged: E_BAD_PARAM at midstream.model_ref", lambda t, m: m.pop("model_ref")),
    ("metadata is damaged: E_BAD_PARAM at midstream.layouts", lambda t, m: m.update(layouts={"middle": {}})),
    ("metadata is damaged: E_SELECTION at midstream.spec", lambda t, m: m.update(spec={"select": "all"})),
]


@pytest.mark.parametrize(("words", "change"), CHANGES, ids=[words for words, _ in CHANGES])
def test_parts_that_do_not_fit(
    tmp_path: Path, words: str, change: Callable[[dict[str, Tensor], dict[str, Any]], object]
) -> None:
    fails(changed(save(made(), tmp_path / "a"), change), words)


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    """What only the tensors show, `load` alone refuses."""
    wrong: list[tuple[str, str, list[int]]] = [
        ("labels.sample is not in order", "labels.sample", [0, 0, 0, 0, 0, 1, 2, 1]),
        ("labels.sample is not in order within 0 to 2", "labels.sample", [0, 0, 0, 0, 0, 1, 2, 3]),
        ("labels.sample is not in order", "labels.sample", [-1, 0, 0, 0, 0, 1, 2, 2]),
        ("labels.phase holds 2", "labels.phase", [0, 0, 0, 1, 1, 0, 0, 2]),
        ("prompts.offsets does not rise", "prompts.offsets", [0, 4, 3, 6]),
        ("prompts.offsets does not rise", "prompts.offsets", [0, 3, 4, 5]),
        ("prompts.offsets does not rise", "prompts.offsets", [1, 3, 4, 6]),
    ]
    for words, name, values in wrong:
        path = save(made(), tmp_path / "a")
        changed(path, lambda t, m, n=name, v=values: t.update({n: torch.tensor(v, dtype=t[n].dtype)}))
        with pytest.raises(FileFormatError, match=words):
            load(path)


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, '"x"', "{}"])
def test_metadata_that_is_no_object(tmp_path: Path, text: str) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "a", {"midstream": text})
    fails(tmp_path / "a", str(tmp_path / "a"))


def test_a_header_that_points_outside(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    fails(tmp_path / "a", "damaged")


def test_no_site_is_named_like_the_other_tensors() -> None:
    assert set(SITES).isdisjoint({"labels", "prompts"})


def test_a_spec_with_everything(tmp_path: Path) -> None:
    spec = CaptureSpec(sites=("q", "k"), layers=(3,), select="prompt[-1], generated{5}", dtype="float16")  # pyright: ignore
    assert load(save(made(spec=spec), tmp_path / "a")).spec == spec
