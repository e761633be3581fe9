"""Interventions read off docs/semantics.md one row at a time, in float64 NumPy.

Nothing of the library is used. An op is the wire form's plain dict with arrays (or nested lists) in place of artifact
ids; a scope and a gate are the plain dicts that the wire form holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Op = Mapping[str, Any]

# --- which rows


def selected(scope: Mapping[str, Any] | None, position: int, token_id: int, prompt_len: int) -> bool:
    """Whether a SelectSpec names the row: in one of its includes and in none of its excludes; None names all."""
    if scope is None:
        return True
    included = excluded = False
    for clause, value in scope.items():
        if value is None or not _names(clause.removeprefix("exclude_"), value, position, token_id, prompt_len):
            continue
        if clause.startswith("exclude_"):
            excluded = True
        else:
            included = True
    return included and not excluded


def _names(clause: str, value: Any, position: int, token_id: int, prompt_len: int) -> bool:
    in_prompt = position < prompt_len
    if clause.startswith("prompt"):
        if not in_prompt:
            return False
        # The place of the row counted from the front and, where the clause's number is negative, from the end.
        place, end = position, prompt_len
    elif clause.startswith("generation"):
        if in_prompt:
            return False
        place, end = position - prompt_len, None
    else:
        place, end = position, None
    if clause in ("prompt", "generation"):
        return value == "all"
    if clause.endswith("_tokens"):
        return token_id in list(value)
    if clause.endswith("_positions"):
        return any(place == _from_front(number, end) for number in value)
    if clause.endswith("_window"):
        windows = value if isinstance(value[0], (list, tuple)) else [value]
        for start, stop in windows:
            after_start = place >= _from_front(start, end)
            before_stop = stop is None or place < _from_front(stop, end)
            if after_start and before_stop:
                return True
        return False
    raise ValueError(f"no clause is called {clause}")


def _from_front(number: int, end: int | None) -> int:
    if number >= 0:
        return number
    if end is None:
        raise ValueError("a negative number outside the prompt")
    return end + number


def acts_on(op: Op, position: int, token_id: int, prompt_len: int, layer: int) -> bool:
    """Whether the op is for the row at the layer, whatever its strength and whether or not its gate is open."""
    if not acts_at(op, layer) or not selected(op.get("scope"), position, token_id, prompt_len):
        return False
    if op.get("positions") is not None and position not in list(op["positions"]):
        return False
    gate = op.get("gate")
    if gate is None or position >= prompt_len:
        return True
    # Decided at the prompt's last row: of the prompt only that row is left, where all the evidence lies above it.
    return position == prompt_len - 1 and gate["layers"] is not None and layer > max(gate["layers"])


def acts_at(op: Op, layer: int) -> bool:
    """Whether the op names the layer: those listed, else those its tensors are given for, else all."""
    layers = op.get("layers")
    if layers is None:
        own = [value for name, value in op.items() if name in TENSORS and isinstance(value, Mapping)]
        return layer in {int(key) for key in own[0]} if own else True
    return layer in list(layers)


def site_of(op: Op) -> str:
    """The site the op acts at."""
    return "router_logits" if op["kind"] == "router" else op.get("site") or "resid_post"


# --- its tensors

#: The fields that hold tensors.
TENSORS = ("vector", "directions", "direction", "basis", "matrix", "bias", "P", "Q")


def tensor_at(op: Op, name: str, rank: int, layer: int) -> Array:
    """A tensor of the op at a layer: the same at all, or one per layer as a mapping or along one more leading axis."""
    value = op[name]
    if isinstance(value, Mapping):
        return np.asarray({int(key): one for key, one in value.items()}[layer], dtype=np.float64)
    value = np.asarray(value, dtype=np.float64)
    if value.ndim <= rank:
        return value
    place = layer if op.get("layers") is None else sorted(set(op["layers"])).index(layer)
    return value[place]


def vector_at(op: Op, layer: int, position: int) -> Array:
    """The vector of add or replace for one row."""
    if op.get("positions") is None:
        return tensor_at(op, "vector", 1, layer)
    return tensor_at(op, "vector", 2, layer)[list(op["positions"]).index(position)]


def unit(v: Array) -> Array:
    """v at length 1; zero stays zero."""
    length = math.sqrt(float(v @ v))
    return v / length if length > 0 else np.zeros_like(v)


def orthonormal(directions: Array) -> list[Array]:
    """Gram-Schmidt, twice over for accuracy; a direction within the span of those before it adds nothing."""
    basis: list[Array] = []
    for direction in np.atleast_2d(directions):
        rest = unit(direction)
        for _ in range(2):
            for e in basis:
                rest = rest - (rest @ e) * e
        if math.sqrt(float(rest @ rest)) > 1e-10:
            basis.append(unit(rest))
    return basis


# --- the kinds, each on one row x


def add(x: Array, v: Array, s: float, norm_match: bool = False) -> Array:
    """x + s·v, or with v at the length of x."""
    if norm_match:
        return x + s * math.sqrt(float(x @ x)) * unit(v)
    return x + s * v


def ablate(x: Array, directions: Array, s: float) -> Array:
    """x less s of its part in the span of the directions."""
    out = x.copy()
    for e in orthonormal(directions):
        out = out - s * (x @ e) * e
    return out


def clamp(x: Array, direction: Array, value: float) -> Array:
    """x with its projection on the direction at the value."""
    e = unit(direction)
    return x + (value - x @ e) * e


def replace(x: Array, v: Array, s: float) -> Array:
    """(1 − s)·x + s·v."""
    return (1 - s) * x + s * v


def rotate(x: Array, basis: Array, angle: float, mode: str) -> Array:
    """x with its part in the plane turned to the angle, or by it, from the first vector towards the second."""
    e1 = unit(basis[0])
    e2 = unit(basis[1] - (basis[1] @ e1) * e1)
    c1, c2 = float(x @ e1), float(x @ e2)
    if mode == "to":
        turned = math.hypot(c1, c2) * math.cos(angle), math.hypot(c1, c2) * math.sin(angle)
    elif mode == "by":
        turned = c1 * math.cos(angle) - c2 * math.sin(angle), c1 * math.sin(angle) + c2 * math.cos(angle)
    else:
        raise ValueError(f"no mode is called {mode}")
    return x - c1 * e1 - c2 * e2 + turned[0] * e1 + turned[1] * e2


def affine(x: Array, matrix: Array, bias: Array | float, s: float) -> Array:
    """x + s·(x Aᵀ + b − x)."""
    return x + s * (matrix @ x + bias - x)


def low_rank(x: Array, P: Array, Q: Array, bias: Array | float, s: float) -> Array:
    """x + s·(x Pᵀ + b) Qᵀ."""
    return x + s * (Q @ (P @ x + bias))


def router(x: Array, on: Sequence[int], off: Sequence[int], shift: Any) -> Array:
    """Logits with experts put just above all, just below all, or moved by multiples of the row's deviation."""
    top, bottom = float(x.max()), float(x.min())
    deviation = math.sqrt(float(((x - x.mean()) ** 2).mean()))
    out = x.copy()
    for expert, amount in shift.items() if isinstance(shift, Mapping) else shift:
        out[int(expert)] = x[int(expert)] + amount * deviation
    for expert in on:
        out[expert] = top + 0.01
    for expert in off:
        out[expert] = bottom - 0.01
    return out


