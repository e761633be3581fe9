"""The steerer against the row-by-row reference and an independent oracle, under any batch and schedule."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midstream.core.binding import BoundOp, bind
from midstream.core.errors import CaptureError
from midstream.core.interventions import Function, InterventionSpec, acts_on
from midstream.core.sites import Site, SiteLayout
from midstream.taps.reference_ops import ReferenceSteering
from midstream.taps.steerer import Steerer
from midstream.taps.step import Run, step_of, whole_sequence
from parity import intervention_oracle as oracle

CPU = torch.device("cpu")
LAYERS = (0, 1, 2)
HIDDEN, HEADS, HEAD_SIZE, EXPERTS = 6, 3, 4, 5
LAYOUTS: dict[Site, dict[int, SiteLayout]] = {
    "resid_pre": dict.fromkeys(LAYERS, SiteLayout(HIDDEN)),
    "resid_post": dict.fromkeys(LAYERS, SiteLayout(HIDDEN)),
    "attn_out": dict.fromkeys(LAYERS, SiteLayout(HIDDEN)),
    "mlp_out": dict.fromkeys(LAYERS, SiteLayout(HIDDEN)),
    "head_out": dict.fromkeys(LAYERS, SiteLayout(HEADS * HEAD_SIZE, HEADS, HEAD_SIZE)),
    "router_logits": dict.fromkeys(LAYERS, SiteLayout(EXPERTS)),
}
#: The order in which a model's sites fire.
ORDER: tuple[Site, ...] = ("resid_pre", "head_out", "attn_out", "router_logits", "mlp_out", "resid_post")
SCOPES = [None, "prompt", "generated", "prompt[-1]", "sequence[2:5]", "generated{1,2}", "sequence, !prompt[0]"]
KINDS = ("add", "ablate", "clamp", "replace", "rotate", "affine", "low_rank", "router")


def bound(spec: InterventionSpec) -> tuple[BoundOp, ...]:
    def fetch(artifact: str, path: str) -> Any:
        raise AssertionError(f"{path} asked for {artifact}")

    return bind(spec, LAYOUTS, {}, fetch)


def random_op(random: Random, kind: str) -> dict[str, Any]:
    """An op as a caller may write it."""
    rng = np.random.default_rng(random.randrange(2**32))
    site: str = "router_logits" if kind == "router" else "resid_post"
    layers = sorted(random.sample(LAYERS, random.randint(1, 3)))
    op: dict[str, Any] = {"kind": kind, "layers": layers, "scope": random.choice(SCOPES)}
    if kind in ("add", "ablate", "clamp", "replace"):
        site = random.choice(["resid_post", "resid_pre", "attn_out", "mlp_out", "head_out"])
    op["site"] = site
    width = HIDDEN
    if site == "head_out":
        op["heads"] = sorted(random.sample(range(HEADS), random.randint(1, HEADS)))
        width = len(op["heads"]) * HEAD_SIZE

    def tensor(*shape: int) -> Any:
        lead = (len(layers),) if random.random() < 0.4 else ()
        return rng.normal(size=(*lead, *shape)).astype(np.float32)

    strength = random.choice([1.0, 0.0, -2.5, 0.3])
    if kind in ("add", "replace"):
        op["strength"] = strength
        if random.random() < 0.4:
            op["positions"] = sorted(random.sample(range(8), random.randint(1, 4)))
            op["vector"] = tensor(len(op["positions"]), width)
        else:
            op["vector"] = tensor(width)
        if kind == "add" and site in ("resid_post", "resid_pre"):
            op["norm_match"] = random.random() < 0.5
    elif kind == "ablate":
        op |= {"directions": tensor(random.randint(1, 3), width), "strength": random.choice([0.0, 0.5, 1.0])}
    elif kind == "clamp":
        op |= {"direction": tensor(width), "value": rng.normal()}
    elif kind == "rotate":
        op |= {"basis": tensor(2, width), "angle": rng.normal() * 3, "mode": random.choice(["to", "by"])}
    elif kind == "affine":
        op |= {"matrix": tensor(width, width), "bias": tensor(width), "strength": strength}
    elif kind == "low_rank":
        lead = (len(layers),) if random.random() < 0.4 else ()
        shapes = {"P": (2, width), "Q": (width, 2), "bias": (2,)}
        op |= {name: rng.normal(size=(*lead, *shape)).astype(np.float32) for name, shape in shapes.items()}
        op["strength"] = strength
    else:
        op |= {"on": random.sample(range(EXPERTS), random.randint(0, 2)), "off": random.sample(range(EXPERTS), 1)}
        op["shift"] = {str(expert): float(rng.normal()) for expert in random.sample(range(EXPERTS), 2)}
    if kind != "router":
        op["cap_norm"] = random.random() < 0.3
    one = np.asarray(op.get("directions", np.zeros((1, 1)))).shape[-2] == 1
    if random.random() < 0.3 and (kind in ("add", "clamp") or (kind == "ablate" and one)):
        op["only_aligned"] = {"measure": random.choice(["cosine", "projection"]), "above": 0.1}
    if kind != "router" and random.random() < 0.25:
        rule = random.choice([{"kind": "sum", "bias": 0.05}, {"kind": "per_layer", "threshold": 0.0, "combine": "all"}])
        readout = random.choice(
            [
                {"kind": "affine", "w": rng.normal(size=HIDDEN), "b": 0.1},
                {"kind": "cosine", "d": rng.normal(size=HIDDEN)},
            ]
        )
        op["gate"] = {
            "layers": sorted(random.sample(LAYERS[:2], random.randint(1, 2))),
            "pooling": random.choice(["mean", "last"]),
            "readout": readout,
            "rule": rule,
        }
        op["scope"] = random.choice([None, "generated", "generated{1,2}"])
    return op


@dataclass
class Request:
    """One request's ids, rows and spec."""

    ids: list[int]
    prompt_len: int
    spec: InterventionSpec | None
    rows: dict[tuple[Site, int], np.ndarray]


