"""Short constructors of interventions: each gives an InterventionSpec with one op; specs are added to make one.

A vector is `[hidden]` for all layers, or one per layer: `{layer: [hidden]}`, `[layers, hidden]` beside `layers`, a
vector file, a repeng ControlVector, or a steering-vectors SteeringVector; layers then default to its own. Tensors and
arrays of any dtype are taken as float32; `sha256:…` names an artifact that a registry holds. `rows` is a SelectSpec or
the grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .core.artifacts import Artifact, finite_array
from .core.errors import SpecError, spec_error
from .core.interventions import Function, InterventionSpec, Patch
from .core.narrow import is_mapping
from .core.op import Op
from .core.ops import Ablate, Add, Affine, Clamp, LowRank, Replace, Rotate, Router
from .core.result import CaptureResult
from .core.select import SelectSpec, resolve
from .core.sites import Site, as_site, layer_ids

Rows = SelectSpec | str | dict[str, Any] | None


def add(
    vector: Any,
    *,
    layers: Any = None,
    strength: float = 1.0,
    rows: Rows = None,
    site: str | None = None,
    norm_match: bool = False,
    positions: Sequence[int] | None = None,
    heads: Any = None,
    cap_norm: bool = False,
    only_aligned: Any = None,
    gate: Any = None,
) -> InterventionSpec:
    """x + s·v on the rows; norm_match: v takes the row's own norm first. positions: `[T]`, with a vector `[T, hidden]`.

    >>> str(add([0.0, 1.0], layers=[3], strength=4.0, rows="generated").ops[0].scope)
    'generated'
    """
    found = _per_layer(vector, layers, "add.vector", site)
    return _spec(
        Add, rows, gate, site=found.site, layers=found.layers, vector=found.tensor, strength=strength,
        norm_match=norm_match, positions=positions, heads=heads, cap_norm=cap_norm, only_aligned=only_aligned,
    )  # fmt: skip


def replace(
    vector: Any,
    *,
    layers: Any = None,
    strength: float = 1.0,
    rows: Rows = None,
    site: str | None = None,
    positions: Sequence[int] | None = None,
    heads: Any = None,
    cap_norm: bool = False,
    gate: Any = None,
) -> InterventionSpec:
    """(1−s)·x + s·v on the rows."""
    found = _per_layer(vector, layers, "replace.vector", site)
    return _spec(
        Replace, rows, gate, site=found.site, layers=found.layers, vector=found.tensor, strength=strength,
        positions=positions, heads=heads, cap_norm=cap_norm,
    )  # fmt: skip


def ablate(
    directions: Any,
    *,
    layers: Any = None,
    strength: float = 1.0,
    rows: Rows = None,
    site: str | None = None,
    heads: Any = None,
    cap_norm: bool = False,
    only_aligned: Any = None,
    gate: Any = None,
) -> InterventionSpec:
    """Remove what lies along directions: `[hidden]`, the span of `[K, hidden]`, or per layer `[layers, K, hidden]`."""
    found = _per_layer(directions, layers, "ablate.directions", site)
    tensor = found.tensor
    if found.own and tensor.array is not None and tensor.array.ndim == 2:  # one direction for each layer
        tensor = Artifact.of(tensor.array[:, None])
    return _spec(
        Ablate, rows, gate, site=found.site, layers=found.layers, directions=tensor, strength=strength,
        heads=heads, cap_norm=cap_norm, only_aligned=only_aligned,
    )  # fmt: skip


def clamp(
    direction: Any,
    *,
    layers: Any = None,
    value: float,
    rows: Rows = None,
    site: str | None = None,
    heads: Any = None,
    cap_norm: bool = False,
    only_aligned: Any = None,
    gate: Any = None,
) -> InterventionSpec:
    """The projection of the rows on a direction becomes `value`."""
    found = _per_layer(direction, layers, "clamp.direction", site)
    return _spec(
        Clamp, rows, gate, site=found.site, layers=found.layers, direction=found.tensor, value=value,
        heads=heads, cap_norm=cap_norm, only_aligned=only_aligned,
    )  # fmt: skip


def rotate(
    basis: Any,
    *,
    layers: Any,
    angle: float,
    mode: str = "to",
    rows: Rows = None,
    cap_norm: bool = False,
    gate: Any = None,
) -> InterventionSpec:
    """Turn the part of the rows in the plane of `basis` `[2, hidden]`: to an angle, or by it; radians."""
    found = _per_layer(basis, layers, "rotate.basis", None)
    given = {"basis": found.tensor, "angle": angle, "mode": mode, "cap_norm": cap_norm}
    return _spec(Rotate, rows, gate, layers=found.layers, **given)


def affine(
    matrix: Any,
    bias: Any = None,
    *,
    layers: Any,
    strength: float = 1.0,
    rows: Rows = None,
    cap_norm: bool = False,
    gate: Any = None,
) -> InterventionSpec:
    """x + s·(xAᵀ + b − x): A `[hidden, hidden]`, b `[hidden]`."""
    given = {"matrix": matrix, "bias": bias, "strength": strength, "cap_norm": cap_norm}
    return _spec(Affine, rows, gate, layers=layers, **given)


def low_rank(
    P: Any,
    Q: Any,
    bias: Any = None,
    *,
    layers: Any,
    strength: float = 1.0,
    rows: Rows = None,
    cap_norm: bool = False,
    gate: Any = None,
) -> InterventionSpec:
    """x + s·(xPᵀ + b)Qᵀ: P `[r, hidden]`, Q `[hidden, r]`, b `[r]`."""
    given = {"P": P, "Q": Q, "bias": bias, "strength": strength, "cap_norm": cap_norm}
    return _spec(LowRank, rows, gate, layers=layers, **given)


def router(*, layers: Any, on: Any = (), off: Any = (), shift: Any = None, rows: Rows = None) -> InterventionSpec:
    """Put experts on or off, or shift their logits by s times the row's std: `shift={expert: s}`."""
    return _spec(Router, rows, None, layers=layers, on=on, off=off, shift=shift)


