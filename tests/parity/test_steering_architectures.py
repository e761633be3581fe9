"""Steered rows, tokens and scores are those of the specification's own forward, for every family and site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import midstream as ms
from midstream.taps.reference import reference
from parity.architectures import ARCHITECTURES, extra_inputs, prompt
from parity.oracle import FAMILIES as KNOWN
from parity.steered_forward import FAMILIES, Steered, steered_greedy, steered_scores

pytestmark = pytest.mark.filterwarnings("ignore:no row was selected")

TOKENS = 4
#: One prompt for each list of ops, longer and shorter than a sliding window.
LENGTHS = (6, 13, 1, 9, 12, 3, 8, 16, 5, 11)
OTHERS = [name for name in ARCHITECTURES if name in KNOWN and name not in FAMILIES]
#: Models whose caches cannot be decoded.
UNDECODED = {"mamba", "qwen3_next"}
#: Models whose own float32 is further from itself in a batch than the bound.
ROUNDING = {"qwen3_next": 10.0, "gemma4_moe": 10.0}

ALIGNED = {"measure": "cosine", "above": 0.0}

Ops = list[dict[str, Any]]


class Draw:
    """Arrays of normal numbers, each another."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> np.ndarray:
        return self._rng.normal(size=shape).astype(np.float32)


def op(kind: str, layers: list[int], **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "layers": layers, **fields}


def ops_of(one: Any) -> list[Ops]:
    """No ops, and ops of every kind and site that the model has, in lists that go together."""
    layouts, hidden, last = one.lm.session.taps.layouts, one.lm.facts.hidden_size, one.lm.facts.num_layers - 1
    draw, size, after = Draw(len(one.name)), layouts["head_out"][0].head_size, {"generation": "all"}
    flatter = np.eye(hidden, dtype=np.float32) * 0.7 + 0.05 * draw(hidden, hidden)
    thin = {"P": 0.1 * draw(2, hidden), "Q": draw(hidden, 2), "bias": draw(2)}
    late = {"prompt_window": [[1, None]], **after}
    ends = {"prompt_positions": [0, -1], **after}
    first = {"generation_window": [0, 2]}
    pooled = {
        "layers": [0, 1],
        "site": "mlp_out",
        "pooling": "last",
        "readout": {"kind": "cosine", "d": draw(2, hidden)},
        "rule": {"kind": "per_layer", "threshold": 0.0, "compare": "le", "combine": "any"},
    }
    found: dict[str, Ops] = {
        "plain": [],
        "stream": [
            op("rotate", [0, last], basis=draw(2, hidden), angle=2.0, mode="by"),
            op("affine", [1], matrix=flatter, bias=draw(hidden), strength=0.8, cap_norm=True, scope=late),
            op("low_rank", [last], **thin, strength=-1.5),
        ],
        "before": [
            op("add", [0, 2], site="resid_pre", vector=draw(2, hidden), strength=0.5, norm_match=True, scope=ends),
            op("clamp", [1], site="resid_pre", direction=draw(hidden), value=3.0),
            op("rotate", [2], basis=draw(2, hidden), angle=0.5, mode="to"),
        ],
        "positions": [
            op("add", [0, 1], vector=draw(2, 3, hidden), positions=[0, 4, 9], strength=2.0),
            op("replace", [1], site="mlp_out", vector=draw(hidden), strength=0.5, scope={"sequence_positions": [2, 7]}),
        ],
        "sublayers": [
            op("ablate", list(range(last + 1)), site="attn_out", directions=draw(2, hidden), strength=0.7),
            op("clamp", [0], site="mlp_out", direction=draw(hidden), value=-2.0, scope=after),
            op("add", [1], site="attn_out", vector=draw(hidden), strength=-1.5, only_aligned=ALIGNED),
            op("replace", [2], site="mlp_out", vector=draw(hidden), strength=0.4),
        ],
        "heads": [
            op("add", [0, last], site="head_out", heads=[0, 2], vector=draw(2, 2 * size), strength=2.0),
            op("ablate", [1], site="head_out", heads=[1], directions=draw(size)),
            op("replace", [2], site="head_out", heads=[3], vector=draw(size), scope={"prompt_window": [-3, None]}),
        ],
        "gated": gated(draw, hidden, last),
        "pooled": [
            op("add", [0], site="resid_pre", vector=draw(hidden), strength=1.0),
            op("rotate", [0, last], basis=draw(2, hidden), angle=1.0, mode="by", scope=first, gate=pooled),
        ],
    }
    if "router_logits" in layouts:
        scope = {"prompt": "all", "exclude_prompt_positions": [0], **after}
        found["router"] = [
            op("router", [0, 2], on=[1], off=[0, 3], scope=scope),
            op("router", [2], shift={"2": 1.5, "4": -2.0}),
        ]
    found["all"] = [ops[0] for ops in found.values() if ops]
    return list(found.values())