def random_sequence(random: Random, kinds: tuple[str, ...], dtype: torch.dtype) -> Request:
    length = random.randint(2, 9)
    prompt_len = random.randint(1, length)
    rng = np.random.default_rng(random.randrange(2**32))
    ops = [random_op(random, random.choice(kinds)) for _ in range(random.randint(0, 4))]
    rows = {
        (site, layer): torch.tensor(rng.normal(size=(length, of.width)) * 3).to(dtype).double().numpy()
        for site, layers in LAYOUTS.items()
        for layer, of in layers.items()
    }
    ids = [random.randrange(4) for _ in range(length)]
    return Request(ids, prompt_len, InterventionSpec(ops=ops) if ops else None, rows)


def run(sequences: list[Request], random: Random, dtype: torch.dtype) -> tuple[list[dict[Any, np.ndarray]], Any]:
    """All sequences through one steerer, prompts in one piece each, the rest in pieces, with padding between."""
    steerer = Steerer([() if one.spec is None else bound(one.spec) for one in sequences])
    done = [0] * len(sequences)
    out = [{key: np.zeros_like(rows) for key, rows in one.rows.items()} for one in sequences]
    while any(count < len(one.ids) for count, one in zip(done, sequences, strict=True)):
        runs: list[Run] = []
        place = random.randint(0, 2)
        for index, one in enumerate(sequences):
            if done[index] == len(one.ids) or random.random() < 0.3:
                continue
            count = one.prompt_len if not done[index] else random.randint(1, len(one.ids) - done[index])
            ids = one.ids[done[index] : done[index] + count]
            runs.append(Run(index, place, done[index], ids, one.prompt_len))
            place += count + random.randint(0, 2)
        if not runs:
            continue
        steerer.begin(step_of(runs, place), CPU)
        for layer in LAYERS:
            for site in ORDER:
                width = LAYOUTS[site][layer].width
                values = torch.full((place, width), 7.0, dtype=dtype)
                for part in runs:
                    rows = sequences[part.request].rows[site, layer]
                    these = rows[part.position : part.position + len(part.token_ids)]
                    values[part.row : part.row + len(part.token_ids)] = torch.tensor(these).to(dtype)
                before = values.clone()
                changed = steerer.steer(site, layer, values) if layer in steerer.sites.get(site, ()) else None
                assert torch.equal(values, before), "changed in place"
                after = values if changed is None else changed
                assert (after.dtype, after.shape) == (dtype, values.shape)
                owned = np.zeros(place, dtype=bool)
                for part in runs:
                    at = slice(part.row, part.row + len(part.token_ids))
                    owned[at] = True
                    to = slice(part.position, part.position + len(part.token_ids))
                    out[part.request][site, layer][to] = after[at].double().numpy()
                assert torch.equal(after[~owned], before[~owned]), "padding was steered"
        steerer.end()
        for part in runs:
            done[part.request] += len(part.token_ids)
    return out, steerer.finish([(one.ids, one.prompt_len) for one in sequences])