def function(fn: Callable[..., Any], *, site: str = "resid_post", layers: Any, rows: Rows = None) -> InterventionSpec:
    """Your own `fn(rows, labels) -> rows | None`, in process only: float32 `[rows, width]` of one request at a time."""
    return _spec(Function, rows, None, site=site, layers=layers, fn=fn)


def patch(
    capture: CaptureResult,
    *,
    source: Rows,
    target: Rows,
    layers: Any = None,
    sample: int = 0,
    site: str | None = None,
    heads: Any = None,
) -> InterventionSpec:
    """Put rows of one run, which `capture` holds, into the rows that `target` selects of another prompt.

    source: which rows of the capture's `sample`; as many as target selects, paired in order. layers: None for all that
    were captured. Raises E_SELECTION where `source` names rows that were not captured.
    """
    name = _captured_site(capture, site)
    have = [layer for of, layer in capture.tensors if of == name]
    wanted = layer_ids(have if layers is None else layers, "patch.layers", f"captured were {have}", have)
    picked = _source_rows(capture, SelectSpec.read(source, "patch.source"), sample)
    into = SelectSpec.read(target, "patch.target") or SelectSpec.parse("prompt")
    if any(field.startswith("generation") for field in into.canonical()):
        message = f"{str(into)!r} names generated rows: a patch goes into rows of the prompt"
        raise SpecError("E_SELECTION", "patch.target", message)
    tensors = [capture.tensors[name, layer][picked].float().numpy() for layer in wanted]
    if heads is not None:
        size = capture.layouts[name][wanted[0]].head_size or 0
        columns = [head * size + place for head in sorted(heads) for place in range(size)]
        tensors = [tensor[:, columns] for tensor in tensors]
    given = {"site": name, "layers": wanted, "vector": np.stack(tensors), "target": into, "heads": heads}
    return InterventionSpec(ops=(Patch.of(given, "patch"),))


# --- what a caller may give as a vector


@dataclass(frozen=True)
class _Layered:
    """A tensor with its layers; own: the layers came with it, one tensor for each."""

    tensor: Artifact
    layers: Any
    site: str | None
    own: bool


