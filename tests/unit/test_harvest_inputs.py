"""What a harvest reads, and `midstream harvest` as a person types it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from midstream.core.errors import PromptError
from midstream.formats import records
from midstream.formats.records import Record
from midstream.harvest import inputs
from unit.command import Run, runner
from unit.tiny_checkpoint import HIDDEN, save_tiny


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def read(given: Any) -> list[Record]:
    with inputs.opened(given) as found:
        first, second = list(found.records()), list(found.records())
        assert first == second, "an input is read as often as needed"
        assert list(found.after(1)) == first[1:]
        return first


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# --- records


def test_text_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\n  \ntwo \u2028 still two\n".encode())
    assert [(one.prompt, one.source.rpartition("/")[2]) for one in read(tmp_path / "a.txt")] == [
        ("one", "a.txt:1"),
        ("two \u2028 still two", "a.txt:4"),
    ]


def test_records_with_labels(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "b"}]
    lines = [{"text": "a", "topic": "x", "n": 1.5}, {"prompt_token_ids": [1, 2], "id": 7}, {"messages": chat}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = read(tmp_path / "a.jsonl")
    assert [one.prompt for one in found] == [{"prompt": "a"}, {"prompt_token_ids": [1, 2]}, {"messages": chat}]
    assert [one.labels for one in found] == [{"topic": "x", "n": 1.5}, {"id": 7}, {}]
    parquet.write_table(pa.Table.from_pylist([lines[0], {"text": "c"}]), tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet")
    assert [one.labels for one in found] == [{"topic": "x", "n": 1.5}, {"topic": None, "n": None}]


@pytest.mark.parametrize(("text", "kind"), [('{"text": "a"}\n{"text": "b"}', dict), ("a\nb", str), ("\n a\nb", str)])
def test_stdin(monkeypatch: pytest.MonkeyPatch, text: str, kind: type) -> None:
    stdin(monkeypatch, text)
    found = read("-")
    assert [one.source for one in found][-1].startswith("stdin:")
    assert {type(one.prompt) for one in found} == {kind}
    assert len(found) == 2


def test_a_list(tmp_path: Path) -> None:
    found = read(["a", [1, 2], {"text": "b", "n": 1}, [{"role": "user", "content": "c"}]])
    assert [one.prompt for one in found] == ["a", [1, 2], {"prompt": "b"}, [{"role": "user", "content": "c"}]]
    assert found[2].labels == {"n": 1}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n\xff\n', r"a\.jsonl:2 is not UTF-8 text: invalid start byte at byte 1"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1 is '\[1\]', which is no record"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: text is 3, which is not text"),
        ("a.jsonl", b'{"text": "a", "input_ids": [1]}\n', r"a\.jsonl:1 wants one of .*; it has text, input_ids"),
        ("a.txt", b"ok\n" + b"x" * 101 + b"\n", r"a\.txt:2 is longer than 0 MiB"),
        ("a.parquet", b"PAR1 no", r"a\.parquet is no parquet file, or is damaged"),
        ("a.csv", b"a,b", r"prompts are read from \.jsonl, \.txt or \.parquet files"),
    ],
)
def test_broken_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, says: str) -> None:
    monkeypatch.setattr(records, "LINE_LIMIT", 100)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=says):
        read(tmp_path / name)


def test_a_label_that_is_no_json() -> None:
    def one() -> Iterator[Record]:
        yield Record("a", "prompt 0", {"x": object()})

    with pytest.raises(PromptError, match="prompt 0 holds what is no JSON"):
        inputs.scan(inputs.Input("the list", one), lambda *_: None)


def test_places_that_are_no_input(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="without a saved data set"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="a harvest reads a"):
        read(tmp_path / "nix.jsonl")
    with pytest.raises(PromptError, match="a int is no input"):
        read(3)


# --- the command


def test_the_command(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo words\n" + "z" * 300 + "\n")
    words = ["harvest", "--model", tiny, "--prompts", tmp_path / "a.txt", "--layers", "1,2", "--out", tmp_path / "out"]
    refused = run(*words)
    assert refused.code == 2
    assert "a.txt:3 has 301 tokens, and a sequence 256 at most: type --too-long split" in refused.err
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = run(*words, "--too-long", "truncate")
    assert done.code == 0, done.err
    assert "3 samples, 270 rows in 1 shard; 1 shard of them made now" in done.err
    assert "note: documents that were truncated: 1 (45 tokens left out)" in done.err
    again = run(*words, "--too-long", "truncate", "--json")
    assert (again.code, again.json["made"], again.json["counts"]["rows"]) == (0, 0, 270)
    assert "nothing was left to do" in again.err
    other = run(*words, "--too-long", "truncate", "--rows", "prompt[-1]")
    assert other.code == 1
    assert "holds another harvest: spec.capture.select was not set, and is" in other.err


def test_the_command_from_stdin_with_probes(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from midstream.core.probe import Probe
    from midstream.formats.probe_file import read_probes, write_probes
    from midstream.formats.vectors import write_vectors

    probe = Probe(2, "resid_post", [1.0] * HIDDEN, 0.25, "sum")
    write_probes(tmp_path / "p.safetensors", [probe])
    (back,) = read_probes(tmp_path / "p.safetensors")
    assert back.described() == probe.described()
    write_vectors(tmp_path / "v.safetensors", {1: [0.5] * HIDDEN})
    stdin(monkeypatch, "one\ntwo\n")
    done = run("harvest", "--model", tiny, "--prompts", "-", "--probe", tmp_path / "p.safetensors", "--probe",
               tmp_path / "v.safetensors", "--pool", "last", "--out", tmp_path / "out")  # fmt: skip
    assert done.code == 0, done.err
    from midstream import harvest

    found = harvest.open(tmp_path / "out")
    assert [one["name"] for one in found.probes] == ["sum", "v.1"]
    assert found.scores.shape == (2, 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--layers", "9"], "no layer 9"),
        (["--pool", "max"], "--pool"),
        (["--stride", "4"], "stride: is for documents that are split or packed"),
        (["--across"], "across: is for packed documents"),
        (["--rows", "generated"], "a harvest generates nothing"),
        (["--context", "999"], "999 is more than the model's 256"),
        (["--probe", "nix.safetensors"], "no file nix.safetensors"),
        (["--site", "q,nix"], "no site 'nix'"),
    ],
)
def test_the_command_refuses(run: Run, tiny: Path, tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    done = run("harvest", "--model", tiny, "--prompts", tmp_path / "a.txt", "--out", tmp_path / "out", *words)
    assert done.code == 2
    assert says in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
