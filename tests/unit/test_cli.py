"""The command line: what it writes and prints, and that each wrong line is one line on stderr with exit code 2."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.cli import app, main
from midstream.formats import hidden_states_file
from midstream.progress import token_progress
from unit.captures import made
from unit.command import Ran, Run, runner
from unit.tiny_checkpoint import HIDDEN, LAYERS, POISON, save_tiny

MIDSTREAM = [sys.executable, "-m", "midstream.cli"]
SITES = ("resid_pre", "resid_post", "attn_out", "mlp_out", "head_out", "q", "k")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture file of two sites, made without a model."""
    return made(("resid_post", "attn_out"), (0, 2), torch.float32).save(
        tmp_path_factory.mktemp("acts") / "a.safetensors"
    )


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- the program as a whole


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time\n"
        "from midstream.cli import main\n"
        "main(['--help']); main(['capture', '--help']); main(['generate', '--help']); main(['score', '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'matplotlib'} & sys.modules.keys()\n"
        "print(time.process_time(), *heavy, file=sys.stderr)"  # of the whole process, whatever else runs
    )
    seconds: list[float] = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        first, *heavy = done.stderr.split()
        assert heavy == []
        seconds.append(float(first))
    assert min(seconds) < 0.5


def test_help_names_every_command_and_nothing_of_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("--help")
    assert whole.code == 0
    assert run().out == whole.out
    names = [
        "demo",
        "capture",
        "harvest",
        "generate",
        "score",
        "inspect",
        "verify",
        "schema",
        "serve",
        "vllm-serve",
        "keys",
        "budgets",
    ]
    assert [line.split()[0] for line in whole.out.split("Commands:\n")[1].splitlines()] == names
    for name in names:
        text = run(name, "--help").out
        assert f"midstream {name}" in text
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("HOME", "/somewhere/else")
            assert run(name, "--help").out == text


def test_version(run: Run) -> None:
    assert run("--version") == Ran(0, f"midstream {ms.__version__}\n", "")


def test_the_app_is_typers() -> None:
    from typer.testing import CliRunner

    assert CliRunner().invoke(app, ["--version"]).exit_code == 0


# --- capture


