"""Harvests of a tiny model: the rows that a capture gives, found again by sample, whatever stopped the run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstream as ms
from midstream import harvest
from midstream.core.errors import BusyError, CaptureError, PromptError
from midstream.harvest import HarvestSpec, OtherHarvestError
from midstream.harvest.places import LocalPlace
from unit.harvests import contents
from unit.tiny_checkpoint import HIDDEN, POISON, save_tiny

TEXTS = ["one", "twenty-two words", "a", "some more of it", "x" * 60, "and", "the last of them", "one"]
SPEC = HarvestSpec(capture=ms.CaptureSpec(layers=[1, 3]), shard_tokens=30)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ms.LanguageModel]:
    with ms.load(save_tiny(tmp_path_factory.mktemp("tiny"), poisoned=True)) as lm:
        yield lm


def records(path: Path, texts: list[str] = TEXTS) -> Path:
    lines = [json.dumps({"text": text, "id": f"r{place}", "place": place}) for place, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return records(tmp_path / "data.jsonl")


# --- the rows


def test_rows_are_those_of_a_capture(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    report = harvest.run(lm, file, tmp_path / "out", SPEC)
    assert report.made == report.shards == 3
    found = harvest.open(tmp_path / "out")
    alone = [lm.capture([text], layers=[1, 3]) for text in TEXTS]
    assert len(found) == len(TEXTS)
    assert found.counts.rows == sum(len(one.labels) for one in alone) == found.counts.tokens
    for index, want in enumerate(alone):
        rows = found.sample(index)
        assert list(rows) == ["resid_post.1", "resid_post.3"]
        for layer in (1, 3):
            torch.testing.assert_close(rows[f"resid_post.{layer}"], want.rows(layer), rtol=1e-5, atol=1e-5)
        assert found.labels(index) == {"id": f"r{index}", "place": index}
    whole = found.rows(3)
    assert whole.shape == (found.counts.rows, HIDDEN)
    joined = torch.cat([found.sample(index)["resid_post.3"] for index in range(len(found))])
    assert torch.equal(whole[:], joined)
    some = np.array([7, 0, 7, len(whole) - 1])
    assert torch.equal(whole[some], joined[some])
    assert torch.equal(whole[5:50], joined[5:50])
    assert torch.equal(whole[-3], joined[-3])
    assert whole[9:9].shape == (0, HIDDEN)
    positions = np.concatenate([one.labels.position for one in alone])
    assert np.array_equal(found.row_labels("position"), positions)
    assert not found.verify()


def test_shards_are_capture_files(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    harvest.run(lm, file, tmp_path / "out", SPEC)
    found = harvest.open(tmp_path / "out")
    first = found.shard(0)
    assert first.layer_ids == (1, 3)
    assert first.model_fingerprint == lm.facts.model_fingerprint
    assert first.decode is not None
    assert "".join(first.decode(first.outputs[0].prompt_token_ids)) == "<s>one"


def test_only_the_files_that_the_page_names(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    harvest.run(lm, file, tmp_path / "out", SPEC)
    names = sorted(contents(tmp_path / "out"))
    shards = [f"shards/{place:06d}.safetensors" for place in range(len(names) - 3)]
    assert names == [".lock", "manifest.json", "samples.parquet", *shards]
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert os.uname().nodename not in text


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_pooled(lm: ms.LanguageModel, file: Path, tmp_path: Path, pool: Any) -> None:
    spec = HarvestSpec(capture=ms.CaptureSpec(layers=[2], select="prompt[1:]"), pool=pool, shard_tokens=40)
    harvest.run(lm, file, tmp_path / "out", spec)
    found = harvest.open(tmp_path / "out")
    assert found.counts.rows == len(TEXTS)
    for index, text in enumerate(TEXTS):
        rows = lm.capture([text], layers=[2], rows="prompt[1:]").rows(2)
        want = rows.mean(0) if pool == "mean" else rows[-1]
        torch.testing.assert_close(found.sample(index)["resid_post.2"], want[None], rtol=1e-5, atol=1e-5)
    assert np.array_equal(found.row_labels("position"), [len(text) for text in TEXTS])


def test_probes(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    probes = [
        ms.Probe(1, "resid_post", torch.randn(HIDDEN, generator=draw), 0.5, "up"),
        ms.Probe(3, "mlp_out", torch.randn(HIDDEN, generator=draw)),
    ]
    harvest.run(lm, file, tmp_path / "out", HarvestSpec(shard_tokens=40), probes=probes)
    found = harvest.open(tmp_path / "out")
    assert [one["name"] for one in found.probes] == ["up", "mlp_out.3"]
    cap = lm.capture(TEXTS, sites=["resid_post", "mlp_out"], layers=[1, 3])
    want = [
        cap.rows(1, "resid_post") @ torch.tensor(probes[0].weight) + 0.5,
        cap.rows(3, "mlp_out") @ torch.tensor(probes[1].weight),
    ]
    torch.testing.assert_close(found.scores[:], torch.stack(want, 1), rtol=1e-4, atol=1e-4)
    with pytest.raises(ms.UnsupportedOperationError, match="holds scores of probes"):
        found.rows(1)


def test_split_and_packed_rows(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    split = HarvestSpec(capture=ms.CaptureSpec(layers=[1]), too_long="split", context=16, stride=12)
    harvest.run(lm, file, tmp_path / "split", split)
    found = harvest.open(tmp_path / "split")
    assert found.counts.split == 4 + 1 + 1
    ids = lm.prepare([TEXTS[4]])[0].token_ids
    table = [one for one in found.samples.to_pylist() if one["record"] == 4]
    for one in table:
        begin = one["start"]
        want = lm.capture([list(ids[begin : begin + 16])], layers=[1]).rows(1)[4 if begin else 0 :]
        rows = found.rows(1)[one["row_start"] : one["row_stop"]]
        torch.testing.assert_close(rows, want, rtol=1e-5, atol=1e-5)
    across = HarvestSpec(capture=ms.CaptureSpec(layers=[1]), packed=True, across=True, context=32)
    harvest.run(lm, file, tmp_path / "across", across)
    found = harvest.open(tmp_path / "across")
    joined = [token for one in lm.prepare(TEXTS) for token in one.token_ids]
    want = torch.cat([lm.capture([joined[i : i + 32]], layers=[1]).rows(1) for i in range(0, len(joined), 32)])
    torch.testing.assert_close(found.rows(1)[:], want, rtol=1e-5, atol=1e-5)
    assert [one["record"] for one in found.samples.to_pylist()] == sorted(
        one["record"] for one in found.samples.to_pylist()
    )


# --- again


def test_run_again_it_does_nothing(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    harvest.run(lm, file, tmp_path / "out", SPEC)
    before = contents(tmp_path / "out")
    stats = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = harvest.run(lm, file, tmp_path / "out", SPEC)
    assert (again.made, again.tokens) == (0, 0)
    assert contents(tmp_path / "out") == before
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == stats


def test_the_same_data_in_other_files(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    harvest.run(lm, file, tmp_path / "one", SPEC)
    harvest.run(lm, tmp_path / "data.parquet", tmp_path / "two", SPEC)
    harvest.run(lm, rows, tmp_path / "three", SPEC)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "three")


@pytest.mark.parametrize("what", ["truncated", "altered", "gone", "sample table", "sample table gone"])
def test_damage_is_found_and_redone(lm: ms.LanguageModel, file: Path, tmp_path: Path, what: str) -> None:
    harvest.run(lm, file, tmp_path / "out", SPEC)
    whole = contents(tmp_path / "out")
    shard = tmp_path / "out" / "shards" / "000001.safetensors"
    target = tmp_path / "out" / "samples.parquet" if "sample" in what else shard
    data = bytearray(target.read_bytes())
    if "gone" in what:
        target.unlink()
    elif what == "truncated":
        target.write_bytes(data[:-1])
    else:
        data[-5] ^= 1
        target.write_bytes(data)
    assert harvest.open(tmp_path / "out").verify() == [str(target.relative_to(tmp_path / "out"))]
    report = harvest.run(lm, file, tmp_path / "out", SPEC)
    assert report.made == (0 if "sample" in what else 1)
    assert contents(tmp_path / "out") == whole


def test_a_damaged_shard_is_named_when_it_is_read(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    harvest.run(lm, file, tmp_path / "out", SPEC)
    shard = tmp_path / "out" / "shards" / "000001.safetensors"
    data = shard.read_bytes()
    for damaged in (data[:-1], data[:100], b"", data + b"x"):
        shard.write_bytes(damaged)
        with pytest.raises(ms.FileFormatError, match=r"000001\.safetensors is damaged"):
            harvest.open(tmp_path / "out").rows(1)[:]


def test_trust_compares_sizes_alone(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    harvest.run(lm, file, tmp_path / "out", SPEC)
    shard = tmp_path / "out" / "shards" / "000001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    assert harvest.run(lm, file, tmp_path / "out", SPEC, trust=True).made == 0
    shard.write_bytes(data[:-1])
    assert harvest.run(lm, file, tmp_path / "out", SPEC, trust=True).made == 1


def test_another_harvest_is_refused(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    harvest.run(lm, file, out, SPEC)
    before = contents(out)
    other = HarvestSpec(capture=ms.CaptureSpec(layers=[1, 2]), shard_tokens=40)
    with pytest.raises(OtherHarvestError, match=r"spec\.capture\.layers was \[1, 3\], and is \[1, 2\]"):
        harvest.run(lm, file, out, other)
    with pytest.raises(OtherHarvestError, match=r"input\.sha256 was .* name another directory"):
        harvest.run(lm, records(tmp_path / "other.jsonl", [*TEXTS[1:], "else"]), out, SPEC)
    with pytest.raises(OtherHarvestError, match=r"input\.records was 8, and is 7"):
        harvest.run(lm, records(tmp_path / "other.jsonl", TEXTS[1:]), out, SPEC)
    before_threads = torch.get_num_threads()
    torch.set_num_threads(before_threads + 1)
    try:
        with pytest.raises(OtherHarvestError, match=r"execution\.threads was"):
            harvest.run(lm, file, out, SPEC)
    finally:
        torch.set_num_threads(before_threads)
    assert contents(out) == before


def test_two_runs_at_once(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    seen: list[BusyError] = []

    def told(_: Any) -> None:
        if not seen:
            with (
                pytest.raises(BusyError, match="another harvest runs in") as raised,
                LocalPlace(tmp_path / "out").locked(),
            ):
                pass
            seen.append(raised.value)

    harvest.run(lm, file, tmp_path / "out", SPEC, told=told)
    assert seen


def test_a_directory_of_something_else(lm: ms.LanguageModel, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("dear")
    with pytest.raises(FileExistsError, match=r"holds thesis\.tex and no harvest"):
        harvest.run(lm, file, out, SPEC)
    assert contents(out) == {"thesis.tex": b"dear"}
    with pytest.raises(NotADirectoryError):
        harvest.run(lm, file, out / "thesis.tex", SPEC)


# --- input


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"text": "a"}\n\n', r"data\.jsonl:2 is an empty line"),
        ('{"text": "a"}\n{"text": "b"', r"data\.jsonl:2 is not JSON"),
        ('{"text": "a"}\n{"text": ""}\n', r"data\.jsonl:2: text is empty"),
        ('{"text": "a"}\n{"topic": "b"}\n', r"data\.jsonl:2 wants one of text"),
        ('{"prompt_token_ids": [1, 999]}\n', r"data\.jsonl:1 has token 999; the model has 258 tokens"),
        (
            '{"text": "%s"}\n' % ("y" * 300),
            r"data\.jsonl:1 has 301 tokens, and a sequence 256 at most: type --too-long",
        ),
        ("", r"data\.jsonl holds no prompts"),
        ('{"text": "a"}\n{"input_ids": [3, -4]}\n', r"data\.jsonl:2 has a negative token id -4"),
    ],
)
def test_bad_input_is_refused_before_anything_is_computed(
    lm: ms.LanguageModel, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(PromptError, match=says):
        harvest.run(lm, tmp_path / "data.jsonl", tmp_path / "out", SPEC)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_values_that_are_not_finite(lm: ms.LanguageModel, tmp_path: Path) -> None:
    texts = ["fine", f"a{POISON}b", "fine too"]
    file = records(tmp_path / "data.jsonl", texts)
    spec = HarvestSpec(capture=ms.CaptureSpec(layers=[1]))
    harvest.run(lm, file, tmp_path / "out", spec)
    found = harvest.open(tmp_path / "out")
    want = int((~torch.isfinite(lm.capture(texts[1:2], layers=[1]).rows(1))).sum())
    assert [one["nonfinite"] for one in found.samples.to_pylist()] == [0, want, 0]
    assert found.counts.nonfinite == want > 0
    with pytest.raises(
        CaptureError, match=rf"data\.jsonl:2 has {want} values that are not finite, the first in row \d"
    ):
        harvest.run(lm, file, tmp_path / "other", spec, refuse_nonfinite=True)
    assert not list((tmp_path / "other" / "shards").iterdir())
    with pytest.raises(CaptureError, match=rf"000000\.safetensors has {want} values .* which an earlier run kept"):
        harvest.run(lm, file, tmp_path / "out", spec, refuse_nonfinite=True)


def test_samples_that_fail_keep_their_place(lm: ms.LanguageModel, tmp_path: Path) -> None:
    file = records(tmp_path / "data.jsonl", ["fine", f"a{POISON}b", "fine too"])
    spec = HarvestSpec(capture=ms.CaptureSpec(layers=[1], dtype="int64"))
    harvest.run(lm, file, tmp_path / "out", spec)
    found = harvest.open(tmp_path / "out")
    assert found.counts.failed == 1
    assert [len(found.sample(index)["resid_post.1"]) for index in range(3)] == [5, 0, 9]
    assert "not finite" in found.samples.to_pylist()[1]["error"]