def expected(one: Request, dtype: torch.dtype) -> tuple[dict[Any, np.ndarray], dict[int, bool]]:
    """The reference's rows of one sequence by itself, and what its gates decided."""
    if one.spec is None:
        return one.rows, {}
    table = whole_sequence(one.ids, one.prompt_len)
    decisions: dict[int, bool] = {}
    for _ in [op for op in one.spec.ops if op.gate] or [None]:
        steering = ReferenceSteering(one.spec, table, decisions)
        rows = {}
        for layer in LAYERS:
            for site in ORDER:
                values = one.rows[site, layer]
                rows[site, layer] = steering.steer(site, layer, values, LAYOUTS[site][layer])
        decisions = steering.decide()
    steering = ReferenceSteering(one.spec, table, decisions)
    return {
        (site, layer): steering.steer(site, layer, one.rows[site, layer], LAYOUTS[site][layer])
        for layer in LAYERS
        for site in ORDER
    }, decisions


def check(random: Random, kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    sequences = [random_sequence(random, kinds, dtype) for _ in range(random.randint(1, 4))]
    out, receipts = run(sequences, random, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for one, rows, receipt in zip(sequences, out, receipts, strict=True):
        want, decisions = expected(one, dtype)
        for key, values in want.items():
            scale = np.abs(values).max() + 1
            np.testing.assert_allclose(rows[key], values, atol=tolerance * scale, err_msg=f"{key} {one.spec}")
        for line in receipt:
            assert one.spec is not None
            op = one.spec.ops[line.op]
            open_ = op.gate is None or decisions[line.op]
            due = acts_on(op, whole_sequence(one.ids, one.prompt_len), line.layer).sum()
            assert line.selected == line.computed == (due if open_ and not op.silent else 0)
            assert (line.skipped is None) == (open_ and not op.silent)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_each_kind_equals_its_reference(kind: str, seed: int) -> None:
    """Random rows, scopes, positions, modifiers and gates, in random batches: equal to the twin row by row."""
    check(Random(seed), (kind,), torch.float32)


@given(seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=60, deadline=None)
def test_specs_of_many_kinds_in_one_batch(seed: int, dtype: torch.dtype) -> None:
    """Requests with different ops in one pass: each equals itself alone."""
    check(Random(seed), KINDS, dtype)


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(KINDS))
@settings(max_examples=150, deadline=None)
def test_the_reference_equals_the_independent_oracle(seed: int, kind: str) -> None:
    random = Random(seed)
    op = random_op(random, kind)
    op.pop("gate", None)
    one = random_sequence(random, (kind,), torch.float32)
    spec = InterventionSpec(ops=[op])
    steering = ReferenceSteering(spec, whole_sequence(one.ids, one.prompt_len), {})
    plain = {name: value for name, value in op.items() if value is not None}
    if spec.ops[0].scope is not None:
        plain["scope"] = spec.ops[0].scope.canonical()
    for layer in LAYERS:
        site = spec.ops[0].site
        rows = one.rows[site, layer]
        got = steering.steer(site, layer, rows, LAYOUTS[site][layer])
        plain_op = plain | ({"head_size": HEAD_SIZE} if site == "head_out" else {})
        want = oracle_rows(plain_op, rows, one, layer)
        np.testing.assert_allclose(got, want, atol=1e-9, rtol=1e-9)


def oracle_rows(op: dict[str, Any], rows: np.ndarray, one: Request, layer: int) -> np.ndarray:
    return oracle.steered_rows(op, rows, list(range(len(one.ids))), one.ids, one.prompt_len, layer)


def test_strength_zero_changes_no_bit_and_says_so() -> None:
    spec = InterventionSpec(ops=[{"kind": "add", "layers": [1], "vector": np.ones(HIDDEN), "strength": 0}])
    steerer = Steerer([bound(spec)])
    steerer.begin(step_of([Run(0, 0, 0, [1, 2], 2)], 2), CPU)
    assert steerer.sites == {}
    steerer.end()
    (receipt,) = steerer.finish([([1, 2], 2)])
    assert (receipt[0].skipped, receipt[0].selected) == ("strength 0", 0)


def test_a_module_that_does_not_fire_is_an_error() -> None:
    spec = InterventionSpec(ops=[{"kind": "add", "layers": [1], "vector": np.ones(HIDDEN)}])
    steerer = Steerer([bound(spec)])
    steerer.begin(step_of([Run(0, 0, 0, [1, 2], 2)], 2), CPU)
    with pytest.raises(CaptureError, match="resid_post at layer 1 did not fire"):
        steerer.end()
    steerer.begin(step_of([Run(0, 0, 0, [1, 2], 2)], 2), CPU)
    with pytest.raises(CaptureError, match="has 3 rows, not 2"):
        steerer.steer("resid_post", 1, torch.zeros(3, HIDDEN))


def test_the_report_is_strength_times_the_ratio_of_norms() -> None:
    vector, rows = np.full(HIDDEN, 2.0), torch.full((2, HIDDEN), 4.0)
    spec = InterventionSpec(ops=[{"kind": "add", "layers": [1], "vector": vector, "strength": -3}])
    steerer = Steerer([bound(spec)])
    steerer.begin(step_of([Run(0, 0, 0, [1, 2], 2)], 2), CPU)
    steerer.steer("resid_post", 1, rows)
    steerer.end()
    (receipt,) = steerer.finish([([1, 2], 2)])
    assert receipt[0].relative == pytest.approx(3 * 2 / 4)


def test_a_function_sees_its_requests_rows_and_labels() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def double(rows: Tensor, labels: Any) -> Tensor | None:
        seen.append((labels.position.tolist(), labels.token_id.tolist()))
        return rows * 2 if labels.position[0] else None

    op = Function(fn=double, layers=[0], scope="sequence[1:]")
    ops = bound(InterventionSpec(ops=[op]))
    steerer = Steerer([ops, (), ops])
    steerer.begin(step_of([Run(0, 0, 0, [5, 6], 2), Run(1, 2, 0, [7], 1), Run(2, 3, 0, [8, 9], 1)], 5), CPU)
    out = steerer.steer("resid_post", 0, torch.ones(5, HIDDEN))
    steerer.end()
    assert out is not None
    assert out[:, 0].tolist() == [1, 2, 1, 1, 2]
    assert seen == [([1], [6]), ([1], [9])]
    bad = Function(fn=lambda rows, labels: rows[:0], layers=[0])
    steerer = Steerer([bound(InterventionSpec(ops=[bad]))])
    steerer.begin(step_of([Run(0, 0, 0, [5], 1)], 1), CPU)
    with pytest.raises(CaptureError, match="the function returned"):
        steerer.steer("resid_post", 0, torch.ones(1, HIDDEN))
