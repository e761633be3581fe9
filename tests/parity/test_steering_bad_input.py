"""Steering, generation and scoring that cannot be done as asked are refused before the model runs, with a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstream as ms
from midstream.backends.huggingface.backend import HuggingFaceBackend
from midstream.core.backend import BackendSpec
from midstream.core.prompts import PreparedPrompt
from midstream.formats.artifacts import ArtifactRegistry
from parity.architectures import ARCHITECTURES

GOOD: Any = [[1, 5, 9], [1, 7]]
BAD, SITE, LAYER, ROWS = "E_BAD_PARAM", "E_SITE", "E_LAYER_RANGE", "E_SELECTION"
V: list[float] = [1.0, 2.0] * 32
W: list[float] = [1.0] * 64
ZERO: list[float] = [0.0] * 64
NAN = float("nan")
NOWHERE = f"sha256:{'7' * 64}"


def op(kind: str = "add", **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "layers": [1], **fields}


def gate(**fields: Any) -> dict[str, Any]:
    return {"layers": [0], "readout": {"kind": "affine", "w": W}, "rule": {"kind": "sum"}} | fields


#: Name → (an op, the error's code, its path below the op, what its line holds).
OPS: dict[str, tuple[Any, str, str, tuple[str, ...]]] = {
    "wrong width": (op(vector=W[:63]), BAD, ".vector", ("63", "64", "resid_post")),
    "wrong width of one": (op(vector=[W[:2]]), BAD, ".vector", ("2", "64")),
    "wrong rank": (op(vector=[[V, W]]), BAD, ".vector", ("[1, 2, 64]", "[width]")),
    "number": (op(vector=1.0), BAD, ".vector", ("[]", "[width]")),
    "other layers": (op(vector=[V, W]), BAD, ".vector", ("2 layers", "[1]")),
    "NaN": (op(vector=[NAN, *W[1:]]), BAD, ".vector", ("finite",)),
    "infinite": (op(vector=[1e39, *W[1:]]), BAD, ".vector", ("finite",)),
    "text": (op(vector="vector"), BAD, ".vector", ("sha256",)),
    "no vector": (op(), BAD, ".vector", ("required",)),
    "zero direction": (op("clamp", direction=ZERO, value=1.0), BAD, ".direction", ("zero",)),
    "zero among directions": (op("ablate", directions=[V, ZERO]), BAD, ".directions", ("zero",)),
    "zero to match": (op(vector=ZERO, norm_match=True), BAD, ".vector", ("zero",)),
    "colinear plane": (op("rotate", basis=[V, [-3 * x for x in V]], angle=1.0), BAD, ".basis", ("colinear",)),
    "plane of one": (op("rotate", basis=[V], angle=1.0), BAD, ".basis", ("two",)),
    "plane of another width": (op("rotate", basis=[V[:4], W[:4]], angle=1.0), BAD, ".basis", ("4", "64")),
    "matrix not square": (op("affine", matrix=[V, W]), BAD, ".matrix", ("square",)),
    "matrix of another width": (op("affine", matrix=np.eye(8)), BAD, ".matrix", ("8", "64")),
    "bias of another width": (op("affine", matrix=np.eye(64), bias=W[:8]), BAD, ".bias", ("8", "64")),
    "two ranks": (op("low_rank", P=[V], Q=np.ones((64, 2))), BAD, ".Q", ("[64, 2]",)),
    "low rank of another width": (op("low_rank", P=[W[:8]], Q=np.ones((8, 1))), BAD, ".P", ("8", "64")),
    "unknown head": (op(site="head_out", heads=[1, 4], vector=W[:32]), BAD, ".heads", ("4", "0 to 3")),
    "negative head": (op(site="head_out", heads=[-1], vector=W[:16]), BAD, ".heads[0]", ("-1",)),
    "width of other heads": (op(site="head_out", heads=[1, 2], vector=W), BAD, ".vector", ("64", "32", "heads")),
    "no heads": (op(site="head_out", vector=W), BAD, ".heads", ("heads",)),
    "heads elsewhere": (op(heads=[1], vector=W), BAD, ".heads", ("resid_post", "head_out")),
    "site that it has not": ({"kind": "router", "layers": [1], "on": [0]}, SITE, ".site", ("router_logits", "experts")),
    "site of another kind": (op("rotate", site="attn_out", basis=[V, W], angle=1.0), SITE, ".site", ("resid_post",)),
    "site that is read alone": (op(site="q", vector=W), SITE, ".site", ("resid_post", "q")),
    "site typo": (op(site="resid_pst", vector=W), SITE, ".site", ("resid_pst", "resid_post")),
    "layer beyond": (op(layers=[1, 3], vector=W), LAYER, ".layers[1]", ("3", "0 to 2")),
    "layer negative": (op(layers=[-1], vector=W), LAYER, ".layers[0]", ("-1",)),
    "no layers": (op(layers=[], vector=W), LAYER, ".layers", ("empty",)),
    "kind": (op("ad", vector=W), "E_UNKNOWN_KIND", ".kind", ("ad", "add", "ablate")),
    "field": (op(vector=W, strenght=2.0), "E_UNKNOWN_FIELD", ".strenght", ("strenght", "strength")),
    "strength NaN": (op(vector=W, strength=NAN), BAD, ".strength", ("nan",)),
    "strength text": (op(vector=W, strength="4"), BAD, ".strength", ("'4'",)),
    "ablation over 1": (op("ablate", directions=V, strength=1.5), BAD, ".strength", ("1.5",)),
    "norm_match of a sublayer": (op(site="mlp_out", vector=W, norm_match=True), BAD, ".norm_match", ("mlp_out",)),
    "positions of one vector": (op(positions=[1, 2], vector=W), BAD, ".vector", ("[64]", "[n, width]")),
    "positions of three": (op(positions=[1, 2], vector=[V, W, V]), BAD, ".vector", ("3 rows", "2 positions")),
    "positions twice": (op(positions=[1, 1], vector=[V, W]), BAD, ".positions", ("each once",)),
    "positions negative": (op(positions=[-1], vector=[V]), BAD, ".positions", ("-1",)),
    "scope typo": (op(vector=W, scope="promt"), ROWS, ".scope", ("promt", "prompt[-1]")),
    "scope negative": (op(vector=W, scope="generated[-1]"), ROWS, ".scope.generation_positions", ("-1",)),
    "gate before its prompt": (op(vector=W, gate=gate(), scope="prompt"), ROWS, ".scope", ("prompt[-1]",)),
    "gate below its evidence": (
        op(vector=W, gate=gate(layers=[1]), scope="prompt[-1]"), ROWS, ".scope", ("evidence", "layer 1"),
    ),
    "gate layer": (op(vector=W, gate=gate(layers=[0, 5])), LAYER, ".gate.layers[1]", ("5", "0 to 2")),
    "gate site": (op(vector=W, gate=gate(site="head_out")), SITE, ".gate.site", ("head_out", "resid_post")),
    "gate width": (
        op(vector=W, gate=gate(readout={"kind": "affine", "w": [1.0]})), BAD, ".gate.readout.w", ("1", "64"),
    ),
    "gate rule": (op(vector=W, gate=gate(rule={"kind": "per_layer"})), BAD, ".gate.rule.threshold", ("threshold",)),
    "artifact missing": (op(vector=NOWHERE), "E_ARTIFACT_MISSING", ".vector", (NOWHERE, "put")),
    "gate's artifact missing": (
        *(op(vector=W, gate=gate(readout={"kind": "affine", "w": NOWHERE})), "E_ARTIFACT_MISSING"),
        *(".gate.readout.w", (NOWHERE, "put")),
    ),
}  # fmt: skip


def asked(lm: ms.LanguageModel, steering: Any) -> dict[str, Any]:
    """Name → a call with this steering for the second of two prompts, and one for a single prompt."""
    each = [None, steering]
    return {
        "steering[1]": lambda: lm.generate(GOOD, max_tokens=2, steering=each),
        "steering[1] ": lambda: lm.capture(GOOD, steering=each),
        "steering[1]  ": lambda: lm.capture(GOOD, max_tokens=2, steering=each),
        "steering[1]   ": lambda: lm.score(GOOD, [[3, 4], [5, 6]], steering=each),
        "steering[1]    ": lambda: lm.generate(GOOD, max_tokens=2, steering=each, extra={"num_beams": 2}),
        "steering": lambda: lm.stream(GOOD[0], max_tokens=2, steering=steering),
    }


def refused(call: Any, one: Any, tools: Any, code: str, path: str | None, *parts: str) -> None:
    """A call raises, in one line, before any token is embedded, and nothing stays behind."""
    with tools.calls(one.model.model.embed_tokens) as seen, pytest.raises(ms.SpecError) as caught:
        call()
    assert seen == [], "the model ran"
    error = caught.value
    assert (error.code, error.path) == (code, error.path if path is None else path), str(error)
    assert str(error) == f"{error.code} at {error.path}: {error.message}"
    assert isinstance(error, ms.UnsupportedOperationError) == (code in ("E_UNKNOWN_KIND", "E_SITE", "E_CONSTRAINT"))
    tools.one_line(str(error), *parts)
    assert len(str(error)) < 600
    assert tools.hook_count(one.model) == 0


@pytest.mark.parametrize("name", OPS)
def test_specs_are_refused_by_every_entry(name: str, tiny: Any, tools: Any) -> None:
    one, (wrong, code, below, parts) = tiny("llama"), OPS[name]
    good = op(vector=V)
    for root, call in asked(one.lm, {"ops": [good, wrong]}).items():
        refused(call, one, tools, code, f"{root.strip()}.ops[1]{below}", *parts)


def test_a_call_may_follow_one_that_was_refused(tiny: Any) -> None:
    one = tiny("llama")
    want = one.lm.generate(GOOD, max_tokens=2, steering={"ops": [op(vector=V)]})
    for name in ("wrong width", "unknown head", "artifact missing", "kind"):
        with pytest.raises(ms.SpecError):
            one.lm.generate(GOOD, max_tokens=2, steering={"ops": [OPS[name][0]]})
    assert one.lm.generate(GOOD, max_tokens=2, steering={"ops": [op(vector=V)]}) == want


def test_experts_that_are_none(tiny: Any, tools: Any) -> None:
    one = tiny("qwen3_moe")
    for fields, code, below, parts in (
        ({"on": [6]}, BAD, ".on", ("6", "0 to 5")),
        ({"shift": {9: 1.0}}, BAD, ".shift", ("9", "0 to 5")),
        ({"layers": [0, 1], "on": [1]}, LAYER, ".layers[1]", ("1", "0, 2, 3")),
    ):
        wrong = {"ops": [{"kind": "router", "layers": [0], **fields}]}
        for root, call in asked(one.lm, wrong).items():
            refused(call, one, tools, code, f"{root.strip()}.ops[0]{below}", *parts)


def test_a_site_that_an_architecture_refuses_says_why(tiny: Any, tools: Any) -> None:
    one = tiny("deepseek_v3")
    wrong = {"ops": [op(site="head_out", heads=[0], vector=W[:12])]}
    for root, call in asked(one.lm, wrong).items():
        refused(call, one, tools, SITE, f"{root.strip()}.ops[0].site", one.lm.capabilities.refused["head_out"])


#: Name → (what is given as steering, the code, the path, what the line holds).
STEERING: dict[str, tuple[Any, str, str, tuple[str, ...]]] = {
    "too few": ([None], BAD, "steering", ("1", "2")),
    "too many": ([None, None, False], BAD, "steering", ("3", "2")),
    "text": ("add", BAD, "steering", ("str",)),
    "True": (True, BAD, "steering", ("bool",)),
    "number": ([None, 4.0], BAD, "steering[1]", ("float",)),
    "no ops": ({"ops": []}, BAD, "steering.ops", ("one or more",)),
    "no field": ({}, BAD, "steering.ops", ("required",)),
    "two fields": ({"ops": [op(vector=W)], "strength": 2}, "E_UNKNOWN_FIELD", "steering.strength", ("ops",)),
    "op that is none": ([[op(vector=W), 3], None], BAD, "steering[0].ops[1]", ("kind", "3")),
}


@pytest.mark.parametrize("name", STEERING)
def test_what_is_no_steering(name: str, tiny: Any, tools: Any) -> None:
    one, (given, code, path, parts) = tiny("llama"), STEERING[name]
    refused(lambda: one.lm.generate(GOOD, max_tokens=2, steering=given), one, tools, code, path, *parts)
    refused(lambda: one.lm.capture(GOOD, steering=given), one, tools, code, path, *parts)
    refused(lambda: one.lm.score(GOOD, [5, 6], steering=given), one, tools, code, path, *parts)


#: Name → (a constructor's call, its code, its path).
CONSTRUCTORS: dict[str, tuple[Any, str, str]] = {
    "no layers": (lambda: ms.add(W), LAYER, "add.layers"),
    "layer of a mapping": (lambda: ms.add({0: W}, layers=[1]), LAYER, "add.layers[0]"),
    "NaN": (lambda: ms.add([NAN], layers=[0]), BAD, "add.vector"),
    "NaN at a layer": (lambda: ms.add({0: W, 2: [NAN]}), BAD, "add.vector[2]"),
    "shapes by layer": (lambda: ms.add({0: W, 2: W[:3]}), BAD, "add.vector"),
    "empty": (lambda: ms.replace([], layers=[0]), BAD, "replace.vector"),
    "zero": (lambda: ms.clamp(ZERO, layers=[0], value=1.0), BAD, "clamp.direction"),
    "zero of several": (lambda: ms.ablate({0: W, 1: ZERO}), BAD, "ablate.directions[1]"),
    "colinear": (lambda: ms.rotate([V, V], layers=[0], angle=1.0), BAD, "rotate.basis"),
    "mode": (lambda: ms.rotate([V, W], layers=[0], angle=1.0, mode="til"), BAD, "rotate.mode"),
    "strength": (lambda: ms.ablate(W, layers=[0], strength=-0.1), BAD, "ablate.strength"),
    "rows": (lambda: ms.add(W, layers=[0], rows="promt"), ROWS, "add.rows"),
    "no experts": (lambda: ms.router(layers=[0]), BAD, "router.on"),
    "site": (lambda: ms.add(W, layers=[0], site="k"), SITE, "add.site"),
    "no function": (lambda: ms.function(3, layers=[0]), BAD, "function.fn"),
    "no file": (lambda: ms.add("no-such-file.safetensors"), "FileNotFoundError", ""),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_refuse_what_needs_no_model(name: str, tools: Any) -> None:
    call, code, path = CONSTRUCTORS[name]
    with pytest.raises((ms.MidstreamError, OSError)) as caught:
        call()
    if isinstance(caught.value, ms.SpecError):
        assert (caught.value.code, caught.value.path) == (code, path), str(caught.value)
    else:
        assert code == "FileNotFoundError"
    tools.one_line(str(caught.value))


# --- artifacts on disk


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """A llama from a folder, whose artifacts are in a registry of the test's own."""
    ARCHITECTURES["llama"]().save_pretrained(tmp_path / "llama")
    registry = ArtifactRegistry(tmp_path / "artifacts")
    backend = HuggingFaceBackend(BackendSpec("huggingface", str(tmp_path / "llama")), registry=registry)
    with ms.LanguageModel(backend) as lm:
        yield lm, registry, backend


