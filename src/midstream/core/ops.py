"""The kinds of interventions: one closed model each, checked without a model (docs/semantics.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import numpy as np
from pydantic import Field, StrictBool, field_validator, model_validator

from .artifacts import Artifact, Floats
from .errors import SpecError
from .gates import OnlyAligned, TensorField
from .narrow import is_int, is_list, is_mapping, items_of, plain
from .op import STREAM, OnRows, OnSublayers, Op, ascending
from .select import Positions
from .sites import Site
from .wire import Int, Number

COLINEAR: Final = 1e-6
"""Sine of the angle below which two vectors span no plane."""


def _nonzero(path: str, array: Floats, what: str) -> None:
    """E_BAD_PARAM for a zero vector along the last axis."""
    if not np.linalg.norm(array.astype(np.float64), axis=-1).all():
        raise SpecError("E_BAD_PARAM", path, f"is a zero {what}, which points nowhere")


class _Positioned(OnSublayers):
    """A vector for every row, or one for each of some absolute positions."""

    ranks: ClassVar[Mapping[str, int]] = {"vector": 1}

    vector: TensorField
    strength: Number = 1.0
    positions: Positions = None

    @field_validator("positions", mode="before")
    @classmethod
    def _distinct(cls, value: Any) -> Any:
        return None if value is None else ascending(value, "positions", "the rows of the vector")

    @model_validator(mode="after")
    def _positions_count(self) -> Self:
        if self.positions is not None and self.positions[0] < 0:
            message = (
                f"positions are absolute, from 0, got {self.positions[0]}: a scope of prompt[-1] counts from the end"
            )
            raise SpecError("E_BAD_PARAM", "positions", message)
        return self

    def rank(self, name: str) -> int:
        """One vector, or one per position."""
        return 1 if self.positions is None else 2

    def check_tensor(self, name: str, array: Floats) -> None:
        """See Op; `[T, width]` without positions is named."""
        if self.positions is None and array.ndim == 2 and len(array) != len(self.layers):
            message = f"has {len(array)} rows: that is one for each of {len(array)} layers, or of as many positions"
            raise SpecError("E_BAD_PARAM", name, message)
        super().check_tensor(name, array)

    def check_values(self, path: str, array: Floats) -> None:
        """See Op."""
        if self.positions is not None and len(array) != len(self.positions):
            message = f"has {len(array)} rows for {len(self.positions)} positions"
            raise SpecError("E_BAD_PARAM", path, message)


class Add(_Positioned):
    """x + s·v; with norm_match x + s·‖x‖·v/‖v‖. vector: `[width]`, or `[T, width]` with T positions."""

    root: ClassVar[str] = "add"

    kind: Literal["add"] = "add"
    norm_match: StrictBool = False
    only_aligned: OnlyAligned | None = None

    @model_validator(mode="after")
    def _norm_of_the_stream(self) -> Self:
        if self.norm_match and self.site not in ("resid_post", "resid_pre"):
            message = f"norm_match follows the norm of the residual stream; at {self.site} use strength"
            raise SpecError("E_BAD_PARAM", "norm_match", message)
        return self

    def check_values(self, path: str, array: Floats) -> None:
        """See Op."""
        super().check_values(path, array)
        if self.norm_match or self.only_aligned:
            _nonzero(path, array, "vector")


class Replace(_Positioned):
    """(1−s)·x + s·v. vector: `[width]`, or `[T, width]` with T positions."""

    root: ClassVar[str] = "replace"

    kind: Literal["replace"] = "replace"


class Ablate(OnSublayers):
    """x − s·Σ(x·dᵢ)dᵢ over an orthonormal basis of the directions, 0 ≤ s ≤ 1. directions: `[K, width]`, or one."""

    root: ClassVar[str] = "ablate"
    ranks: ClassVar[Mapping[str, int]] = {"directions": 2}

    kind: Literal["ablate"] = "ablate"
    directions: TensorField
    strength: Annotated[Number, Field(ge=0, le=1)] = 1.0
    only_aligned: OnlyAligned | None = None

    @field_validator("directions", mode="after")
    @classmethod
    def _one_direction(cls, value: Artifact) -> Artifact:
        return value if value.array is None or value.array.ndim > 1 else Artifact.of(value.array[None])

    def check_values(self, path: str, array: Floats) -> None:
        """See Op."""
        _nonzero(path, array, "direction")
        if self.only_aligned and len(array) > 1:
            raise SpecError("E_BAD_PARAM", "only_aligned", f"measures one direction, and there are {len(array)}")


class Clamp(OnSublayers):
    """x + (c − x·d̂)d̂: the projection on d̂ becomes c. direction: `[width]`."""

    root: ClassVar[str] = "clamp"
    ranks: ClassVar[Mapping[str, int]] = {"direction": 1}

    kind: Literal["clamp"] = "clamp"
    direction: TensorField
    value: Number
    only_aligned: OnlyAligned | None = None

    def check_values(self, path: str, array: Floats) -> None:
        """See Op."""
        _nonzero(path, array, "direction")


class Rotate(OnRows):
    """The part of x in the plane of b turned: to the angle, or by it, in radians. basis: `[2, hidden]`."""

    root: ClassVar[str] = "rotate"
    ranks: ClassVar[Mapping[str, int]] = {"basis": 2}

    kind: Literal["rotate"] = "rotate"
    basis: TensorField
    angle: Number
    mode: Literal["to", "by"] = "to"

    def check_values(self, path: str, array: Floats) -> None:
        """See Op."""
        if len(array) != 2:
            raise SpecError("E_BAD_PARAM", path, f"a plane has two basis vectors, got {len(array)}")
        _nonzero(path, array, "basis vector")
        first, second = (row / np.linalg.norm(row) for row in array.astype(np.float64))
        if np.linalg.norm(second - (second @ first) * first) < COLINEAR:
            raise SpecError("E_BAD_PARAM", path, "its two vectors are colinear: they span no plane")


class Affine(OnRows):
    """x + s·(xAᵀ + b − x). matrix: A `[hidden, hidden]`; bias: b `[hidden]`."""

    root: ClassVar[str] = "affine"
    ranks: ClassVar[Mapping[str, int]] = {"matrix": 2, "bias": 1}

    kind: Literal["affine"] = "affine"
    matrix: TensorField
    bias: TensorField | None = None
    strength: Number = 1.0

    def check_values(self, path: str, array: Floats) -> None:
        """See Op."""
        if path.startswith("matrix") and array.shape[0] != array.shape[1]:
            raise SpecError("E_BAD_PARAM", path, f"is square, got {list(array.shape)}")

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        a, b = self.matrix.array, None if self.bias is None else self.bias.array
        if a is not None and b is not None and a.shape[-1] != b.shape[-1]:
            raise SpecError("E_BAD_PARAM", "bias", f"has width {b.shape[-1]}, and the matrix {a.shape[-1]}")
        return self


class LowRank(OnRows):
    """x + s·(xPᵀ + b)Qᵀ. P: `[r, hidden]`; bias: b `[r]`; Q: `[hidden, r]` (LoReFT has this form)."""

    root: ClassVar[str] = "low_rank"
    ranks: ClassVar[Mapping[str, int]] = {"P": 2, "Q": 2, "bias": 1}

    kind: Literal["low_rank"] = "low_rank"
    P: TensorField
    Q: TensorField
    bias: TensorField | None = None
    strength: Number = 1.0

    @model_validator(mode="after")
    def _one_rank(self) -> Self:
        p, q, b = self.P.array, self.Q.array, None if self.bias is None else self.bias.array
        if p is not None and q is not None and (p.shape[-2:] != q.shape[-1:-3:-1]):
            raise SpecError(
                "E_BAD_PARAM", "Q", f"is [hidden, r] for P's {list(p.shape[-2:])}, got {list(q.shape[-2:])}"
            )
        if p is not None and b is not None and b.shape[-1] != p.shape[-2]:
            raise SpecError("E_BAD_PARAM", "bias", f"is [r] for P's {list(p.shape[-2:])}, got {list(b.shape)}")
        return self


Experts = tuple[Annotated[Int, Field(ge=0)], ...]


class Router(Op):
    """On the gate's logits: experts on (the largest + 0.01), off (the smallest − 0.01; wins), or shifted by s·std.

    shift: pairs of expert and s, or a mapping; std is the row's, over all its experts.
    """

    root: ClassVar[str] = "router"
    kinds_sites: ClassVar[tuple[Site, ...]] = ("router_logits",)

    kind: Literal["router"] = "router"
    site: Site = "router_logits"
    on: Experts = ()
    off: Experts = ()
    shift: tuple[tuple[Annotated[Int, Field(ge=0)], Number], ...] = ()

    @field_validator("on", "off", mode="before", json_schema_input_type=int | list[int])
    @classmethod
    def _experts(cls, value: Any) -> Any:
        given = [value] if is_int(value) else items_of(plain(value))
        if not all(is_int(item) for item in given):
            raise ValueError(f"experts are integers, got {value!r:.60}")
        return tuple(sorted({int(item) for item in given}))

    @field_validator("shift", mode="before", json_schema_input_type=list[tuple[int, float]] | dict[str, float] | None)
    @classmethod
    def _shift(cls, value: Any) -> Any:
        if value is None:
            return ()
        pairs = list(value.items()) if is_mapping(value) else items_of(plain(value))
        if not all(is_list(pair) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"pairs of expert and number, or a mapping, got {value!r:.60}")
        named = [(int(expert) if re.fullmatch(r"[0-9]+", str(expert)) else expert, by) for expert, by in pairs]
        if not all(is_int(expert) for expert, _ in named):
            raise ValueError(f"experts are integers, got {value!r:.60}")
        if len({expert for expert, _ in named}) != len(named):
            raise ValueError(f"each expert is shifted once, got {value!r:.60}")
        return tuple(sorted(named, key=lambda pair: pair[0]))

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.on or self.off or self.shift):
            raise SpecError("E_BAD_PARAM", "on", "a router op names experts: on, off, or shift")
        return self

    @property
    def silent(self) -> str | None:
        """Why no expert would be touched."""
        only_zero = not self.on and not self.off and all(by == 0 for _, by in self.shift)
        return "strength 0" if only_zero else None


KINDS: Final[dict[str, type[Op]]] = {
    "add": Add,
    "ablate": Ablate,
    "clamp": Clamp,
    "replace": Replace,
    "rotate": Rotate,
    "affine": Affine,
    "low_rank": LowRank,
    "router": Router,
}
STEERED: Final[tuple[Site, ...]] = (*STREAM, "router_logits")
"""Sites that some kind acts on."""
AnyOp = Annotated[Add | Ablate | Clamp | Replace | Rotate | Affine | LowRank | Router, Field(discriminator="kind")]
"""What the wire knows; in process there are also `Function` and `Patch` (core/interventions.py)."""
