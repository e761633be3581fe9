"""Artifacts: one float32 tensor under the hash of its bytes (docs/semantics.md, "Interventions")."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .errors import spec_error

TENSOR_NAME: Final = "tensor"
_ID: Final = re.compile(r"sha256:[0-9a-f]{64}")

Floats = NDArray[np.float32]


def artifact_bytes(array: Floats) -> bytes:
    """The file of an artifact: safetensors with one float32, contiguous tensor named `tensor` and no metadata."""
    from safetensors.numpy import save

    return save({TENSOR_NAME: np.array(array, dtype="<f4", order="C")})


def as_artifact_id(value: Any, path: str = "") -> str:
    """`value` as an artifact's id, or E_BAD_PARAM."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise spec_error("E_BAD_PARAM", path, f"an artifact's id is sha256: and 64 hex digits, got {value!r:.90}")
    return value


@dataclass(frozen=True, eq=False)
class Artifact:
    """A finite float32 array, or the id of one that a registry holds; equal to another when the ids are.

    Made by `Artifact.of`, which checks; `array` is read-only.

    >>> Artifact.of([0.0, 1.0]) == Artifact.of(Artifact.of([0.0, 1.0]).id)
    True
    """

    given_id: str | None = None
    array: Floats | None = field(default=None, repr=False)

    @cached_property
    def id(self) -> str:
        """`sha256:` and the hash of the artifact's file."""
        if self.given_id is not None:
            return self.given_id
        assert self.array is not None, "an artifact is an id or an array"
        return f"sha256:{sha256(artifact_bytes(self.array)).hexdigest()}"

    @classmethod
    def of(cls, value: Any) -> Artifact:
        """From an array, a tensor, nested lists of numbers, an id, or an artifact.

        Raises E_BAD_PARAM for what is none of them, is empty, or has values that are not finite in float32.
        """
        if isinstance(value, Artifact):
            return value
        if isinstance(value, str):
            return cls(given_id=as_artifact_id(value))
        return cls(array=finite_array(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Artifact) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Artifact({self.id[:15]}…{'' if self.array is None else f', {list(self.array.shape)}'})"


def finite_array(value: Any, path: str = "") -> Floats:
    """A read-only float32 copy of an array, a tensor of any device and dtype, or nested lists of numbers."""
    value = _of_torch(value, path) if hasattr(value, "detach") else value
    try:
        raw = np.array(value)
    except (ValueError, RuntimeError, TypeError):
        raise spec_error("E_BAD_PARAM", path, f"must be numbers in rows of one length, got {value!r:.60}") from None
    if raw.dtype.kind not in "fiu":
        raise spec_error("E_BAD_PARAM", path, f"must be numbers, got {value!r:.60}")
    if not raw.size:
        raise spec_error("E_BAD_PARAM", path, "is empty")
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused in the next line
        array = np.array(raw, dtype=np.float32, order="C")
    if not np.isfinite(array).all():
        raise spec_error("E_BAD_PARAM", path, "has values that are not finite in float32")
    array.setflags(write=False)
    return array


def _of_torch(value: Any, path: str) -> Any:
    """A tensor as an array; float32 where NumPy has no such type."""
    name = str(value.dtype).removeprefix("torch.")
    if name == "bool" or name.startswith("complex"):
        raise spec_error("E_BAD_PARAM", path, f"must be real numbers, got a tensor of {name}")
    if str(value.layout) != "torch.strided" or value.device.type == "meta":
        what = "a sparse tensor" if value.device.type != "meta" else "a tensor on the meta device, without values"
        raise spec_error("E_BAD_PARAM", path, f"is {what}: give a dense one")
    return value.detach().float().cpu().numpy()