def gated(draw: Draw, hidden: int, last: int) -> Ops:
    """Two gates with opposite readouts, of which one opens: shallower and deeper than their evidence."""
    w = draw(2, hidden)
    gates = [
        {
            "layers": [0, 1],
            "site": "resid_post",
            "pooling": "mean",
            "readout": {"kind": "affine", "w": sign * w, "b": 0.0},
            "rule": {"kind": "sum"},
        }
        for sign in (1, -1)
    ]
    return [
        op("add", [0, last], vector=draw(hidden), strength=strength, gate=gate)
        for strength, gate in zip((2.0, -3.0), gates, strict=True)
    ]


@dataclass(frozen=True)
class Case:
    """One prompt, what is done to it, what comes of that, and a reference whose tokens are scored."""

    ids: list[int]
    spec: ms.InterventionSpec | None
    ops: Ops
    steered: Steered
    reference: list[int]


_CASES: dict[str, list[Case]] = {}


def cases_of(one: Any) -> list[Case]:
    if one.name not in _CASES:
        _CASES[one.name] = [
            Case(
                ids := prompt(one.name, length, seed=place),
                ms.InterventionSpec(ops=ops) if ops else None,
                ops,
                steered_greedy(one.name, one.model, ids, TOKENS, ops),
                prompt(one.name, TOKENS, seed=90 + place)[::-1],
            )
            for place, (length, ops) in enumerate(zip(LENGTHS, ops_of(one), strict=False))
        ]
    return _CASES[one.name]


def given(cases: list[Case]) -> tuple[list[list[int]], list[ms.InterventionSpec | None]]:
    return [case.ids for case in cases], [case.spec for case in cases]


def assert_same(tools: Any, got: Any, want: Any, what: str, bound: float = 1) -> None:
    """Every `(site, layer)` of `got` is that of `want`."""
    errors = {f"{key}": tools.worst(rows, torch.as_tensor(want[key])[: len(rows)]) for key, rows in got.items()}
    wrong = {key: f"{error:.3g}" for key, error in errors.items() if error > bound}
    assert not wrong, f"{what}: times the bound: {wrong}"


def sample_rows(cap: ms.CaptureResult, sample: int) -> dict[Any, torch.Tensor]:
    return {(site, layer): rows for site in cap.sites for layer, rows in cap.sample(sample, site).items()}


# --- the families of the oracle


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_prompts_are_the_oracles(name: str, tiny: Any, tools: Any) -> None:
    one = tiny(name)
    prompts, specs = given(cases := cases_of(one))
    cap = one.lm.capture(prompts, sites=one.sites, steering=specs)
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    for sample, case in enumerate(cases):
        assert_same(tools, sample_rows(cap, sample), case.steered.sites, f"{name} under {case.ops}")


@pytest.mark.parametrize("name", FAMILIES)
def test_generated_tokens_and_their_rows_are_the_oracles(name: str, tiny: Any, tools: Any) -> None:
    one = tiny(name)
    prompts, specs = given(cases := cases_of(one))
    made = one.lm.generate(prompts, max_tokens=TOKENS, steering=specs, ignore_eos=True)
    assert [list(done.token_ids) for done in made] == [case.steered.generated for case in cases]
    cap = one.lm.capture(prompts, sites=one.sites, max_tokens=TOKENS, steering=specs, ignore_eos=True)
    assert [done.token_ids for done in cap.outputs] == [done.token_ids for done in made]
    for sample, case in enumerate(cases):
        assert_same(tools, sample_rows(cap, sample), case.steered.sites, f"{name} under {case.ops}")
        for line in made[sample].steering:
            assert line.complete
            assert (line.skipped is None) == case.steered.gates.get(line.op, True), "the gate decided otherwise"
    opened = [list(case.steered.gates.values()) for case in cases if len(case.steered.gates) == 2]
    assert all(sorted(of) == [False, True] for of in opened)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_the_oracles(name: str, tiny: Any, tools: Any) -> None:
    one = tiny(name)
    prompts, specs = given(cases := cases_of(one))
    references = [case.reference for case in cases]
    scores = one.lm.score(prompts, references, steering=specs)
    want = [steered_scores(name, one.model, case.ids, case.reference, case.ops) for case in cases]
    assert tools.worst(scores, torch.tensor(np.stack(want))) <= 2
    apart = (scores - one.lm.score(prompts, references)).abs().amax(1)
    assert apart[0] < 1e-4
    assert (apart[1:] > 1e-3).all(), "some spec does not show"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_is_the_oracle(name: str, tiny: Any, tools: Any) -> None:
    one = tiny(name)
    taps = one.lm.session.taps
    for case in cases_of(one):
        logits: list[torch.Tensor] = []
        ids = [*case.ids, *case.steered.generated[:-1]]
        rows = reference(taps, ids, taps.sites, steering=case.spec, prompt_len=len(case.ids), logits=logits)
        assert_same(tools, rows, case.steered.sites, f"{name} under {case.ops}")
        assert tools.worst(logits[0], torch.from_numpy(case.steered.logits)) <= 2


