"""`midstream generate`, `score` and `capture --steer` on the real model, beside the library and beside no steering."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.cli import main
from midstream.formats.vectors import read_vectors, write_vectors

pytestmark = pytest.mark.real_model

PROMPT = "I think that the weather today is"
LINE = ("generate", "-m", "smollm2", "-p", PROMPT, "--max-tokens", "8")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def one(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return one


@pytest.fixture(scope="module")
def vector(smollm2: ms.LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A direction of the model's own: bad minus good words, at two layers."""
    sides = [
        smollm2.capture([f"This is {word}" for word in words], layers=[10, 15], rows="prompt[-1]")
        for words in (("terrible", "awful", "horrible"), ("wonderful", "great", "lovely"))
    ]
    found = {layer: sides[0].rows(layer).float().mean(0) - sides[1].rows(layer).float().mean(0) for layer in (10, 15)}
    return write_vectors(tmp_path_factory.mktemp("vectors") / "bad.safetensors", found, {"method": "of a test"})


def test_steered_text_differs_and_is_the_librarys(run: Run, smollm2: ms.LanguageModel, vector: Path) -> None:
    code, plain, words = run(*LINE)
    assert code == 0
    assert "‖change‖" not in words
    code, steered, words = run(*LINE, "--steer", vector, "--strength", "4")
    assert code == 0
    assert steered != plain
    assert "bad.safetensors × 4" in words
    (want,) = smollm2.generate([PROMPT], max_tokens=8, steering=ms.add(vector, strength=4.0))
    assert steered == f"{want.text}\n"


def test_the_report_is_strength_times_the_norms(run: Run, smollm2: ms.LanguageModel, vector: Path) -> None:
    code, printed, _ = run(*LINE, "--steer", vector, "--strength", "2", "--layers", "10", "--rows", "prompt", "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(printed)
    (receipt,) = found["receipt"]
    rows = smollm2.capture(PROMPT, layers=[10], rows="prompt", dtype="float32").rows(10)
    length = float(torch.from_numpy(read_vectors(vector).vectors[10].copy()).norm())
    assert (receipt["layer"], receipt["selected"], receipt["computed"]) == (10, len(rows), len(rows))
    assert receipt["relative"] == pytest.approx(float((2 * length / rows.norm(dim=-1)).mean()), rel=0.01)
    assert found["prompts"][0]["receipt"] == found["receipt"]


def test_strength_zero_is_plain_and_says_so(run: Run, vector: Path) -> None:
    _, plain, _ = run(*LINE)
    code, zero, words = run(*LINE, "--steer", vector, "--strength", "0")
    assert (code, zero) == (0, plain)
    assert "not applied: strength 0" in words


def test_generated_rows_alone_leave_the_first_token(run: Run, vector: Path) -> None:
    def ids(*more: str | Path) -> list[int]:
        return json.loads(run(*LINE, *more, "--json")[1])["prompts"][0]["generated"][0]["token_ids"]

    plain, late = ids(), ids("--steer", vector, "--strength", "8", "--rows", "generated")
    assert late[0] == plain[0]
    assert late != plain


def test_a_stream_is_the_same_text(run: Run, vector: Path) -> None:
    line = (*LINE, "--steer", vector, "--strength", "4")
    assert run(*line, "--stream")[1] == run(*line)[1]


def test_the_object_is_valid_and_can_be_used_again(run: Run, vector: Path, tmp_path: Path) -> None:
    line = (*LINE, "-p", "Why?", "--seed", "5", "--n", "2", "--logprobs", "1")
    code, printed, _ = run(*line, "--steer", vector, "--strength", "4", "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(printed)
    assert found["model"] == "smollm2"
    assert ms.GenerationParams.of(found["params"]).seed == 5
    assert ms.InterventionSpec.of({"ops": found["steering"]["ops"]}) == ms.add(vector, strength=4.0)
    assert len(found["prompts"]) == 2
    for prompt in found["prompts"]:
        receipts = [ms.OpReceipt(**one) for one in prompt["receipt"]]
        assert [one.layer for one in receipts] == [10, 15]
        assert all(one.complete and one.relative for one in receipts)
        assert [one["finish_reason"] in ("eos", "length") for one in prompt["generated"]] == [True, True]
    # the same spec, as a file of its own with its tensors in it
    spec = ms.add(vector, strength=4.0)
    whole = spec.canonical()
    whole["ops"][0]["vector"] = spec.artifacts()[whole["ops"][0]["vector"]].array.tolist()  # pyright: ignore
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(whole))
    again = json.loads(run(*line, "--steer", file, "--json")[1])
    assert again["prompts"] == found["prompts"]


def test_scores_with_and_without_steering(run: Run, smollm2: ms.LanguageModel, vector: Path) -> None:
    references = (" terrible.", " wonderful and sunny.")
    line = ("score", "-m", "smollm2", "-p", PROMPT, *(w for one in references for w in ("--reference", one)), "--json")
    plain = [one["sum"] for one in json.loads(run(*line)[1])["scores"]]
    code, printed, _ = run(*line, "--steer", vector, "--strength", "2")
    assert code == 0
    found = json.loads(printed)["scores"]
    assert (found[0]["sum"] - found[1]["sum"]) > (plain[0] - plain[1])  # towards the bad words
    for one, text in zip(found, references, strict=True):
        want = smollm2.score([PROMPT], [text], steering=ms.add(vector, strength=2.0))[0]
        assert one["logprobs"] == pytest.approx(want.tolist(), abs=0.1)  # bfloat16, in another batch
        assert "".join(one["texts"]) == text


def test_captured_rows_are_the_steered_ones(run: Run, smollm2: ms.LanguageModel, vector: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts.safetensors"
    line = ("capture", "-m", "smollm2", "-p", PROMPT, "--layers", "15,20", "--out", out, "--steer", vector)
    code, _, words = run(*line, "--strength", "4", "--steer-layers", "15", "--steer-rows", "prompt[-1]")
    assert code == 0
    assert "bad.safetensors × 4" in words
    found = ms.CaptureResult.load(out)
    want = smollm2.capture(
        PROMPT, layers=[15, 20], steering=ms.add(vector, layers=[15], strength=4.0, rows="prompt[-1]")
    )
    assert all(rows.equal(want.tensors[place]) for place, rows in found.tensors.items())
    assert found.steering[0] == want.steering[0]


def test_structured_output(run: Run, vector: Path) -> None:
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {
            "weather": {"enum": ["sunny", "rainy"]},
            "degrees": {"type": "integer", "minimum": 0, "maximum": 40},
        },
        "required": ["weather", "degrees"],
    }
    line = ("generate", "-m", "smollm2", "-p", PROMPT, "--max-tokens", "40", "--steer", vector, "--strength", "2")
    code, printed, _ = run(*line, "--json-schema", json.dumps(schema))
    assert code == 0
    found = json.loads(printed)
    assert found["weather"] in ("sunny", "rainy")
    assert found["degrees"] in range(41)