def test_artifacts_are_fetched_and_every_read_is_checked(stored: Any, tools: Any) -> None:
    lm, registry, backend = stored
    one = type("One", (), {"model": lm.session.model})
    held = registry.put(V)
    spec = {"ops": [op(vector=held)]}
    want = [done.token_ids for done in lm.generate(GOOD, max_tokens=3, steering=ms.add(V, layers=[1]))]
    assert [done.token_ids for done in lm.generate(GOOD, max_tokens=3, steering=spec)] == want
    for wrong, parts in ((registry.put(W[:5]), ("5", "64")), (registry.put([V, W]), ("2 layers",))):
        for root, call in asked(lm, {"ops": [op(vector=wrong)]}).items():
            refused(call, one, tools, BAD, f"{root.strip()}.ops[0].vector", *parts)
    zero = registry.put(ZERO)
    for root, call in asked(lm, {"ops": [op("clamp", direction=zero, value=0.0)]}).items():
        refused(call, one, tools, BAD, f"{root.strip()}.ops[0].direction", "zero")
    data = registry.get_bytes(held)
    file = next(file for file in registry.directory.iterdir() if held.removeprefix("sha256:") in file.name)
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for root, call in asked(lm, spec).items():
        refused(call, one, tools, "E_ARTIFACT_HASH", f"{root.strip()}.ops[0].vector", held, "altered")
    file.unlink()
    for root, call in asked(lm, spec).items():
        refused(call, one, tools, "E_ARTIFACT_MISSING", f"{root.strip()}.ops[0].vector", held)
    backend.stage_artifacts({held: data})
    assert [done.token_ids for done in lm.generate(GOOD, max_tokens=3, steering=spec)] == want


