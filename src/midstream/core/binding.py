"""From a spec to what a steerer applies: tensors fetched, everything checked against the model, once per call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .artifacts import Artifact, Floats
from .errors import SpecError, spec_error
from .interventions import Function, InterventionSpec, Patch
from .op import Op
from .ops import Ablate, Affine, Clamp, LowRank, Rotate, Router
from .sites import Site, SiteLayout, layer_set, layers_at

Layouts = Mapping[Site, Mapping[int, SiteLayout]]
Fetch = Callable[[str, str], Artifact]
"""Artifact id and JSON path → the artifact with its array; E_ARTIFACT_MISSING or E_ARTIFACT_HASH."""


@dataclass(frozen=True, eq=False)
class BoundOp:
    """One op of a spec, ready for one model. place: in the spec's list.

    tensors: `[layer][name]` → float32, in the form that arithmetic wants (unit vectors, orthonormal bases).
    evidence: the gate's readout tensor of each evidence layer, `[hidden]`. layout: of the site at each layer.
    """

    place: int
    op: Op
    tensors: Mapping[int, Mapping[str, Floats]]
    layout: Mapping[int, SiteLayout]
    evidence: Mapping[int, Floats] = field(default_factory=dict[int, Floats])


def bind(
    spec: InterventionSpec, layouts: Layouts, refused: Mapping[Site, str], fetch: Fetch, path: str = "steering"
) -> tuple[BoundOp, ...]:
    """The ops of `spec`, checked against a model's layouts; `refused` says why the model has not some site.

    Raises E_SITE, E_LAYER_RANGE, E_BAD_PARAM (a wrong width, head or expert) and what `fetch` raises, with the path.
    """
    return tuple(
        _bind_op(place, op, layouts, refused, fetch, f"{path}.ops[{place}]") for place, op in enumerate(spec.ops)
    )


def _bind_op(place: int, op: Op, layouts: Layouts, refused: Mapping[Site, str], fetch: Fetch, path: str) -> BoundOp:
    if isinstance(op, Patch):
        raise spec_error("E_UNKNOWN_KIND", f"{path}.kind", "a patch is bound for one prompt: use spec.lowered(rows)")
    layout = _layout_of(op.site, op.layers, layouts, refused, path)
    op = _fetched(op, fetch, path)
    _check_heads(op, layout, path)
    tensors = {layer: _prepared(op, layer, _width(op, layout[layer]), path) for layer in op.layers}
    evidence: dict[int, Floats] = {}
    if op.gate is not None:
        gate, at = op.gate, f"{path}.gate"
        wide = _layout_of(gate.site, gate.layers, layouts, refused, at)
        name = f"{at}.readout.{gate.readout.name}"
        array = _with_array(gate.readout.tensor, fetch, name).array
        assert array is not None, "fetched in the line before"
        gate.check_readout(array, name)
        for number, layer in enumerate(gate.layers):
            evidence[layer] = array[number] if array.ndim == 2 else array
            _check_width(evidence[layer], wide[layer].width, name, f"{gate.site} at layer {layer}")
    return BoundOp(place, op, tensors, {layer: layout[layer] for layer in op.layers}, evidence)


def _layout_of(
    site: Site, layers: Sequence[int], layouts: Layouts, refused: Mapping[Site, str], path: str
) -> Mapping[int, SiteLayout]:
    available = layers_at(site, layouts, refused, f"{path}.site")
    layer_set(layers, available, f"{path}.layers", f"{site} of this model")
    return layouts[site]


def _fetched(op: Op, fetch: Fetch, path: str) -> Op:
    """The op with the array of every tensor."""
    missing = {name: one for name, one in op.tensors().items() if one.array is None}
    if not missing:
        return op
    found = {name: _with_array(one, fetch, f"{path}.{name}") for name, one in missing.items()}
    return type(op).of(dict(op) | found, path)  # made again, so that it checks the tensors that it now has


def _with_array(artifact: Artifact, fetch: Fetch, path: str) -> Artifact:
    return artifact if artifact.array is not None else fetch(artifact.id, path)


def _check_heads(op: Op, layout: Mapping[int, SiteLayout], path: str) -> None:
    for layer in op.layers:
        have = layout[layer]
        for head in getattr(op, "heads", None) or ():
            if have.heads is None or head >= have.heads:
                message = f"no head {head}; layer {layer} has heads 0 to {(have.heads or 1) - 1}"
                raise SpecError("E_BAD_PARAM", f"{path}.heads", message)
        if isinstance(op, Router):
            for name, experts in (("on", op.on), ("off", op.off), ("shift", [expert for expert, _ in op.shift])):
                if experts and max(experts) >= have.width:
                    message = f"no expert {max(experts)}; layer {layer} has experts 0 to {have.width - 1}"
                    raise SpecError("E_BAD_PARAM", f"{path}.{name}", message)


def _width(op: Op, layout: SiteLayout) -> int:
    """The width of the rows that an op sees."""
    heads = getattr(op, "heads", None)
    return layout.width if heads is None else len(heads) * (layout.head_size or 0)


def _check_width(array: NDArray[Any], width: int, path: str, what: str) -> None:
    if array.shape[-1] != width:
        raise SpecError("E_BAD_PARAM", path, f"has width {array.shape[-1]}, and {what} has {width}")


def _prepared(op: Op, layer: int, width: int, path: str) -> dict[str, Floats]:
    """The tensors of one layer in the form that arithmetic wants; E_BAD_PARAM for another width."""
    if isinstance(op, Router | Function):
        return {}
    given = {name: op.of_layer(name, layer) for name in op.tensors()}
    what = f"{op.site} at layer {layer}" + (" with its heads" if getattr(op, "heads", None) else "")
    for name, array in given.items():
        if not (isinstance(op, LowRank) and name in ("Q", "bias")):
            _check_width(array, width, f"{path}.{name}", what)
    if isinstance(op, LowRank):
        _check_width(given["Q"].T, width, f"{path}.Q", what)
        return {"P": given["P"], "Q": given["Q"], "bias": given.get("bias", np.zeros(len(given["P"]), np.float32))}
    if isinstance(op, Affine):
        return {"matrix": given["matrix"], "bias": given.get("bias", np.zeros(width, np.float32))}
    if isinstance(op, Ablate):
        return {"basis": orthonormal(given["directions"])}
    if isinstance(op, Rotate):
        return {"basis": _plane(given["basis"])}
    if isinstance(op, Clamp):
        return {"unit": _unit(given["direction"])}
    return {"vectors": np.atleast_2d(given["vector"])}


def _unit(vector: Floats) -> Floats:
    wide = vector.astype(np.float64)
    return (wide / np.linalg.norm(wide)).astype(np.float32)


def orthonormal(directions: Floats) -> Floats:
    """An orthonormal basis of what the directions span, `[rank, width]`: dependent ones count once.

    >>> orthonormal(np.array([[2.0, 0.0], [1.0, 0.0]], dtype=np.float32)).shape
    (1, 2)
    """
    if len(directions) == 1:  # with its own sign, which only_aligned asks for
        return _unit(directions[0])[None]
    wide = directions.astype(np.float64)
    wide /= np.linalg.norm(wide, axis=1, keepdims=True)
    _, sizes, basis = np.linalg.svd(wide, full_matrices=False)
    return basis[sizes > 1e-6 * sizes[0]].astype(np.float32)


def _plane(basis: Floats) -> Floats:
    """e₁ = b̂₁, and e₂ = b₂ orthonormalised to it, `[2, width]`."""
    first, second = basis.astype(np.float64)
    first /= np.linalg.norm(first)
    for _ in range(2):  # once leaves a rounding error of the length that went
        second = second / np.linalg.norm(second)
        second = second - (second @ first) * first
    return np.stack([first, second / np.linalg.norm(second)]).astype(np.float32)