# --- an op on rows


def steered_row(op: Op, x: Array, position: int, layer: int) -> Array:
    """What an op with a strength makes of one row that it acts on."""
    kind, s = op["kind"], op.get("strength", 1.0)
    direction: Array | None = None  # the op's own, where it has one
    if kind == "add":
        direction = vector_at(op, layer, position)
        out = add(x, direction, s, bool(op.get("norm_match")))
    elif kind == "ablate":
        directions = np.atleast_2d(tensor_at(op, "directions", 2, layer))
        direction = directions[0] if len(directions) == 1 else None
        out = ablate(x, directions, s)
    elif kind == "clamp":
        direction = tensor_at(op, "direction", 1, layer)
        out = clamp(x, direction, op["value"])
    elif kind == "replace":
        out = replace(x, vector_at(op, layer, position), s)
    elif kind == "rotate":
        out = rotate(x, tensor_at(op, "basis", 2, layer), op["angle"], op["mode"])
    elif kind == "affine":
        out = affine(x, tensor_at(op, "matrix", 2, layer), _bias(op, layer), s)
    elif kind == "low_rank":
        out = low_rank(x, tensor_at(op, "P", 2, layer), tensor_at(op, "Q", 2, layer), _bias(op, layer), s)
    elif kind == "router":
        out = router(x, op.get("on") or (), op.get("off") or (), op.get("shift") or {})
    else:
        raise ValueError(f"no kind is called {kind}")
    if op.get("only_aligned"):
        assert direction is not None, f"{kind} has no direction of its own"
        if not aligned(x, direction, **op["only_aligned"]):
            return x.copy()
    return capped(out, x) if op.get("cap_norm") else out


