"""The interventions' oracle gives numbers worked out by hand, and its forward is the models' own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parity.architectures import ARCHITECTURES, prompt
from parity.intervention_oracle import gate_opens, orthonormal, selected, steered_rows
from parity.oracle import expected
from parity.steered_forward import FAMILIES, STEERABLE, steered_forward, steered_greedy, steered_scores

ROOT2 = math.sqrt(2)


def on_row(row: list[float], layer: int = 0, **op: Any) -> list[float]:
    """One row that is the whole prompt, after an op."""
    return steered_rows(op, [row], [0], [7], 1, layer)[0].tolist()


def on_rows(op: dict[str, Any], prompt_len: int, total: int, layer: int = 0, gate_open: bool = True) -> list[int]:
    """The positions whose row of zeros an op changed; token ids are 10 × the position."""
    after = steered_rows(
        op, np.zeros((total, 1)), range(total), [10 * i for i in range(total)], prompt_len, layer, gate_open
    )
    return np.flatnonzero(after[:, 0]).tolist()


# --- kinds


@pytest.mark.parametrize(
    ("row", "op", "want"),
    [
        ([1, 2], {"kind": "add", "vector": [10, 20], "strength": 2.0}, [21, 42]),
        ([1, 2], {"kind": "add", "vector": [10, 20], "strength": -1.0}, [-9, -18]),
        ([3, 4], {"kind": "add", "vector": [0, 7], "strength": 2.0, "norm_match": True}, [3, 14]),
        ([1, 2], {"kind": "add", "vector": [10, 20], "strength": 0.0}, [1, 2]),
        ([3, 4, 5], {"kind": "ablate", "directions": [2, 0, 0], "strength": 1.0}, [0, 4, 5]),
        ([3, 4, 5], {"kind": "ablate", "directions": [[2, 0, 0]], "strength": 0.5}, [1.5, 4, 5]),
        # The span of (1, 0, 0) and (1, 1, 0), not the two one after the other; a third in their span adds nothing.
        ([3, 4, 5], {"kind": "ablate", "directions": [[1, 0, 0], [1, 1, 0], [5, 3, 0]]}, [0, 0, 5]),
        ([3, 4], {"kind": "clamp", "direction": [0, 5], "value": -1.0}, [3, -1]),
        ([3, 4], {"kind": "replace", "vector": [7, 0], "strength": 0.25}, [4, 3]),
        ([3, 4, 9], {"kind": "rotate", "basis": [[2, 0, 0], [3, 3, 0]], "angle": math.pi / 2, "mode": "to"}, [0, 5, 9]),
        ([3, 4, 9], {"kind": "rotate", "basis": [[2, 0, 0], [3, 3, 0]], "angle": 0.0, "mode": "to"}, [5, 0, 9]),
        (
            [3, 4, 9],
            {"kind": "rotate", "basis": [[2, 0, 0], [3, 3, 0]], "angle": math.pi / 2, "mode": "by"},
            [-4, 3, 9],
        ),
        ([1, 2], {"kind": "affine", "matrix": [[0, 1], [2, 0]], "bias": [10, 20], "strength": 1.0}, [12, 22]),
        ([1, 2], {"kind": "affine", "matrix": [[0, 1], [2, 0]], "bias": [10, 20], "strength": 0.5}, [6.5, 12]),
        ([1, 2], {"kind": "low_rank", "P": [[3, 1]], "bias": [1], "Q": [[2], [-1]], "strength": 0.5}, [7, -1]),
    ],
)
def test_each_kind(row: list[float], op: dict[str, Any], want: list[float]) -> None:
    assert on_row(row, **op) == pytest.approx(want)


def test_router_works_on_the_row_as_it_came() -> None:
    # Mean 2.5, deviation √1.25 over N.
    row, deviation = [1.0, 2.0, 3.0, 4.0], math.sqrt(1.25)
    assert on_row(row, kind="router", on=[0, 1]) == pytest.approx([4.01, 4.01, 3, 4])
    assert on_row(row, kind="router", off=[3, 2]) == pytest.approx([1, 2, 0.99, 0.99])
    assert on_row(row, kind="router", shift={"2": 2.0, "0": -1.0}) == pytest.approx(
        [1 - deviation, 2, 3 + 2 * deviation, 4]
    )
    # Expert 0 is in all three lists, expert 1 in two.
    both = on_row(row, kind="router", on=[0, 1], off=[0], shift=[[0, 5.0], [1, 5.0], [2, -1.0]])
    assert both == pytest.approx([0.99, 4.01, 3 - deviation, 4])


def test_orthonormal_directions() -> None:
    first, second = orthonormal(np.array([[0.0, 3.0, 4.0], [0.0, 0.0, 2.0]]))
    assert first.tolist() == pytest.approx([0, 0.6, 0.8])
    assert second.tolist() == pytest.approx([0, -0.8, 0.6])


# --- modifiers


def test_a_capped_row_keeps_its_length_only_if_it_grew() -> None:
    assert on_row([3, 4], kind="add", vector=[3, 4], cap_norm=True) == pytest.approx([3, 4])
    assert on_row([3, 4], kind="add", vector=[2, 8], cap_norm=True) == pytest.approx([25 / 13, 60 / 13])
    assert on_row([3, 4], kind="add", vector=[-3, 0], cap_norm=True) == [0, 4]


def test_only_aligned_rows_are_strictly_above() -> None:
    add = {"kind": "add", "vector": [0, 10]}
    for measure, mine in (("cosine", 0.8), ("projection", 4.0)):
        for above, want in ((mine - 0.01, [3, 14]), (mine + 0.01, [3, 4])):
            assert on_row([3, 4], **add, only_aligned={"measure": measure, "above": above}) == want
    assert on_row([3, 4], **add, only_aligned={"measure": "projection", "above": 4.0}) == [3, 4]
    aligned = {"measure": "projection", "above": 0}
    assert on_row([3, 4], kind="clamp", direction=[-1, 0], value=1, only_aligned=aligned) == [3, 4]
    assert on_row([3, 4], kind="ablate", directions=[[1, 0]], only_aligned=aligned) == [0, 4]


def test_heads_are_a_row_of_their_own_in_ascending_order() -> None:
    row = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    op = {"kind": "add", "site": "head_out", "heads": [2, 0], "vector": [10, 20, 30, 40]}
    assert on_row(row, **op) == [11, 22, 3, 4, 35, 46]
    # (1, 2, 5, 6) on (1, 0, 1, 0)/√2 is 6/√2; the projection moves to 0.
    op = {"kind": "clamp", "site": "head_out", "heads": [0, 2], "direction": [3, 0, 3, 0], "value": 0.0}
    assert on_row(row, **op) == pytest.approx([-2, 2, 3, 4, 2, 6])


# --- tensors by layer and by position


def test_tensors_by_layer() -> None:
    for layers in ([5, 2, 5], [2, 5]):
        op: dict[str, Any] = {"kind": "add", "layers": layers, "vector": [[1.0], [2.0]]}
        assert [on_row([0.0], layer, **op) for layer in (1, 2, 5)] == [[0], [1], [2]]
    op = {"kind": "add", "vector": {"2": [1.0], 5: [2.0]}}
    assert [on_row([0.0], layer, **op) for layer in (1, 2, 5)] == [[0], [1], [2]]
    op = {"kind": "ablate", "layers": [0, 1], "directions": [[[1, 0]], [[0, 1]]]}
    assert [on_row([3.0, 4.0], layer, **op) for layer in (0, 1)] == [[0, 4], [3, 0]]
    op = {"kind": "ablate", "layers": [0, 1], "directions": [[1, 0], [0, 1]]}
    assert [on_row([3.0, 4.0], layer, **op) for layer in (0, 1)] == [[0, 0], [0, 0]]


def test_vectors_by_position() -> None:
    op: dict[str, Any] = {"kind": "replace", "layers": [3], "positions": [4, 1], "vector": [[40.0], [10.0]]}
    rows, ids = np.zeros((6, 1)), [0] * 6
    assert steered_rows(op, rows, range(6), ids, 3, 3)[:, 0].tolist() == [0, 10, 0, 0, 40, 0]
    op["scope"] = {"generation": "all"}
    assert steered_rows(op, rows, range(6), ids, 3, 3)[:, 0].tolist() == [0, 0, 0, 0, 40, 0]
    op |= {"layers": [3, 7], "vector": [[[40.0], [10.0]], [[41.0], [11.0]]], "scope": None}
    assert steered_rows(op, rows, range(6), ids, 3, 7)[:, 0].tolist() == [0, 11, 0, 0, 41, 0]
    # Rows of a later chunk are found by their absolute position.
    assert steered_rows(op, rows[:2], [3, 4], [0, 0], 3, 7)[:, 0].tolist() == [0, 41]


# --- scopes


@pytest.mark.parametrize(
    ("scope", "want"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6]),
        ({"prompt": "all"}, [0, 1, 2, 3]),
        ({"generation": "all"}, [4, 5, 6]),
        ({"prompt_positions": [0, -1, -4, -5, 9]}, [0, 3]),
        ({"generation_positions": [0, 2, 9]}, [4, 6]),
        ({"sequence_positions": [1, 4, 40]}, [1, 4]),
        ({"prompt_window": [-2, None]}, [2, 3]),
        ({"prompt_window": [-9, -2]}, [0, 1]),
        ({"prompt_window": [[0, 1], [3, 99]]}, [0, 3]),
        ({"generation_window": [1, None]}, [5, 6]),
        ({"sequence_window": [3, 5]}, [3, 4]),
        ({"prompt_tokens": [10, 50]}, [1]),
        ({"generation_tokens": [10, 50]}, [5]),
        ({"prompt": "all", "exclude_prompt_positions": [0, -1]}, [1, 2]),
        ({"sequence_window": [0, None], "exclude_sequence_window": [1, 5], "exclude_generation_tokens": [60]}, [0, 5]),
        ({"prompt_positions": [2], "generation": "all", "exclude_generation_window": [0, 2]}, [2, 6]),
    ],
)
def test_scopes(scope: dict[str, Any] | None, want: list[int]) -> None:
    assert [i for i in range(7) if selected(scope, i, 10 * i, 4)] == want
    assert on_rows({"kind": "add", "vector": [1.0], "scope": scope}, 4, 7) == want


# --- gates


def test_a_gated_op_acts_on_generation_and_below_its_evidence_on_the_last_prompt_row() -> None:
    gate = {"layers": [1, 3], "site": "resid_post", "pooling": "last"}
    op = {"kind": "add", "vector": [1.0], "gate": gate}
    assert [on_rows(op, 4, 7, layer) for layer in (0, 3, 4)] == [[4, 5, 6], [4, 5, 6], [3, 4, 5, 6]]
    assert on_rows(op, 4, 7, 4, gate_open=False) == []
    assert on_rows({**op, "scope": {"generation": "all"}}, 4, 7, 4) == [4, 5, 6]


def test_gates_decide() -> None:
    rows = {2: np.array([[1.0, 0.0], [3.0, 4.0]]), 5: np.array([[0.0, 0.0], [0.0, 2.0]])}

    def opens(pooling: str, readout: dict[str, Any], rule: dict[str, Any]) -> bool:
        return gate_opens({"layers": [2, 5], "pooling": pooling, "readout": readout, "rule": rule}, rows)

    # Last rows (3, 4) and (0, 2): 7 − 1 and 2 − 1, in sum 7; mean rows (2, 2) and (0, 1): 3 and 0.
    affine = {"kind": "affine", "w": [1.0, 1.0], "b": -1.0}
    for pooling, total in (("last", 7.0), ("mean", 3.0)):
        assert opens(pooling, affine, {"kind": "sum", "bias": -total})
        assert not opens(pooling, affine, {"kind": "sum", "bias": -total - 0.001})
    for threshold, compare, quantifier, want in (
        (2, "ge", "any", True), (2, "ge", "all", False), (2, "le", "any", True), (2, "le", "all", False),
        (6, "ge", "any", True), (6.1, "ge", "any", False), (6, "le", "all", True), (1, "ge", "all", True),
    ):  # fmt: skip
        rule = {"kind": "per_layer", "threshold": threshold, "compare": compare, "over": quantifier}
        assert opens("last", affine, rule) is want, rule
    # Cosines 0.8 and 1 with (0, 1); −0.6 and 1 with one direction for each layer.
    cosine = {"cosine": {"d": [0.0, 9.0]}}
    assert opens("last", cosine, {"sum": {"bias": -1.799}})
    assert not opens("last", cosine, {"sum": {"bias": -1.801}})
    each = {"cosine": {"d": [[-1.0, 0.0], [0.0, 1.0]]}}
    assert opens("last", each, {"sum": {"bias": -0.399}})
    assert not opens("last", each, {"sum": {"bias": -0.401}})
    assert not gate_opens({"pooling": "last", "readout": affine, "rule": {"sum": {"bias": 1e9}}}, {})


# --- the forward


@functools.cache
def model_of(name: str) -> Any:
    """The tiny model with eager attention."""
    model = ARCHITECTURES[name]()
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def own_logits(name: str, ids: list[int]) -> Tensor:
    """The model's own logits."""
    return model_of(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()


def assert_close(got: Any, want: Any, what: str = "") -> None:
    """Within what float32 leaves of the arithmetic."""
    want = np.asarray(want)
    bound = 2e-5 * np.maximum(1, np.abs(want).max(-1, keepdims=True))
    assert (np.abs(np.asarray(got) - want) <= bound).all(), what


def drawn(*shape: int, seed: int = 3) -> np.ndarray:
    """A tensor of normal numbers."""
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_without_ops_it_is_the_models_forward(name: str) -> None:
    ids = prompt(name, 14)
    got = steered_forward(name, model_of(name), ids[:9], ids[9:])
    assert_close(got.logits, own_logits(name, ids))
    sites = expected(name, model_of(name), ids)
    assert set(sites) == set(got.sites)
    for key, rows in sites.items():
        assert_close(got.sites[key], rows, str(key))


#: Where a plain hook meets each site: the module, and whether its input or its output.
HOOKS = {
    "llama": {
        "resid_pre": ("model.layers.1", "input"),
        "resid_post": ("model.layers.1", "output"),
        "attn_out": ("model.layers.1.self_attn", "output"),
        "mlp_out": ("model.layers.1.mlp", "output"),
        "head_out": ("model.layers.1.self_attn.o_proj", "input"),
    },
    "gemma2": {
        "resid_post": ("model.layers.1", "output"),
        "attn_out": ("model.layers.1.post_attention_layernorm", "output"),
        "mlp_out": ("model.layers.1.post_feedforward_layernorm", "output"),
    },
    "gpt2": {
        "resid_pre": ("transformer.h.1", "input"),
        "attn_out": ("transformer.h.1.attn", "output"),
        "mlp_out": ("transformer.h.1.mlp", "output"),
        "head_out": ("transformer.h.1.attn.c_proj", "input"),
    },
    "gpt_neox_parallel": {
        "resid_pre": ("gpt_neox.layers.1", "input"),
        "attn_out": ("gpt_neox.layers.1.attention", "output"),
        "mlp_out": ("gpt_neox.layers.1.mlp", "output"),
    },
    "mixtral": {"mlp_out": ("model.layers.1.mlp", "output"), "resid_pre": ("model.layers.1", "input")},
}


@contextmanager
def hooked(module: nn.Module, side: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A module whose first input or output is changed."""

    def before(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(args[0]), *args[1:])

    def after(_: Any, __: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    handle = module.register_forward_pre_hook(before) if side == "input" else module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(("name", "site"), [(name, site) for name, sites in HOOKS.items() for site in sites])
def test_with_an_op_it_is_the_model_with_a_hook(name: str, site: str) -> None:
    ids, (path, side) = prompt(name, 12), HOOKS[name][site]
    width = steered_forward(name, model_of(name), ids).sites[site, 1].shape[1]
    vector = drawn(width)
    op = {"kind": "add", "site": site, "layers": [1], "vector": vector, "strength": 2.0}
    op["scope"] = {"prompt_positions": [3], "generation": "all"}
    push = torch.zeros(12, width)
    push[[3, 9, 10, 11]] = torch.from_numpy(2.0 * vector).float()
    with hooked(model_of(name).get_submodule(path), side, lambda x: x + push):
        want = own_logits(name, ids)
    got = steered_forward(name, model_of(name), ids[:9], ids[9:], [op])
    assert_close(got.logits, want)
    assert np.abs(got.logits - own_logits(name, ids).numpy())[3].max() > 1e-2


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_router_ops_choose_the_experts(name: str) -> None:
    ids, gate = prompt(name, 10), model_of(name).model.layers[2].mlp.gate
    op = {"kind": "router", "layers": [2], "on": [4], "off": [0], "shift": {"1": 3.0}}

    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.reshape(-1, x.shape[-1]) @ gate.weight.T
        given = logits.clone()
        logits[:, 1] += 3 * given.std(-1, correction=0)
        logits[:, 4], logits[:, 0] = given.amax(-1) + 0.01, given.amin(-1) - 0.01
        best = logits.topk(2, dim=-1)
        return logits, best.values.softmax(-1), best.indices

    got = steered_forward(name, model_of(name), ids, (), [op])
    gate.forward = forward
    try:
        want = own_logits(name, ids)
    finally:
        del gate.forward
    assert_close(got.logits, want)
    best = np.argsort(got.sites["router_logits", 2], axis=1)
    assert (best[:, -2:] == 4).any(axis=1).all()
    assert (best[:, 0] == 0).all()


@pytest.mark.parametrize("name", ["llama", "gpt_neox_parallel"])
def test_ops_act_once_in_order_and_never_on_earlier_rows(name: str) -> None:
    ids, model = prompt(name, 10), model_of(name)
    plain = steered_forward(name, model, ids)
    for site in STEERABLE[:-1]:
        width = plain.sites[site, 1].shape[1]
        add = {"kind": "add", "site": site, "layers": [1], "vector": drawn(width), "scope": {"prompt_positions": [6]}}
        clamp = {"kind": "clamp", "site": site, "layers": [1], "direction": drawn(width, seed=4), "value": 2.0}
        clamp["scope"] = add["scope"]
        got = steered_forward(name, model, ids, (), [add, clamp])
        want = steered_rows(add, plain.sites[site, 1], range(10), ids, 10, 1)
        assert_close(got.sites[site, 1], steered_rows(clamp, want, range(10), ids, 10, 1))
        assert np.array_equal(got.logits[:6], plain.logits[:6])
        assert np.array_equal(got.sites["resid_pre", 0], plain.sites["resid_pre", 0])
        assert not np.allclose(got.logits[6:], plain.logits[6:])


def test_generation_sees_its_own_phase() -> None:
    name, ids = "llama", prompt("llama", 8)
    model = model_of(name)
    op = {"kind": "add", "layers": [1], "vector": drawn(64), "strength": 5.0, "scope": {"generation": "all"}}
    plain, steered = (steered_greedy(name, model, ids, 5, ops) for ops in ([], [op]))
    assert len(steered.token_ids) == 12
    assert plain.generated[0] == steered.generated[0]
    assert plain.generated != steered.generated
    again = steered_forward(name, model, ids, steered.generated[:-1], [op])
    assert again.logits[7:].argmax(-1).tolist() == steered.generated
    scores = steered_scores(name, model, ids, steered.generated, [op])
    assert scores == pytest.approx(torch.from_numpy(again.logits[7:]).log_softmax(-1).amax(-1).numpy())


def test_a_gate_is_decided_by_the_steered_prompt_alone() -> None:
    name, ids = "llama", prompt("llama", 8)
    model = model_of(name)
    reads = drawn(64, seed=5)
    first = {"kind": "add", "layers": [1], "vector": drawn(64), "strength": 3.0}
    # The evidence is layer 1 after the op before, and without the op after, at one and the same site.
    rows = steered_forward(name, model, ids, (), [first]).sites["resid_post", 1]
    reading = float(reads @ rows.mean(0))
    for margin, opened in ((1e-6, True), (-1e-6, False)):
        gate = {"layers": [1], "site": "resid_post", "pooling": "mean"}
        gate |= {"readout": {"affine": {"w": reads, "b": 0.0}}, "rule": {"sum": {"bias": margin - reading}}}
        gated = {"kind": "add", "layers": [0, 1, 2], "vector": drawn(64, seed=6), "gate": gate}
        got = steered_forward(name, model, ids, [5, 6], [first, gated, {**first, "strength": 9.0}])
        bare = steered_forward(name, model, ids, [5, 6], [first, {**first, "strength": 9.0}])
        assert got.gates == {1: opened}
        changed = {
            layer: np.flatnonzero(np.abs(got.sites["resid_post", layer] - bare.sites["resid_post", layer]).max(1))
            for layer in range(3)
        }
        want = [[8, 9], [8, 9], [7, 8, 9]] if opened else [[], [], []]
        assert [changed[layer].tolist() for layer in range(3)] == want
