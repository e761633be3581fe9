"""`midstream generate`, `score` and `--steer`: what is read from the command line, and what is refused at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstream as ms
from midstream.cli.steering import Steering, given_steering
from midstream.core.artifacts import Artifact
from midstream.core.interventions import OpReceipt
from midstream.core.ops import Add, Clamp
from midstream.formats.vectors import write_vectors
from midstream.formats.wire import encode_tensor
from unit.command import Run, runner
from unit.tiny_checkpoint import HIDDEN, LAYERS, save_tiny


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


def vector(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(HIDDEN).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of vector files and specs, good ones and others."""
    folder = tmp_path_factory.mktemp("steer")
    write_vectors(folder / "happy.safetensors", {1: vector(1), 2: vector(2)})
    write_vectors(folder / "sad.gguf", {2: vector(3)})
    write_vectors(folder / "lens.json", {1: vector(4)})
    write_vectors(folder / "heads.safetensors", {1: vector(5)}, site="head_out")
    write_vectors(folder / "wide.safetensors", {1: np.ones(HIDDEN + 1)})
    write_vectors(folder / "deep.safetensors", {LAYERS + 3: vector(6)})
    spec = {"ops": [{"kind": "add", "layers": [1], "vector": [0.5] * HIDDEN, "strength": 2.0, "scope": "generated"},
                    {"kind": "ablate", "layers": [2], "directions": [1.0] * HIDDEN}]}  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    import torch

    spec["ops"][0]["vector"] = encode_tensor(torch.full((HIDDEN,), 0.5))
    (folder / "wire.json").write_text(json.dumps(spec))
    for name, text in {
        "kind.json": '{"ops": [{"kind": "adds", "layers": [1]}]}',
        "field.json": '{"ops": [{"kind": "add", "layers": [1], "vector": [1.0], "strenght": 2}]}',
        "empty.json": '{"ops": []}',
        "far.json": json.dumps({"ops": [spec["ops"][1], {**spec["ops"][1], "layers": [77]}]}),
        "broken.json": '{"ops": ',
        "other.json": '{"a": 1}',
        "schema.json": '{"type": "integer"}',
        "damaged.txt": "{",
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def read(*files: Path, **given: Any) -> Steering:
    names = ("strength", "layers", "rows", "kind", "value")
    return given_steering(
        [str(file) for file in files], **{name: given.get(name) for name in names}, norm_match=given.get("norm", False)
    )


def ops(steering: Steering) -> Sequence[Any]:
    assert steering.spec is not None
    assert len(steering.spec.ops) == len(steering.sources)
    return steering.spec.ops


# --- from options to a spec


def test_nothing_steers_nothing() -> None:
    found = given_steering(None, strength=None, layers=None, rows=None, kind=None, value=None, norm_match=False)
    assert (found.spec, found.as_json()) == (None, None)


def test_a_vector_file_is_added_at_its_layers_to_every_row(files: Path) -> None:
    (op,) = ops(read(files / "happy.safetensors"))
    assert isinstance(op, Add)
    assert (op.layers, op.site, op.strength, op.scope) == ((1, 2), "resid_post", 1.0, None)
    assert [op.of_layer("vector", layer).tolist() for layer in (1, 2)] == [vector(1).tolist(), vector(2).tolist()]


@pytest.mark.parametrize("name", ["happy.safetensors", "sad.gguf", "lens.json"])
def test_every_format_of_vectors_is_what_ms_add_makes_of_it(files: Path, name: str) -> None:
    found = read(files / name, strength=[-2.5], rows=["prompt[-1], generated"], norm=True)
    want = ms.add(str(files / name), strength=-2.5, rows="prompt[-1], generated", norm_match=True)
    assert found.spec == want


@pytest.mark.parametrize("kind", ["add", "ablate", "clamp", "replace"])
def test_every_kind_is_what_its_function_makes_of_the_file(files: Path, kind: str) -> None:
    amount: dict[str, Any] = {"value": 3.0} if kind == "clamp" else {"strength": 0.5}
    file = str(files / "happy.safetensors")
    found = read(files / "happy.safetensors", kind=[kind], layers=["2"], **{name: [it] for name, it in amount.items()})
    assert found.spec == getattr(ms, kind)(file, layers=[2], **amount)


def test_options_are_for_all_files_or_for_each(files: Path) -> None:
    pair = (files / "happy.safetensors", files / "sad.gguf")
    assert [op.strength for op in ops(read(*pair, strength=[4.0]))] == [4.0, 4.0]
    assert [op.strength for op in ops(read(*pair, strength=[4.0, -2.0]))] == [4.0, -2.0]
    assert [op.layers for op in ops(read(*pair, layers=["2"]))] == [(2,), (2,)]
    assert [op.layers for op in ops(read(*pair, layers=["1,2", "all"]))] == [(1, 2), (2,)]
    both = ops(read(*pair, kind=["add", "clamp"], strength=[3.0], value=[0.0], rows=["generated", "prompt"]))
    assert [type(op) for op in both] == [Add, Clamp]
    assert (both[0].strength, both[1].value) == (3.0, 0.0)
    assert [str(op.scope) for op in both] == ["generated", "prompt"]


def test_a_whole_spec_stands_beside_vectors_in_order(files: Path) -> None:
    found = read(files / "spec.json", files / "happy.safetensors", strength=[7.0])
    assert [op.kind for op in ops(found)] == ["add", "ablate", "add"]
    assert [getattr(op, "strength", None) for op in ops(found)] == [2.0, 1.0, 7.0]
    assert [(Path(one.file).name, one.place) for one in found.sources] == [
        ("spec.json", 0), ("spec.json", 1), ("happy.safetensors", None),
    ]  # fmt: skip
    asked = found.as_json()
    assert asked is not None
    assert [Path(file).name for file in asked["files"]] == ["spec.json", "happy.safetensors"]
    again = ms.InterventionSpec.of({"ops": asked["ops"]})
    assert again == found.spec


def test_tensors_of_a_spec_may_be_lists_or_wire_tensors(files: Path) -> None:
    assert read(files / "wire.json").spec == read(files / "spec.json").spec


def test_a_spec_may_name_artifacts(tmp_path: Path) -> None:
    artifact = Artifact.of([1.0, 2.0])
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"ops": [{"kind": "add", "layers": 3, "vector": artifact.id}]}))
    (op,) = ops(read(file))
    assert op.vector == artifact


