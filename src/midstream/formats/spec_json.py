"""InterventionSpecs as JSON with their tensors inside, encoded as in `wire`: one text that needs no registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from midstream.core.interventions import InterventionSpec
from midstream.core.narrow import is_list, is_mapping
from midstream.core.ops import KINDS

from .wire import decode_tensor, encode_tensor


def decode_spec(obj: Any, path: str = "steering", *, max_bytes: int | None = None) -> InterventionSpec:
    """The spec of a JSON object whose tensors are artifacts' ids or inline.

    max_bytes: of one inline tensor, once it is expanded. Raises SpecError below the JSON path `path`.

    >>> spec = InterventionSpec(ops=[{"kind": "add", "layers": 3, "vector": [0.0, 1.0]}])
    >>> decode_spec(encode_spec(spec)) == spec
    True
    """
    limit = {} if max_bytes is None else {"max_bytes": max_bytes}

    def decoded(value: Any, at: str) -> Any:
        return decode_tensor(value, at, **limit) if is_mapping(value) else value

    return InterventionSpec.of(_with_tensors(obj, path, decoded), path)


def encode_spec(spec: InterventionSpec) -> dict[str, Any]:
    """The canonical object with every tensor inline; E_BAD_PARAM for a tensor that is an id alone."""
    tensors = spec.artifacts()

    def encoded(value: Any, at: str) -> Any:
        array = tensors[value].array
        return value if array is None else encode_tensor(torch.tensor(array))

    return _with_tensors(spec.canonical(), "steering", encoded)


def _with_tensors(obj: Any, path: str, change: Callable[[Any, str], Any]) -> Any:
    """A copy of a spec's object in which every tensor's value is changed; what is no spec stays for its reader."""
    if not is_mapping(obj) or not is_list(obj.get("ops")):
        return obj
    return dict(obj) | {"ops": [_op(op, f"{path}.ops[{place}]", change) for place, op in enumerate(obj["ops"])]}


def _op(op: Any, path: str, change: Callable[[Any, str], Any]) -> Any:
    kind = KINDS.get(op["kind"]) if is_mapping(op) and isinstance(op.get("kind"), str) else None
    if kind is None:
        return op
    out = {name: change(value, f"{path}.{name}") if name in kind.ranks else value for name, value in op.items()}
    gate = out.get("gate")
    if is_mapping(gate) and is_mapping(gate.get("readout")):
        at = f"{path}.gate.readout"
        read = {name: change(v, f"{at}.{name}") if name in ("w", "d") else v for name, v in gate["readout"].items()}
        out["gate"] = dict(gate) | {"readout": read}
    return out