def _bias(op: Op, layer: int) -> Array | float:
    return 0.0 if op.get("bias") is None else tensor_at(op, "bias", 1, layer)


def aligned(x: Array, direction: Array, measure: str, above: float) -> bool:
    """Whether the row's cosine with a direction, or its projection on it, is above a number."""
    if measure == "cosine":
        return float(unit(x) @ unit(direction)) > above
    if measure == "projection":
        return float(x @ unit(direction)) > above
    raise ValueError(f"no measure is called {measure}")


def capped(out: Array, before: Array) -> Array:
    """The row at the length that it had before, if it is longer now."""
    old, new = math.sqrt(float(before @ before)), math.sqrt(float(out @ out))
    return out * (old / new) if new > old else out


def columns_of(op: Op, width: int) -> list[int]:
    """The columns of a row that are the op's x: all of them, or those of its heads in ascending order."""
    if op.get("heads") is None:
        return list(range(width))
    heads = sorted(set(op["heads"]))
    tensor = next(op[name] for name in ("vector", "directions", "direction") if op.get(name) is not None)
    if isinstance(tensor, Mapping):
        tensor = next(iter(tensor.values()))
    size, rest = divmod(np.shape(tensor)[-1], len(heads))
    assert rest == 0, "the tensor's width is not a number of heads"
    assert width % size == 0, "the row's width is not a number of heads"
    return [head * size + i for head in heads for i in range(size)]


def steered_rows(
    op: Op,
    rows: Any,
    positions: Sequence[int],
    token_ids: Sequence[int],
    prompt_len: int,
    layer: int,
    gate_open: bool = True,
) -> Array:
    """The rows `[T, width]` of one sequence at the op's site after the op."""
    out = np.array(rows, dtype=np.float64)
    if op.get("strength", 1.0) == 0 or not gate_open:
        return out
    for i, (position, token_id) in enumerate(zip(positions, token_ids, strict=True)):
        if acts_on(op, int(position), int(token_id), prompt_len, layer):
            columns = columns_of(op, out.shape[1])
            out[i, columns] = steered_row(op, out[i, columns], int(position), layer)
    return out


# --- gates


def gate_opens(gate: Mapping[str, Any], evidence: Mapping[int, Any]) -> bool:
    """What a gate decides on the prompt's rows `[prompt_len, width]` at each of its layers."""
    if not evidence or any(len(rows) == 0 for rows in evidence.values()):
        return False
    layers = sorted(evidence)
    readings = [_reading(gate, layer, np.asarray(evidence[layer], dtype=np.float64), layers) for layer in layers]
    rule, fields = _choice(gate["rule"], ("sum", "per_layer"))
    if rule == "sum":
        return sum(readings) + fields.get("bias", 0.0) >= 0
    # The words say which field they are in.
    words = [value for value in fields.values() if isinstance(value, str)]
    thresholds = [float(_per_layer(fields["threshold"], 0, layer, layers)) for layer in layers]
    pairs = zip(readings, thresholds, strict=True)
    held = [reading <= threshold if "le" in words else reading >= threshold for reading, threshold in pairs]
    return any(held) if "any" in words else all(held)


def _reading(gate: Mapping[str, Any], layer: int, rows: Array, layers: list[int]) -> float:
    if gate["pooling"] == "mean":
        x = rows.mean(axis=0)
    elif gate["pooling"] == "last":
        x = rows[-1]
    else:
        raise ValueError(f"no pooling is called {gate['pooling']}")
    readout, fields = _choice(gate["readout"], ("affine", "cosine"))
    if readout == "affine":
        return float(_per_layer(fields["w"], 1, layer, layers) @ x + _per_layer(fields.get("b", 0.0), 0, layer, layers))
    return float(unit(x) @ unit(_per_layer(fields["d"], 1, layer, layers)))


def _per_layer(value: Any, rank: int, layer: int, layers: list[int]) -> Array:
    if isinstance(value, Mapping):
        return np.asarray({int(key): one for key, one in value.items()}[layer], dtype=np.float64)
    value = np.asarray(value, dtype=np.float64)
    return value if value.ndim <= rank else value[layers.index(layer)]


def _choice(block: Mapping[str, Any], words: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """The word that a block is about and its fields: `{"kind": word, …}` and `{word: {…}}` are both read."""
    for word in words:
        if block.get("kind") == word:
            return word, {name: value for name, value in block.items() if name != "kind"}
        if isinstance(block.get(word), Mapping):
            return word, block[word]
    raise ValueError(f"none of {words} in {list(block)}")