# --- generation and scoring

LONG = ms.add(np.ones((12_000, 64), dtype=np.float32), layers=[1], positions=range(10_000, 22_000))


def test_a_spec_too_large_is_refused_by_every_entry(tiny: Any, tools: Any) -> None:
    one = tiny("llama")
    refused(LONG.canonical_json, one, tools, "E_SPEC_TOO_LARGE", "steering", "65,536")
    for call in asked(one.lm, LONG).values():
        refused(call, one, tools, "E_SPEC_TOO_LARGE", None)


def scored(lm: ms.LanguageModel, params: Any = None, output: Any = ()) -> Any:
    return lm.session.score([ms.ScoringItem(PreparedPrompt((1, 5)), (6, 7), (), output)], params)


PARAMS = ms.GenerationParams
#: Name → (the call on a LanguageModel, the code, the path, what the line holds).
CALLS: dict[str, tuple[Any, str, str | None, tuple[str, ...]]] = {
    "greedy and warm": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, greedy=True, temperature=0.5), BAD),
        *("generation.temperature", ("greedy", "0.5")),
    ),
    "stop without a tokenizer": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, stop="."), BAD),
        *("generation.stop", ("tokenizer", "stop_token_ids")),
    ),
    "stop of a stream": (lambda lm: lm.stream(GOOD[0], max_tokens=2, stop=["."]), BAD, "generation.stop", ()),
    "option typo": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, temperatur=1.0), "E_UNKNOWN_FIELD"),
        *("generation.temperatur", ("temperature",)),
    ),
    "no tokens": (lambda lm: lm.generate(GOOD, max_tokens=0), BAD, "generation.max_tokens", ("0",)),
    "n with a stream": (
        *(lambda lm: lm.stream(GOOD[0], max_tokens=2, n=2, seed=1), "E_UNKNOWN_KIND"),
        *("generation.n", ("generate",)),
    ),
    "extra with a stream": (
        *(lambda lm: lm.stream(GOOD[0], max_tokens=2, extra={"num_beams": 2}), "E_UNKNOWN_KIND"),
        *("generation.extra", ("generate",)),
    ),
    "extra with a capture": (
        *(lambda lm: lm.capture(GOOD, max_tokens=2, extra={"num_beams": 2}), "E_UNKNOWN_KIND"),
        *("generation.extra", ("generate",)),
    ),
    "two prompts of a stream": (lambda lm: lm.stream(GOOD, max_tokens=2), BAD, "prompt", ("2", "generate")),
    "layers of a stream": (lambda lm: lm.stream(GOOD[0], max_tokens=2, layers=[3]), LAYER, None, ("3", "0 to 2")),
    "rows of a stream": (lambda lm: lm.stream(GOOD[0], max_tokens=2, rows="promt"), ROWS, "rows", ("promt",)),
    "ids in extra": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, extra={"input_ids": [[1]]}), BAD),
        *("generation.extra.input_ids", ("midstream",)),
    ),
    "logprobs with extra": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, logprobs=1, extra={"num_beams": 2}), "E_UNKNOWN_KIND"),
        *("generation.logprobs", ("generate",)),
    ),
    "constraint without a tokenizer": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, constraint={"regex": "a"}), "E_CONSTRAINT"),
        *("generation.constraint.regex", ("tokenizer",)),
    ),
    "constraint of no kind": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, constraint={"regexp": "a"}), "E_CONSTRAINT"),
        *("generation.constraint", ("regexp", "json_schema")),
    ),
    "ignore_eos with a constraint": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, constraint={"regex": "a"}, ignore_eos=True), "E_CONSTRAINT"),
        *("generation.ignore_eos", ("EOS",)),
    ),
    "two constraints": (
        lambda lm: lm.session.generate(
            [ms.GenerationItem(PreparedPrompt((1, 5)), (), [ms.ConstraintEntry({"regex": "a"})])],
            PARAMS(max_tokens=2, constraint={"regex": "b"}),
        ),
        *("E_CONSTRAINT", "output_entries", ("2 constraints",)),
    ),
    "references of different length": (
        *(lambda lm: lm.score(GOOD, [[5, 6], [5]]), BAD),
        *("references", ("reference 1", "1", "2")),
    ),
    "score with a constraint": (
        *(lambda lm: scored(lm, output=[ms.ConstraintEntry({"regex": "a"})]), "E_CONSTRAINT"),
        *("items[0].output_entries", ("score",)),
    ),
    "score with a temperature": (
        *(lambda lm: scored(lm, PARAMS(temperature=1.0)), "E_UNKNOWN_KIND"),
        *("generation.temperature", ("samples nothing",)),
    ),
}