def test_capture_writes_what_the_library_captures(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts.safetensors"
    line = ("capture", "--model", model, "-p", "hello", "-p", "is it?", "--layers", "1,3", "--rows", "prompt[-2:]")
    done = run(*line, "--site", "resid_post,q", "--site", "attn_out", "--out", out)
    assert (done.code, done.out) == (0, "")
    assert "wrote" in done.err
    assert str(out) in done.err
    found = ms.CaptureResult.load(out)
    with ms.load(model) as lm:
        want = lm.capture(["hello", "is it?"], layers=[1, 3], rows="prompt[-2:]", sites=["resid_post", "q", "attn_out"])
    assert found.sites == ("resid_post", "q", "attn_out")
    assert found.labels == want.labels
    assert len(found.labels) == 4
    assert all(torch.equal(found.tensors[place], rows) for place, rows in want.tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["acts.safetensors"]


def test_capture_without_out_is_a_table(run: Run, model: Path) -> None:
    done = run("capture", "--model", model, "-p", "hello", "--layers", "0,3", "--rows", "prompt[-1]")
    assert done.code == 0
    head, _, line = [text for text in done.out.splitlines() if text.strip()]
    assert head.split() == ["prompt", "tokens", "rows", "layer", "0", "layer", "3", "text"]
    with ms.load(model) as lm:
        rows = lm.capture("hello", layers=[0, 3], rows="prompt[-1]")
    norms = [f"{float(rows.rows(layer).norm()):.3g}" for layer in (0, 3)]
    assert line.split() == ["0", "6", "1", *norms, "<s>hello"]
    assert "6 tokens" in done.err


def test_capture_as_json(run: Run, model: Path, tmp_path: Path) -> None:
    done = run("capture", "-m", model, "-p", "hi", "--layers", "all", "--json", "--out", tmp_path / "a.safetensors")
    assert done.code == 0
    found = done.json
    assert found["out"] == str(tmp_path / "a.safetensors")
    assert found["model"] == str(model)
    assert found["rows"] == 3
    assert found["receipt"] == {"selected": 3, "computed": 3, "reused": 0, "overflowed": 0}
    (prompt,) = found["prompts"]
    assert prompt["source"] == "--prompt 1"
    assert prompt["positions"] == [0, 1, 2]
    assert list(prompt["last_row_norms"]["resid_post"]) == [str(layer) for layer in range(LAYERS)]


def test_prompts_of_every_kind_of_record(run: Run, model: Path, tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "p.jsonl",
        {"text": "ab", "label": 3},
        {"prompt": "ab\u2028c"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": [5, 6, 7], "prompt": "for people"},
        {"prompt_token_ids": [5, 6, 7], "attention_mask": [0, 1, 1]},
    )
    file.write_text(file.read_text().replace("\\u2028", "\u2028"))  # a line end for Python, not for JSON
    found = run("capture", "-m", model, "--prompts", file, "-p", "first", "--json").json
    assert [one["source"] for one in found["prompts"]] == ["--prompt 1", *(f"{file}:{line}" for line in range(1, 6))]
    ids = [one["token_ids"] for one in found["prompts"]]
    with ms.load(model) as lm:
        plain = [lm.tokenizer(text)["input_ids"] for text in ("first", "ab", "ab\u2028c")]
    assert ids[:3] == plain
    assert ids[3][0] == 0
    assert len(ids[3]) == 1 + len("user: hi\n")
    assert ids[4:] == [[5, 6, 7], [6, 7]]


@pytest.mark.parametrize(
    ("text", "count"), [("One\n\n two \n", 2), ('{"text": "a"}\n{"text": "b"}', 2), ("\r\n{\r\n", 1), ("\ufeffa\n", 1)]
)
def test_prompts_from_stdin(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    if text.strip() == "{":
        text = text.replace("{", "x{")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    found = run("capture", "-m", model, "--prompts", "-", "--layers", "0", "--json").json
    assert len(found["prompts"]) == count
    assert {one["source"].split(":")[0] for one in found["prompts"]} == {"stdin"}


def test_special_tokens_can_be_left_out(run: Run, model: Path) -> None:
    plain = run("capture", "-m", model, "-p", "abc", "--json").json["prompts"][0]["token_ids"]
    without = run("capture", "-m", model, "-p", "abc", "--json", "--no-special-tokens").json["prompts"][0]["token_ids"]
    assert plain == [0, *without]


def test_generation_options_reach_the_model(run: Run, model: Path) -> None:
    line = ("capture", "-m", model, "-p", "abc", "--max-tokens", "6", "--n", "3", "--seed", "5", "--json")
    line += ("--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--rows", "generated")
    first, again = run(*line).json, run(*line).json
    assert first == again
    (prompt,) = first["prompts"]
    assert len(prompt["generated"]) == 3
    assert len({tuple(one["token_ids"]) for one in prompt["generated"]}) > 1
    assert first["rows"] == sum(len(one["token_ids"]) - 1 for one in prompt["generated"])
    greedy = run("capture", "-m", model, "-p", "abc", "--max-tokens", "8").out
    assert "generated" in greedy
    text = run("capture", "-m", model, "-p", "abc", "--max-tokens", "8", "--json").json["prompts"][0]["generated"][0]
    letter = next(char for char in text["text"] if char.isprintable() and char != "\ufffd")
    cut = run("capture", "-m", model, "-p", "abc", "--max-tokens", "8", "--stop", letter, "--json").json
    (stopped,) = cut["prompts"][0]["generated"]
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", text["text"].partition(letter)[0])


def test_model_dtype_and_storage_dtype(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    assert run("capture", "-m", model, "-p", "a", "--model-dtype", "bfloat16", "--out", out).code == 0
    assert ms.CaptureResult.load(out).rows(0).dtype == torch.bfloat16
    assert run("capture", "-m", model, "-p", "a", "--dtype", "float64", "--out", out).code == 0
    assert ms.CaptureResult.load(out).rows(0).dtype == torch.float64


def test_rows_that_select_nothing_are_said_so(run: Run, model: Path) -> None:
    done = run("capture", "-m", model, "-p", "abc", "-p", "abcdefghij", "--rows", "prompt[8]", "--layers", "0")
    assert done.code == 0
    assert "--rows selected nothing in 1 of 2 prompts: --prompt 1" in done.err


def test_a_failed_prompt_leaves_the_others(run: Run, tmp_path: Path) -> None:
    poisoned = save_tiny(tmp_path / "poisoned", poisoned=True)
    out = tmp_path / "a.safetensors"
    file = jsonl(tmp_path / "p.jsonl", {"text": "fine"}, {"text": f"not {POISON}"})
    done = run("capture", "-m", poisoned, "--prompts", file, "--dtype", "int32", "--out", out)
    assert done.code == 1
    assert f"{file}:2 failed" in done.err
    found = ms.CaptureResult.load(out)
    assert list(found.errors) == [1]
    assert len(found.tokens(0)) == 5


def test_hidden_states_files(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "hidden"
    line = ("capture", "-m", model, "-p", "abc", "-p", "de", "--layers", "1,3", "--format", "vllm", "--out", out)
    done = run(*line)
    assert done.code == 0
    assert "wrote 2 hidden-states files" in done.err
    files = sorted(out.glob("*.safetensors"))
    assert [len(hidden_states_file.read(file).token_ids) for file in files] == [4, 3]
    assert hidden_states_file.read(files[0]).layer_ids == (2, 4)
    again = run(*line)
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "has files in it already" in again.err


def test_hidden_states_files_come_whole_or_not_at_all(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "hidden"
    done = run("capture", "-m", model, "-p", "abc", "--rows", "prompt[-1]", "--format", "vllm", "--out", out)
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("midstream: E_SELECTION at --rows:")
    assert list(tmp_path.iterdir()) == []


# --- bad usage

TABLE: dict[str, tuple[list[str], list[str]]] = {
    "no command of that name": (["captur"], ["captur", "capture", "--help"]),
    "no option of that name": (["capture", "--modle", "x"], ["--modle", "--model", "midstream capture --help"]),
    "no model": (["capture", "-p", "x"], ["--model", "midstream capture --help"]),
    "no prompt": (["capture", "-m", "MODEL"], ["no prompts", "--prompt", "--prompts", "stdin"]),
    "an empty prompt": (["capture", "-m", "MODEL", "-p", ""], ["--prompt 1", "empty"]),
    "a folder that is not there": (["capture", "-m", "./gone", "-p", "x"], ["./gone", "folder", "smollm2"]),
    "a folder without a model": (["capture", "-m", "TMP", "-p", "x"], ["config.json", "smollm2"]),
    "an absent layer": (["MODEL", "--layers", "7"], ["--layers", "7", "layers 0 to 3", "--layers all"]),
    "a negative layer": (["MODEL", "--layers", "-1"], ["--layers", "-1", "--layers 10,20"]),
    "a word for a layer": (["MODEL", "--layers", "1,x"], ["--layers", "'x'", "--layers 10,20"]),
    "an empty layer": (["MODEL", "--layers", "1,"], ["--layers", "''", "--layers 10,20"]),
    "an unknown site": (["MODEL", "--site", "resid"], ["--site", "'resid'", "resid_post, attn_out"]),
    "another tool's site": (["MODEL", "--site", "residual"], ["--site", "'residual'", "'resid_post'"]),
    "a site the model has not": (["MODEL", "--site", "router_logits"], ["--site", "router_logits", "attn_out"]),
    "an unknown storage type": (["MODEL", "--dtype", "float8"], ["--dtype", "'float8'", "bfloat16", "--dtype float32"]),
    "an unknown model type": (["MODEL", "--model-dtype", "int4"], ["--model-dtype", "'int4'", "bfloat16"]),
    "an unknown device": (["MODEL", "--device", "gpu"], ["--device", "'gpu'", "cpu"]),
    "rows that cannot be read": (["MODEL", "--rows", "prompt[-1"], ["--rows", "'prompt[-1'", "prompt[0:5]"]),
    "a phase that is not there": (["MODEL", "--rows", "last"], ["--rows", "'last'", "generated[3:]"]),
    "rows that exclude alone": (["MODEL", "--rows", "!prompt[0]"], ["--rows", "include"]),
    "no token": (["MODEL", "--max-tokens", "0"], ["--max-tokens", "0", "1"]),
    "a word for a number": (["MODEL", "--max-tokens", "many"], ["--max-tokens", "integer", "midstream capture --help"]),
    "a negative temperature": (["MODEL", "--max-tokens", "2", "--temperature", "-1"], ["--temperature", "-1"]),
    "a seed without sampling": (["MODEL", "--seed", "3"], ["--seed", "--max-tokens 1", "--max-tokens 20"]),
    "an unknown format": (["MODEL", "--format", "npz"], ["--format", "npz", "midstream", "vllm"]),
    "a format without a place": (["MODEL", "--format", "vllm"], ["--format", "--out"]),
    "a site no such file has": (
        ["MODEL", "--format", "vllm", "--out", "TMP/v", "--site", "q"],
        ["--site", "resid_pre"],
    ),
    "many continuations in one file": (
        ["MODEL", "--format", "vllm", "--out", "TMP/v", "--n", "2", "--max-tokens", "3"],
        ["--n", "one", "--n 1"],
    ),
    "a missing directory": (["MODEL", "--out", "TMP/no/a.safetensors"], ["TMP/no", "mkdir -p"]),
    "a directory for a file": (["MODEL", "--out", "TMP"], ["TMP", "directory", "acts.safetensors"]),
    "a file for a directory": (["MODEL", "--format", "vllm", "--out", "TMP/list.txt"], ["list.txt", "directory"]),
    "a prompt too long": (["MODEL", "-p", "x" * 300], ["--prompt 2", "301", "256"]),
    "a missing prompts file": (["MODEL", "--prompts", "TMP/gone.jsonl"], ["gone.jsonl", ".txt", "stdin"]),
    "prompts in a directory": (["MODEL", "--prompts", "TMP"], ["TMP", "directory", ".jsonl"]),
    "prompts of another kind": (["MODEL", "--prompts", "TMP/list.csv"], ["list.csv", ".jsonl", ".txt"]),
    "prompts without a prompt": (["MODEL", "--prompts", "TMP/empty.txt"], ["empty.txt", "no prompts"]),
    "prompts that are no text": (["MODEL", "--prompts", "TMP/latin.txt"], ["latin.txt:2", "UTF-8"]),
    "a broken record": (["MODEL", "--prompts", "TMP/broken.jsonl"], ["broken.jsonl:2", "JSON"]),
    "an empty line": (["MODEL", "--prompts", "TMP/gap.jsonl"], ["gap.jsonl:2", "empty", '{"text": "…"}']),
    "no record": (["MODEL", "--prompts", "TMP/list.jsonl"], ["list.jsonl:1", "[1, 2]", '{"text": "…"}']),
    "a record without a prompt": (["MODEL", "--prompts", "TMP/other.jsonl"], ["other.jsonl:1", "txt", "messages"]),
    "a record with two": (["MODEL", "--prompts", "TMP/two.jsonl"], ["two.jsonl:1", "text, messages"]),
    "a record of the wrong form": (["MODEL", "--prompts", "TMP/form.jsonl"], ["form.jsonl:1", "text", "3"]),
    "an empty text": (["MODEL", "--prompts", "TMP/blank.jsonl"], ["blank.jsonl:2", "text is empty"]),
    "no messages": (["MODEL", "--prompts", "TMP/chat.jsonl"], ["chat.jsonl:1", "role", "content"]),
    "an absent token id": (["MODEL", "--prompts", "TMP/ids.jsonl"], ["ids.jsonl:2", "999", "0 to 257"]),
    "embeddings": (["MODEL", "--prompts", "TMP/embeds.jsonl"], ["embeds.jsonl:1", "embeddings"]),
    "inspecting nothing": (["inspect"], ["FILE", "midstream inspect --help"]),
    "inspecting a missing file": (["inspect", "TMP/gone.safetensors"], ["gone.safetensors"]),
    "inspecting a directory": (["inspect", "TMP"], ["TMP", "directory"]),
    "inspecting another file": (["inspect", "TMP/list.txt"], ["list.txt", "capture file"]),
    "inspecting other tensors": (["inspect", "TMP/other.safetensors"], ["other.safetensors", "not a capture file"]),
    "inspecting an absent layer": (["inspect", "ACTS", "--layer", "5"], ["--layer", "5", "layers 0, 2"]),
    "inspecting an absent site": (["inspect", "ACTS", "--site", "q"], ["--site", "q", "resid_post, attn_out"]),
    "a page of two sites": (["inspect", "ACTS", "--heatmap", "TMP/p.html"], ["--site", "resid_post, attn_out"]),
    "a page in no directory": (["inspect", "ACTS", "--heatmap", "TMP/no/p.html"], ["--heatmap", "mkdir -p"]),
    "layers of a file that is silent": (["inspect", "TMP/vllm.safetensors"], ["--layer-ids", "2 layers"]),
    "layers of a file that says them": (["inspect", "ACTS", "--layer-ids", "1,2"], ["--layer-ids", "leave it out"]),
    "verifying an absent layer": (["verify", "-m", "MODEL", "--layers", "9"], ["--layers", "9", "layers 0 to 3"]),
    "no such schema": (["schema", "Capture"], ["'Capture'", "CaptureSpec", "WireTensor"]),
    "schemas into a file": (["schema", "--out", "TMP/list.txt"], ["list.txt", "directory"]),
    "a demo into no directory": (["demo", "-m", "MODEL", "--out", "TMP/no/demo"], ["TMP/no", "mkdir -p"]),
}  # fmt: skip


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A directory of files that commands refuse."""
    from safetensors.torch import save_file

    jsonl(tmp_path / "list.jsonl", [1, 2])
    jsonl(tmp_path / "other.jsonl", {"txt": "x"})
    jsonl(tmp_path / "two.jsonl", {"text": "x", "messages": [{"role": "user", "content": "x"}]})
    jsonl(tmp_path / "form.jsonl", {"text": 3})
    jsonl(tmp_path / "blank.jsonl", {"text": "x"}, {"text": ""})
    jsonl(tmp_path / "chat.jsonl", {"messages": ["hello"]})
    jsonl(tmp_path / "ids.jsonl", {"text": "x"}, {"prompt_token_ids": [3, 999]})
    jsonl(tmp_path / "embeds.jsonl", {"text": "x", "prompt_embeds": [[0.5]]})
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "gap.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
    (tmp_path / "list.csv").write_text("a,b\n")
    (tmp_path / "list.txt").write_text("a\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"fine\n\xe9t\xe9\n")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    save_file(
        {"hidden_states": torch.zeros(3, 2, 4), "token_ids": torch.tensor([5, 6, 7])}, tmp_path / "vllm.safetensors"
    )
    return tmp_path


@pytest.mark.parametrize("case", TABLE)
def test_bad_usage_is_one_line_and_code_two(case: str, run: Run, model: Path, acts: Path, wrong: Path) -> None:
    words, wanted = TABLE[case]
    if words[0] == "MODEL":
        words = ["capture", "-m", "MODEL", "-p", "x", *words[1:]]
    places = {"MODEL": str(model), "TMP": str(wrong), "ACTS": str(acts)}
    for place, path in places.items():
        words = [word.replace(place, path) for word in words]
        wanted = [word.replace(place, path) for word in wanted]
    before = sorted(wrong.rglob("*"))
    done = run(*words)
    assert done.code == 2, done
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if not line.startswith("capturing")]
    assert len(lines) == 1, done.err
    assert lines[0].startswith("midstream: ")
    for word in wanted:
        assert word in lines[0]
    assert sorted(wrong.rglob("*")) == before


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(ms.LanguageModel, "capture", broken)
    with pytest.raises(AssertionError, match="a bug"):
        main(["capture", "-m", str(model), "-p", "x"])


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ms.CaptureError("rows are missing"), 1, "rows are missing"),
        (ms.SelfTestError("norm(resid_post[3]) is not\nwhat arrives"), 1, "is not what arrives"),
        (OSError(28, "No space left on device", "a.safetensors"), 1, "a.safetensors: No space left on device"),
        (PermissionError(13, "Permission denied", "a.safetensors"), 2, "a.safetensors: Permission denied"),
        (MemoryError(), 1, "out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes_of_failed_work(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: Path, error: BaseException, code: int, words: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ms.LanguageModel, "capture", fails)
    done = run("capture", "-m", model, "-p", "x")
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert done.err.count("\n") == 1


def test_an_unwritable_directory_is_refused_before_the_model_loads(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    done = run("capture", "-m", "no/such/model", "-p", "x", "--out", tmp_path / "a.safetensors")
    assert done.code == 2
    assert "no right to write" in done.err


def test_warnings_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    import warnings

    whole = ms.LanguageModel.capture

    def warns(self: ms.LanguageModel, *args: Any, **kwargs: Any) -> ms.CaptureResult:
        warnings.warn("a layer\nis odd", stacklevel=1)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(ms.LanguageModel, "capture", warns)
    done = run("capture", "-m", model, "-p", "x", "--json")
    assert "midstream: warning: a layer is odd\n" in done.err


def test_libraries_are_silent_and_then_as_before(run: Run, model: Path) -> None:
    from transformers.utils import logging

    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        done = run("capture", "-m", model, "-p", "x", "--json")
        assert [line.split(":")[0] for line in done.err.splitlines()] == ["capturing"]
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


# --- as a process


def test_ctrl_c_ends_with_130_and_one_line(model: Path, tmp_path: Path) -> None:
    prompts = jsonl(tmp_path / "p.jsonl", *[{"text": "x" * 200}] * 2000)
    line = [*MIDSTREAM, "capture", "-m", str(model), "--prompts", str(prompts), "--max-tokens", "50"]
    out = tmp_path / "a.safetensors"
    process = subprocess.Popen(
        [*line, "--out", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # a shell lets what it runs in the background ignore the signal, and the tests may be that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (stdout, stderr) == ("", "midstream: interrupted\n")
    # where it came in the middle of an exec(), Python ends by the signal itself; shells say 130 of both
    assert process.returncode in (130, -signal.SIGINT)
    assert not out.exists()


def test_a_reader_that_leaves_is_no_error(acts: Path) -> None:
    process = subprocess.Popen(
        [*MIDSTREAM, "inspect", str(acts), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 1


# --- progress


def test_progress_without_a_terminal_is_one_line_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with token_progress() as show:
        show(10, 1500)
        show(1500, 1500)
        assert capsys.readouterr().err == ""
    line = capsys.readouterr().err
    assert line.startswith("capturing: 1,500 tokens in ")
    assert line.endswith(" tokens/s)\n")


def test_progress_of_nothing_and_of_a_failure_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with token_progress():
        pass

    def fails() -> None:
        with token_progress() as show:
            show(1, 2)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with token_progress("reading") as show:
        show(300, 1200)
        show(1200, 1200)
    text = terminal.getvalue()
    assert "reading" in text
    assert "1200/1200" in text
    assert "tokens/s" in text


# --- inspect


def test_inspect_shows_what_is_there(run: Run, acts: Path) -> None:
    done = run("inspect", acts)
    assert (done.code, done.err) == (0, "")
    for words in (
        "models/tiny",
        "8: 6 of prompts, 2 of what was generated",
        "prompt, generated",
        "2 values overflowed",
    ):
        assert words in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert ["resid_post", "0", "8", "×", "4", "float32"] in [line[:6] for line in lines]
    assert ["attn_out", "2", "8", "×", "4", "float32"] in [line[:6] for line in lines]
    assert "prompt 0, 5 rows:  <11> | <12> | <13> | <31> | <32>" in done.out


def test_inspect_as_json(run: Run, acts: Path) -> None:
    found = run("inspect", acts, "--json", "--layer", "2", "--site", "attn_out").json
    assert found["sites"] == {"attn_out": {"2": {"width": 4, "heads": 2, "head_size": 2}}}
    (norms,) = found["norms"]
    assert (norms["site"], norms["layer"], norms["rows"], norms["width"], norms["dtype"]) == (
        "attn_out", 2, 8, 4, "float32",
    )  # fmt: skip
    assert (found["prompts"], found["rows"], found["generated_rows"]) == (3, 8, 2)
    assert found["first_prompts"][1]["tokens"] == [{"position": 0, "id": 11, "text": "<11>"}]
    assert found["model_fingerprint"] == "f0f0"


def test_inspect_norms(run: Run, tmp_path: Path) -> None:
    capture = made(layers=(0,))
    rows = torch.zeros(8, 4)
    rows[:, 0] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 100])
    file = replace(capture, tensors={("resid_post", 0): rows}).save(tmp_path / "a.safetensors")
    (norms,) = run("inspect", file, "--json").json["norms"]
    assert (norms["median"], norms["max"]) == (4.5, 100.0)


def test_inspect_writes_a_page(run: Run, acts: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run("inspect", acts, "--heatmap", page, "--site", "resid_post", "--layer", "2")
    assert done.code == 0
    assert f"wrote {page}" in done.err
    assert page.read_text().startswith("<!doctype html>")


def test_inspect_of_a_hidden_states_file(run: Run, model: Path, wrong: Path) -> None:
    out = wrong / "hidden"
    run("capture", "-m", model, "-p", "abc", "--layers", "0,2", "--format", "vllm", "--out", out)
    ours = run("inspect", out / "sample-000000.safetensors", "--json").json
    assert ours["kind"].startswith("a hidden-states file")
    assert ours["sites"] == {
        "resid_post": {"0": {"width": HIDDEN, "heads": None, "head_size": None},
                       "2": {"width": HIDDEN, "heads": None, "head_size": None}},
    }  # fmt: skip
    theirs = run("inspect", wrong / "vllm.safetensors", "--layer-ids", "0,3", "--json").json
    assert [(one["site"], one["layer"]) for one in theirs["norms"]] == [("resid_pre", 0), ("resid_post", 2)]
    assert theirs["rows"] == 3
    assert run("inspect", wrong / "vllm.safetensors", "--layer-ids", "0,3").code == 0


# --- verify, demo, schema


def test_verify_of_a_model_that_is_right(run: Run, model: Path) -> None:
    done = run("verify", "--model", model, "-p", "hello there", "-p", "ok", "--max-tokens", "4")
    assert done.code == 0, done
    assert f"all {len(SITES) * LAYERS} hold" in done.err
    assert done.out.count("holds") == len(SITES) * LAYERS
    found = run("verify", "-m", model, "-p", "hello", "--json", "--layers", "1,2", "--site", "resid_post,k").json
    assert found["holds"] is True
    assert found["dtype"] == "float32"
    assert [(one["site"], one["layer"]) for one in found["parity"]] == [
        ("resid_post", 1), ("resid_post", 2), ("k", 1), ("k", 2),
    ]  # fmt: skip
    assert all(one["difference"] <= 1e-5 and one["cosine"] > 0.999999 for one in found["parity"])
    assert list(found["refused"]) == ["router_logits"]


def test_verify_in_bfloat16(run: Run, model: Path) -> None:
    done = run("verify", "--model", model, "--dtype", "bfloat16", "--site", "resid_post")
    assert done.code == 0, done
    assert "err p99" in done.out


def test_verify_of_captures_that_are_wrong(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from midstream.backends.huggingface.session import HuggingFaceSession

    whole = HuggingFaceSession.capture

    def one_row_late(self: HuggingFaceSession, *args: Any, **kwargs: Any) -> ms.CaptureResult:
        result = whole(self, *args, **kwargs)
        return replace(
            result, tensors={at: rows.roll(1, 0) if at[1] == 2 else rows for at, rows in result.tensors.items()}
        )

    monkeypatch.setattr(HuggingFaceSession, "capture", one_row_late)
    done = run("verify", "--model", model, "-p", "hello there", "--site", "resid_post,attn_out")
    assert done.code == 1
    assert "2 of 8 fall short of the reference: resid_post 2, attn_out 2" in done.err
    assert done.out.count("SHORT") == 2
    assert run("verify", "--model", model, "-p", "hello there", "--site", "resid_post", "--json").json["holds"] is False


def test_demo_twice(run: Run, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "demo"
    for _ in range(2):
        done = run("demo", "--model", model, "--out", out)
        assert done.code == 0, done
        assert sorted(path.name for path in out.iterdir()) == ["acts.safetensors", "heatmap.html", "heatmap.png"]
    head, _, first, *_ = [line for line in done.out.splitlines() if line.strip()]
    assert head.split() == ["prompt", "tokens", *(word for layer in range(LAYERS) for word in ("layer", str(layer)))]
    assert first.split()[-LAYERS:] == ["1.00"] * LAYERS
    assert f"midstream inspect {out / 'acts.safetensors'}" in done.err
    assert len(ms.CaptureResult.load(out / "acts.safetensors")) == 6
    assert (out / "heatmap.png").read_bytes().startswith(b"\x89PNG")


def test_schemas(run: Run, tmp_path: Path) -> None:
    whole = run("schema").json
    assert list(whole) == ["CaptureSpec", "SelectSpec", "InterventionSpec", "GenerationParams", "WireTensor"]
    one = run("schema", "SelectSpec").json
    assert one == whole["SelectSpec"]
    assert set(one["properties"]) == set(ms.SelectSpec.model_fields)
    assert one["additionalProperties"] is False
    assert run("schema", "--out", tmp_path / "schemas").code == 0
    written = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "schemas").iterdir()}
    assert written == whole