# --- the other architectures


def other_specs(one: Any) -> list[ms.InterventionSpec | None]:
    """A spec for each site that the model has, at all its layers."""
    layouts, draw, last = one.lm.session.taps.layouts, Draw(len(one.name)), one.lm.facts.num_layers - 1
    hidden = one.lm.facts.hidden_size
    found: list[ms.InterventionSpec | None] = [None]
    found.append(
        ms.rotate(draw(2, hidden), layers=[0], angle=2.0, mode="by")
        + ms.add(draw(hidden), layers=[1, last], strength=0.7, rows="prompt[1:], generated")
    )
    for site in ("resid_pre", "attn_out", "mlp_out"):
        if site in layouts:
            layers = list(layouts[site])
            found.append(
                ms.ablate(draw(2, hidden), layers=layers, site=site, strength=0.8)
                + ms.clamp(draw(hidden), layers=layers[1:], value=1.0, site=site, rows="prompt[-1], generated")
            )
    if "head_out" in layouts:
        layers = list(layouts["head_out"])
        heads = {layer: draw(2 * layouts["head_out"][layer].head_size) for layer in layers[:1]}
        found.append(ms.add(heads, site="head_out", heads=[1, 3], strength=2.0))
    if "router_logits" in layouts:
        found.append(ms.router(layers=list(layouts["router_logits"]), on=[1], off=[0], shift={3: 1.0}))
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_the_reference(name: str, tiny: Any, tools: Any) -> None:
    """Rows of prompts and of what follows, the greedy tokens, and their scores."""
    one, bound = tiny(name), ROUNDING.get(name, 1)
    taps, specs = one.lm.session.taps, other_specs(one)
    texts = [prompt("", length, seed=place) for place, length in enumerate(LENGTHS[: len(specs)])]
    prompts: list[Any] = list(texts)
    inputs: list[dict[str, Any]] = [{} for _ in specs]
    if extra_inputs(name):
        texts[1], inputs[1] = prompt(name, 13), extra_inputs(name)
        prompts[1] = {"prompt_token_ids": texts[1], "multi_modal_data": inputs[1]}
    tokens = 1 if name in UNDECODED else TOKENS
    cap = one.lm.capture(prompts, sites=one.sites, max_tokens=tokens, steering=specs, ignore_eos=True)
    follows = [list(done.token_ids) for done in cap.outputs]
    if name in UNDECODED:
        follows = [prompt("", TOKENS, seed=70 + place)[1:] for place in range(len(specs))]
    scores = one.lm.score(prompts, follows, steering=specs)
    for sample, (ids, spec, after) in enumerate(zip(texts, specs, follows, strict=True)):
        logits: list[torch.Tensor] = []
        whole = [*ids, *after[:-1]]
        rows = reference(taps, whole, taps.sites, steering=spec, prompt_len=len(ids), logits=logits, **inputs[sample])
        assert_same(tools, sample_rows(cap, sample), rows, f"{name}, {spec}", bound)
        found = logits[0][len(ids) - 1 :]
        if tokens > 1:
            assert found.argmax(-1).tolist() == after
        want = found.log_softmax(-1).gather(1, torch.tensor(after)[:, None])[:, 0]
        assert tools.worst(scores[sample], want) <= 4 * bound
        for line in cap.outputs[sample].steering:
            assert line.complete


@pytest.mark.parametrize("name", sorted(UNDECODED))
def test_gated_scores_where_no_cache_can_be_kept(name: str, tiny: Any, tools: Any) -> None:
    """A gate is decided at the prompt's end, and shallower layers of the rows after it want it: right, or refused."""
    one, hidden = tiny(name), tiny(name).lm.facts.hidden_size
    draw = Draw(2)
    readout, rule = {"kind": "affine", "w": draw(hidden)}, {"kind": "sum", "bias": 1000.0}
    gate = {"layers": [1], "readout": readout, "rule": rule}
    spec = ms.add(draw(hidden), layers=[0, 2], strength=3.0, gate=gate)
    ids, after = prompt("", 9), prompt("", TOKENS, seed=71)[1:]
    try:
        scores = one.lm.score([ids], [after], steering=spec)
    except ms.UnsupportedOperationError as error:
        tools.one_line(str(error), "gate")
        return
    logits: list[torch.Tensor] = []
    reference(one.lm.session.taps, [*ids, *after[:-1]], {}, steering=spec, prompt_len=len(ids), logits=logits)
    want = logits[0][len(ids) - 1 :].log_softmax(-1).gather(1, torch.tensor(after)[:, None])[:, 0]
    assert tools.worst(scores[0], want) <= 4 * ROUNDING.get(name, 1)