#: As above: what is refused later than it should be, or not at all.
LATE: dict[str, tuple[Any, str, str | None, tuple[str, ...]]] = {
    "unknown extra": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, extra={"num_beems": 2}), "E_UNKNOWN_FIELD"),
        *("generation.extra.num_beems", ()),
    ),
    "unknown extra of a score": (
        *(lambda lm: lm.score(GOOD, [5, 6], extra={"num_beems": 2}), "E_UNKNOWN_FIELD"),
        *("generation.extra.num_beems", ()),
    ),
    "mask in extra of a score": (
        *(lambda lm: lm.score(GOOD, [5, 6], extra={"attention_mask": [[1]]}), BAD),
        *("generation.extra.attention_mask", ()),
    ),
    "choices in extra": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, extra={"num_beams": 2, "num_return_sequences": 2}), BAD),
        *("generation.extra.num_return_sequences", ()),
    ),
    "tokens in extra": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, extra={"max_new_tokens": 5}), BAD),
        *("generation.extra.max_new_tokens", ()),
    ),
    "processors in extra": (
        *(lambda lm: lm.generate(GOOD, max_tokens=2, extra={"logits_processor": []}), BAD),
        *("generation.extra.logits_processor", ()),
    ),
}


@pytest.mark.parametrize("name", [*CALLS, *LATE])
def test_calls_are_refused_before_the_model_runs(name: str, tiny: Any, tools: Any) -> None:
    one, (call, code, path, parts) = tiny("llama"), (CALLS | LATE)[name]
    refused(lambda: call(one.lm), one, tools, code, path, *parts)


def test_references_that_the_model_cannot_read(tiny: Any, tools: Any) -> None:
    one = tiny("llama")
    wrong: list[tuple[Any, tuple[str, ...]]] = [
        ([[5, 160], [5, 6]], ("160", "159")),
        ([[5, 6]], ("1 references", "2 prompts")),
        ([[5, 6], "text"], ("reference 1", "tokenizer")),
        ([[5, 6], [5, -1]], ("reference 1", "-1")),
        ([[1] * 300] * 2, ("256",)),
        (None, ("None",)),
    ]
    for references, parts in wrong:
        with tools.calls(one.model.model.embed_tokens) as seen, pytest.raises(ms.PromptError) as caught:
            one.lm.score(GOOD, references)
        tools.one_line(str(caught.value), *parts)
        assert seen == []