def _per_layer(value: Any, layers: Any, path: str, site: str | None) -> _Layered:
    """A vector in any of its forms, with the layers that it is for."""
    mapping, of_file = _mapping(value, path)
    if mapping is None:
        if layers is None:
            raise spec_error("E_LAYER_RANGE", path.partition(".")[0] + ".layers", "name layers: one vector has none")
        artifact = Artifact.of(value) if isinstance(value, str | Artifact) else Artifact.of(finite_array(value, path))
        return _Layered(artifact, layers, site, own=False)
    if of_file is not None and site is not None and site != of_file:
        raise spec_error("E_SITE", path.partition(".")[0] + ".site", f"these vectors are of {of_file}, not of {site}")
    have = sorted(mapping)
    wanted = layer_ids(have if layers is None else layers, path.partition(".")[0] + ".layers", f"it has {have}", have)
    arrays = [finite_array(mapping[layer], f"{path}[{layer}]") for layer in wanted]
    if len({array.shape for array in arrays}) > 1:
        raise SpecError("E_BAD_PARAM", path, f"has vectors of different shapes: {[list(a.shape) for a in arrays]}")
    return _Layered(Artifact.of(np.stack(arrays)), wanted, site or of_file, own=True)


def _mapping(given: Any, path: str) -> tuple[Mapping[int, Any] | None, str | None]:
    """Layer → vector, and the site, of what holds several; None for one tensor or an artifact's id."""
    value = given
    if isinstance(given, PathLike) or (isinstance(given, str) and not given.startswith("sha256:")):
        from .formats.vectors import read_vectors

        value: Any = read_vectors(given)  # pyright: ignore[reportUnknownArgumentType]
    if is_mapping(value):
        return dict(value), None  # pyright: ignore[reportReturnType]
    if hasattr(value, "vectors") and hasattr(value, "provenance"):  # our own VectorFile
        return value.vectors, value.site
    if hasattr(value, "directions") and is_mapping(value.directions):  # repeng: what block `layer` leaves
        return dict(value.directions), "resid_post"  # pyright: ignore[reportReturnType]
    if hasattr(value, "layer_activations"):  # steering-vectors
        kind = getattr(value, "layer_type", "decoder_block")
        if kind not in _LAYER_TYPES:
            known = ", ".join(_LAYER_TYPES)
            raise spec_error("E_SITE", path, f"a SteeringVector of {kind!r} has no site here; these have: {known}")
        return dict(value.layer_activations), _LAYER_TYPES[kind]
    return None, None


_LAYER_TYPES: dict[str, str] = {"decoder_block": "resid_post", "self_attn": "attn_out", "mlp": "mlp_out"}
"""steering-vectors' names of places; the sublayers' are equal where a block has no post-norm."""


def _spec(kind: type[Op], rows: Rows, gate: Any, **given: Any) -> InterventionSpec:
    set_ = {name: value for name, value in given.items() if value is not None and value is not False}
    scope = SelectSpec.read(rows, f"{kind.root}.rows")
    return InterventionSpec(ops=(kind.of(set_ | {"scope": scope, "gate": gate}, kind.root),))


# --- rows of a capture


def _captured_site(capture: CaptureResult, site: str | None) -> Site:
    if site is None and len(capture.sites) == 1:
        return capture.sites[0]
    if site is None or site not in capture.sites:
        raise spec_error("E_SITE", "patch.site", f"which site? This capture has: {', '.join(capture.sites)}")
    return as_site(site, "patch.site")


@dataclass(frozen=True)
class _Table:
    """Rows of one sample, as `resolve` reads them."""

    position: NDArray[np.int64]
    token_id: NDArray[np.int64]
    prompt_len: NDArray[np.int64]


def _source_rows(capture: CaptureResult, source: SelectSpec | None, sample: int) -> NDArray[np.int64]:
    """Which rows of the capture's tensors `source` selects of a sample; all of them must have been captured."""
    capture.sample_positions(sample)  # raises for a sample that is not there, or failed
    labels, output = capture.labels, capture.outputs[sample]
    mine = np.flatnonzero((labels.sample == sample) & (labels.choice <= 0))
    ids = np.array([*output.prompt_token_ids, *output.token_ids[:-1]], dtype=np.int64)
    prompt_len = np.full(len(ids), len(output.prompt_token_ids), dtype=np.int64)
    whole = _Table(np.arange(len(ids), dtype=np.int64), ids, prompt_len)
    wanted = whole.position[resolve(source, whole)]
    missing = sorted(set(wanted.tolist()) - set(labels.position[mine].tolist()))
    if missing or not len(wanted):
        what = f"position {missing[0]} was not captured" if missing else "it selects no row"
        raise SpecError("E_SELECTION", "patch.source", f"{str(source or 'all')!r} of sample {sample}: {what}")
    return mine[np.isin(labels.position[mine], wanted)]