def test_the_report_has_a_line_for_each_op_and_layer(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(files / "happy.safetensors", strength=[4.0])
    one = [OpReceipt(0, "add", "resid_post", 1, 3, 3, relative=0.25), OpReceipt(0, "add", "resid_post", 2, 0, 0)]
    two = [OpReceipt(0, "add", "resid_post", 1, 1, 1, relative=0.45), OpReceipt(0, "add", "resid_post", 2, 0, 0)]
    found.report([one, two])
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line.split() for line in err.splitlines() if line.strip()]
    assert lines[0] == ["op", "kind", "site", "layer", "selected", "computed", "reused", "‖change‖/‖row‖", "from"]
    assert lines[2] == ["0", "add", "resid_post", "1", "4", "4", "0", "0.3", "happy.safetensors", "×", "4"]
    assert lines[3][3:8] == ["2", "0", "0", "0", "–"]
    assert "s·‖v‖/‖resid‖." in lines[4]


def test_a_long_report_is_cut_and_says_so(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(files / "happy.safetensors")
    found.report([[OpReceipt(0, "add", "resid_post", layer, 1, 1, relative=0.1) for layer in range(30)]])
    err = capsys.readouterr().err
    assert "12 of 30 lines are shown; --json has all." in err
    assert len([line for line in err.splitlines() if "resid_post" in line]) == 12


def test_ops_that_were_not_applied_say_why(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(files / "happy.safetensors", strength=[0.0])
    found.report([[OpReceipt(0, "add", "resid_post", 1, 0, 0, skipped="strength 0")]])
    assert "not applied: strength 0" in capsys.readouterr().err


# --- bad usage, refused before any model is looked for

GENERATE, SCORE, CAPTURE = (["generate", "-m", "no/model", "-p", "x"], ["score", "-m", "no/model", "-p", "x"],
                            ["capture", "-m", "no/model", "-p", "x"])  # fmt: skip
HAPPY, SAD, SPEC = "--steer FILES/happy.safetensors", "--steer FILES/sad.gguf", "--steer FILES/spec.json"

TABLE: dict[str, tuple[list[str], str, list[str]]] = {
    "no prompt": (["generate", "-m", "no/model"], "", ["no prompts", "--prompt"]),
    "no model": (["generate", "-p", "x"], "", ["--model", "midstream generate --help"]),
    "a strength for nothing": (GENERATE, "--strength 4", ["--strength", "--steer FILE"]),
    "layers for nothing": (GENERATE, "--layers 1", ["--layers", "--steer FILE"]),
    "rows for nothing": (CAPTURE, "--steer-rows generated", ["--steer-rows", "--steer FILE"]),
    "a kind for nothing": (SCORE, "--reference y --kind add", ["--kind", "--steer FILE"]),
    "a norm for nothing": (GENERATE, "--norm-match", ["--norm-match", "--steer FILE"]),
    "a missing file": (GENERATE, "--steer FILES/gone.safetensors", ["gone.safetensors"]),
    "a directory": (GENERATE, "--steer FILES", ["FILES", "directory"]),
    "a file of another kind": (GENERATE, "--steer FILES/damaged.txt", ["damaged.txt"]),
    "broken JSON": (GENERATE, "--steer FILES/broken.json", ["broken.json", "JSON"]),
    "other JSON": (GENERATE, "--steer FILES/other.json", ["other.json", "ops", "activations", "it has: a"]),
    "an unknown kind of op": (GENERATE, "--steer FILES/kind.json", ["kind.json: ops[0].kind", "'adds'", "ablate"]),
    "an unknown field": (GENERATE, "--steer FILES/field.json", ["field.json: ops[0].strenght", "strength"]),
    "no ops": (GENERATE, "--steer FILES/empty.json", ["empty.json: ops", "one or more"]),
    "an unknown kind": (GENERATE, f"{HAPPY} --kind multiply", ["--kind", "'multiply'", "clamp", ".json"]),
    "a kind that is no vector's": (GENERATE, f"{HAPPY} --kind rotate", ["--kind", "'rotate'", ".json spec"]),
    "an absent layer": (GENERATE, f"{HAPPY} --layers 1,9", ["--layers", "no layer 9", "[1, 2]", "happy"]),
    "an absent layer of a capture": (CAPTURE, f"{HAPPY} --steer-layers 9", ["--steer-layers", "no layer 9", "[1, 2]"]),
    "a word for a layer": (GENERATE, f"{HAPPY} --layers x", ["--layers", "'x'"]),
    "rows that cannot be read": (GENERATE, f"{HAPPY} --rows prompt[", ["--rows", "prompt[0:5]"]),
    "a word for a strength": (GENERATE, f"{HAPPY} --strength much", ["--strength", "midstream generate --help"]),
    "a strength that is none": (GENERATE, f"{HAPPY} --strength nan", ["--strength", "nan"]),
    "a strength too large": (GENERATE, f"{HAPPY} --kind ablate --strength 2", ["--strength", "1", "2.0"]),
    "strengths for too few": (GENERATE, f"{HAPPY} --strength 1 --strength 2", ["--strength", "2 times", "1 of"]),
    "strengths for too many": (
        GENERATE, f"{HAPPY} {SAD} {SAD} --strength 1 --strength 2", ["--strength", "2 times", "3 of", "once for all"],
    ),
    "a strength for a spec": (GENERATE, f"{SPEC} --strength 2", ["--strength", "no --steer is a vector file"]),
    "a strength for a clamp": (
        GENERATE, f"{HAPPY} --kind clamp --value 0 --strength 2", ["--strength", "add or ablate or replace"],
    ),
    "a clamp without a value": (GENERATE, f"{HAPPY} --kind clamp", ["--value", "--value 0"]),
    "a value for an add": (GENERATE, f"{HAPPY} --value 2", ["--value", "clamp"]),
    "a norm for an ablation": (GENERATE, f"{HAPPY} --kind ablate --norm-match", ["--norm-match", "add"]),
    "vectors of heads": (GENERATE, "--steer FILES/heads.safetensors", ["heads.safetensors", ".json spec"]),
    "two constraints": (GENERATE, "--regex a --choice b", ["--choice", "--regex", "one"]),
    "a schema that is not there": (GENERATE, "--json-schema FILES/gone.json", ["--json-schema", "gone.json"]),
    "a schema that is no JSON": (GENERATE, "--json-schema FILES/broken.json", ["--json-schema", "broken.json", "JSON"]),
    "a schema in a directory": (GENERATE, "--json-schema FILES", ["--json-schema", "directory"]),
    "a grammar that is not there": (GENERATE, "--grammar FILES/gone.gbnf", ["--grammar", "gone.gbnf"]),
    "a stream of two": (GENERATE, "--stream -p y", ["--stream", "one prompt", "2"]),
    "a stream of two continuations": (GENERATE, "--stream --n 2", ["--stream", "--n is 2"]),
    "a stream as one object": (GENERATE, "--stream --json", ["--stream", "--json", "--out"]),
    "no tokens": (GENERATE, "--max-tokens 0", ["--max-tokens", "0"]),
    "more at least than at most": (GENERATE, "--min-tokens 50", ["--min-tokens", "50", "40"]),
    "a penalty of nothing": (GENERATE, "--repetition-penalty 0", ["--repetition-penalty", "0"]),
    "a mass above one": (GENERATE, "--top-p 2", ["--top-p", "2"]),
    "negative log-probabilities": (GENERATE, "--logprobs -1", ["--logprobs", "-1"]),
    "an empty stop": (GENERATE, "--stop=", ["--stop", "1"]),
    "into no directory": (GENERATE, "--out FILES/no/said.json", ["--out", "mkdir -p"]),
    "into a directory": (GENERATE, "--out FILES", ["--out", "directory", "said.json"]),
    "scores into a directory": (SCORE, "--reference y --out FILES", ["--out", "directory", "scores.json"]),
    "no reference": (SCORE, "", ["--prompt 1", "--reference"]),
    "an empty reference": (SCORE, "--reference=", ["--reference 1", "empty"]),
    "two prompts and three references": (
        SCORE, "-p y --reference a --reference b --reference c", ["2 prompts", "3 references", "one"],
    ),
    "references twice": (SCORE, "--prompts FILES/refs.jsonl --reference a", ["refs.jsonl:1", "--reference"]),
    "a record without one": (["score", "-m", "no/model"], "--prompts FILES/some.jsonl", ["some.jsonl:2", "reference"]),
    "a reference of another kind": (["score", "-m", "no/model"], "--prompts FILES/odd.jsonl", ["odd.jsonl:1", "3"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_bad_usage_is_one_line_and_code_two(case: str, run: Run, files: Path) -> None:
    (files / "refs.jsonl").write_text('{"prompt": "a", "reference": "b"}\n')
    (files / "some.jsonl").write_text('{"prompt": "a", "reference": "b"}\n{"prompt": "a"}\n')
    (files / "odd.jsonl").write_text('{"prompt": "a", "reference": 3}\n')
    first, more, wanted = TABLE[case]
    before = sorted(files.rglob("*"))
    done = run(*first, *(word.replace("FILES", str(files)) for word in more.split()))
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("midstream: ")
    assert "no/model" not in done.err
    for word in wanted:
        assert word.replace("FILES", str(files)) in done.err
    assert sorted(files.rglob("*")) == before


# --- on a tiny model


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--steer", "FILES/wide.safetensors"], ["--steer", "wide.safetensors", str(HIDDEN + 1), str(HIDDEN)]),
        (["--steer", "FILES/deep.safetensors"], ["--steer", "deep.safetensors", "layers 0 to 3"]),
        (["--steer", "FILES/happy.safetensors", "--steer", "FILES/far.json"], ["far.json: ops[1].layers[0]", "77"]),
        (["--regex", "(?=a)"], ["--regex", "E_CONSTRAINT"]),
        (["--json-schema", '{"type": "strin"}'], ["--json-schema", "E_CONSTRAINT"]),
        (["--regex", "a", "--ignore-eos"], ["--ignore-eos", "E_CONSTRAINT"]),
    ],
)
def test_what_the_model_cannot_do_is_one_line_too(
    run: Run, model: Path, files: Path, more: list[str], wanted: list[str]
) -> None:
    if wanted[-1] == "E_CONSTRAINT":
        pytest.importorskip("xgrammar")
    words = [word.replace("FILES", str(files)) for word in more]
    for command in (["generate"], ["generate", "--stream"], ["score", "--reference", "y"], ["capture"]):
        if command[0] != "generate" and wanted[-1] == "E_CONSTRAINT":
            continue
        done = run(*command, "-m", model, "-p", "x", *words)
        assert (done.code, done.out) == (2, ""), done
        assert done.err.count("\n") == 1, done.err
        for word in wanted:
            assert word in done.err


def test_the_text_is_that_of_the_library(run: Run, model: Path) -> None:
    with ms.load(model) as lm:
        want = lm.generate(["abc", "de"], max_tokens=6)
    done = run("generate", "-m", model, "-p", "abc", "--max-tokens", "6")
    assert (done.code, done.out) == (0, f"{want[0].text}\n")
    assert "1 continuation, 6 tokens; ended: 1 by length" in done.err
    assert "change" not in done.err  # nothing was steered, so there is no table
    both = run("generate", "-m", model, "-p", "abc", "-p", "de", "--max-tokens", "6")
    heads = [f"--- --prompt {place} (length)" for place in (1, 2)]
    assert both.out == f"{heads[0]}\n{want[0].text}\n{heads[1]}\n{want[1].text}\n"


def test_a_stream_prints_the_same_text(run: Run, model: Path, files: Path, tmp_path: Path) -> None:
    line = ("generate", "-m", model, "-p", "abc", "--max-tokens", "9", *HAPPY.replace("FILES", str(files)).split())
    whole, out = run(*line), tmp_path / "said.json"
    streamed = run(*line, "--stream", "--out", out)
    assert (streamed.code, streamed.out) == (0, whole.out)
    assert "happy.safetensors × 1" in streamed.err
    kept, printed = json.loads(out.read_text()), run(*line, "--json").json
    assert (kept.pop("out"), printed.pop("out")) == (str(out), None)
    assert kept == printed


def test_out_without_json_prints_nothing(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "said.json"
    done = run("generate", "-m", model, "-p", "abc", "--max-tokens", "3", "--out", out)
    assert (done.code, done.out) == (0, "")
    assert f"wrote {out}: 1 continuation" in done.err
    assert len(json.loads(out.read_text())["prompts"][0]["generated"][0]["token_ids"]) == 3


def test_one_object_has_all_of_it(run: Run, model: Path, files: Path) -> None:
    line = ("generate", "-m", model, "-p", "abc", "--n", "2", "--seed", "3", "--max-tokens", "4", "--logprobs", "2")
    line += (*HAPPY.replace("FILES", str(files)).split(), "--strength", "4", "--rows", "generated", "--json")
    found = run(*line).json
    assert found == run(*line).json
    assert found["params"] == {"max_tokens": 4, "n": 2, "seed": 3, "logprobs": 2}
    assert ms.GenerationParams.of(found["params"]).n == 2
    assert ms.InterventionSpec.of({"ops": found["steering"]["ops"]}).ops[0].layers == (1, 2)
    (prompt,) = found["prompts"]
    assert prompt["source"] == "--prompt 1"
    assert len(prompt["generated"]) == 2
    with ms.load(model) as lm:
        (want,) = lm.generate(
            ["abc"], max_tokens=4, n=2, seed=3, logprobs=2,
            steering=ms.add(str(files / "happy.safetensors"), strength=4.0, rows="generated"),
        )  # fmt: skip
    assert [tuple(one["token_ids"]) for one in prompt["generated"]] == [one.token_ids for one in want.choices]
    assert [ms.OpReceipt(**one) for one in prompt["receipt"]] == list(want.steering)
    assert found["receipt"] == prompt["receipt"]
    assert sum(one["selected"] for one in found["receipt"]) == 2 * 2 * 3  # layers, choices, consumed tokens
    for shown, one in zip(prompt["generated"], want.choices, strict=True):
        assert one.logprobs is not None
        assert [token["logprob"] for token in shown["logprobs"]] == [token.logprob for token in one.logprobs]
        assert [len(token["top"]) for token in shown["logprobs"]] == [2] * len(one.logprobs)


def test_log_probabilities_as_a_table(run: Run, model: Path) -> None:
    done = run("generate", "-m", model, "-p", "abc", "--max-tokens", "3", "--logprobs", "1")
    lines = [line for line in done.out.splitlines() if line.strip()]
    assert lines[-5].split() == ["token", "log-probability", "likeliest", "there"]
    assert all(line.split()[1] == line.split()[-1] for line in lines[-3:])  # greedy: the likeliest was taken


def test_failed_prompts_leave_the_others(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ms.LanguageModel.generate

    def fails(self: ms.LanguageModel, prompts: Any, **named: Any) -> list[ms.Completion]:
        found = whole(self, prompts, **named)
        raise ms.PartialBatchError({0: found[0]}, {1: ms.CaptureError("no token\nis left")})

    monkeypatch.setattr(ms.LanguageModel, "generate", fails)
    done = run("generate", "-m", model, "-p", "abc", "-p", "de", "--max-tokens", "3", "--json")
    assert done.code == 1
    assert "--prompt 2 failed: no token is left" in done.err
    good, bad = done.json["prompts"]
    assert len(good["generated"]) == 1
    assert bad == {"source": "--prompt 2", "error": "no token is left"}


def test_scores_are_those_of_the_library_whatever_their_lengths(run: Run, model: Path, files: Path) -> None:
    texts = ["bc", "d", "ef", "xyz"]
    line = ["score", "-m", str(model), "-p", "abc", *(word for text in texts for word in ("--reference", text))]
    line += [*HAPPY.replace("FILES", str(files)).split(), "--strength", "4"]
    found = run(*line, "--json").json
    with ms.load(model) as lm:
        steering = ms.add(str(files / "happy.safetensors"), strength=4.0)
        want = [lm.score(["abc"], [text], steering=steering)[0].tolist() for text in texts]
        plain = [lm.score(["abc"], [text])[0].tolist() for text in texts]
    assert [one["reference"] for one in found["scores"]] == [f"--reference {place}" for place in (1, 2, 3, 4)]
    for one, logprobs, other in zip(found["scores"], want, plain, strict=True):
        assert one["logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert one["logprobs"] != pytest.approx(other, abs=1e-2)
        assert one["sum"] == pytest.approx(sum(logprobs), abs=1e-5)
    assert ["".join(one["texts"]) for one in found["scores"]] == texts
    table = run(*line).out
    assert f"{found['scores'][3]['sum']:.4f}" in table
    assert f"z {found['scores'][3]['logprobs'][2]:.3f}" in table


def test_records_have_their_own_references(run: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "ab", "reference": "cd"}\n{"prompt_token_ids": [5, 6], "reference": [7, 8]}\n')
    found = run("score", "-m", model, "--prompts", file, "--json").json["scores"]
    assert [one["reference"] for one in found] == [f"{file}:1", f"{file}:2"]
    assert found[1]["prompt_token_ids"] == [5, 6]
    assert found[1]["token_ids"] == [7, 8]
    one_for_all = run("score", "-m", model, "-p", "ab", "-p", "b", "--reference", "c", "--json").json["scores"]
    assert [one["reference"] for one in one_for_all] == ["--reference 1"] * 2
    assert one_for_all[0]["logprobs"] != one_for_all[1]["logprobs"]


def test_a_reference_the_model_cannot_read_is_named(run: Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "ab", "reference": [7]}\n{"prompt": "ab", "reference": [7, 8, 999]}\n')
    done = run("score", "-m", model, "--prompts", file)
    assert (done.code, done.out) == (2, "")
    assert f"{file}:2: the reference has token id 999" in done.err


def test_scores_into_a_file(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    done = run("score", "-m", model, "-p", "ab", "--reference", "c", "--out", out)
    assert (done.code, done.out) == (0, "")
    assert f"wrote {out}: 1 score" in done.err
    assert json.loads(out.read_text())["out"] == str(out)


def test_a_capture_is_steered(run: Run, model: Path, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts.safetensors"
    line = ("capture", "-m", model, "-p", "abc", "--layers", "1,3", *HAPPY.replace("FILES", str(files)).split())
    done = run(*line, "--strength", "4", "--steer-layers", "1", "--steer-rows", "prompt[-1]", "--json", "--out", out)
    assert done.code == 0
    assert "happy.safetensors × 4" in done.err
    assert done.json["steering"]["ops"][0]["layers"] == [1]
    (receipt,) = done.json["prompts"][0]["receipt"]
    assert (receipt["selected"], receipt["computed"], receipt["layer"]) == (1, 1, 1)
    found = ms.CaptureResult.load(out)
    with ms.load(model) as lm:
        plain = lm.capture("abc", layers=[1, 3])
    moved = (found.rows(1) - plain.rows(1))[-1].numpy()
    assert np.allclose(moved, 4 * vector(1), atol=1e-4)
    assert found.rows(1)[:-1].equal(plain.rows(1)[:-1])
    assert not found.rows(3)[-1].equal(plain.rows(3)[-1])


def test_structured_output(run: Run, model: Path, files: Path, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    grammar = tmp_path / "g.gbnf"
    grammar.write_text('root ::= "k" [0-9]')
    line = ("generate", "-m", model, "-p", "abc", "--max-tokens", "12")
    one = run(*line, "--choice", "yes", "--choice", "no").out.strip()
    assert one in ("yes", "no")
    assert run(*line, "--regex", "[ab]{3}").out.strip() in {a + b + c for a in "ab" for b in "ab" for c in "ab"}
    assert run(*line, "--grammar", grammar).out.strip()[0] == "k"
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    text = run(*line, "--json-schema", json.dumps(schema)).out
    assert json.loads(text)["a"] in ("x", "y")
    int(run(*line, "--max-tokens", "3", "--json-schema", files / "schema.json", "--json").json["prompts"][0]
        ["generated"][0]["text"] or "0")  # fmt: skip


def test_without_xgrammar_it_says_what_to_install(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    done = run("generate", "-m", model, "-p", "abc", "--choice", "yes", "--choice", "no")
    assert (done.code, done.out) == (2, "")
    assert "midstream[structured]" in done.err
