"""InterventionSpec: ops in order, as plain data with canonical JSON; and the two ops that are no JSON.

What needs the model to be seen as wrong (layers, widths, heads, experts) is checked by `bind` (core/binding.py),
before the model runs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import numpy as np
from pydantic import BeforeValidator, SerializeAsAny, model_validator

from .artifacts import Artifact
from .errors import SpecError, choices, spec_error
from .gates import TensorField
from .narrow import is_list, is_mapping
from .op import STREAM, OnSublayers, Op
from .ops import KINDS, AnyOp, Replace
from .select import Rows, SelectSpec, resolve
from .sites import Site
from .wire import Wire

MAX_BYTES: Final = 64 * 1024
"""Of the canonical JSON of a spec, tensors being ids."""


class Function(Op):
    """A user's own code in process: `fn(rows, labels)` gives the rows changed, or None to leave them.

    rows: float32 `[rows, width]` of one request, a tensor on the model's device. labels: their Labels.
    """

    root: ClassVar[str] = "function"
    kinds_sites: ClassVar[tuple[Site, ...]] = (*STREAM, "router_logits")

    kind: Literal["function"] = "function"
    fn: Callable[..., Any]


class Patch(OnSublayers):
    """Rows of another run, for the rows that `target` selects of a prompt, paired in order; lowered to `replace`.

    vector: `[layers, rows, width]`.
    """

    root: ClassVar[str] = "patch"
    ranks: ClassVar[Mapping[str, int]] = {"vector": 2}

    kind: Literal["patch"] = "patch"
    vector: TensorField
    target: SelectSpec

    def lowered(self, rows: Rows, path: str) -> Replace:
        """The same for one prompt, whose rows are given: `replace` at absolute positions."""
        found = rows.position[resolve(self.target, rows) & (rows.position < rows.prompt_len)]
        array = self.vector.array
        assert array is not None, "a patch is made from rows, not from an id"
        if len(found) != array.shape[-2]:
            message = f"{str(self.target)!r} selects {len(found)} rows of the prompt, and the source has "
            raise SpecError("E_SELECTION", f"{path}.target", f"{message}{array.shape[-2]}: they are paired in order")
        return Replace.of({
            "site": self.site, "layers": self.layers, "heads": self.heads, "vector": self.vector,
            "positions": found.tolist(), "cap_norm": self.cap_norm,
        }, path)  # fmt: skip

    @model_validator(mode="after")
    def _rows_alone(self) -> Self:
        if self.scope is not None or self.gate is not None:
            name = "scope" if self.scope is not None else "gate"
            raise SpecError("E_BAD_PARAM", name, "a patch goes where its target says, always")
        if self.vector.array is None or self.vector.array.ndim != 3:
            raise SpecError("E_BAD_PARAM", "vector", "a patch is made of rows, [layers, rows, width]")
        return self


IN_PROCESS: Final = {
    "patch": "a patch has a JSON form for one prompt: use spec.lowered(rows)",
    "function": "a function runs in process only: it is not stored, hashed or sent",
}
"""Kinds that have no JSON form, and why."""


def _as_op(value: Any, path: str) -> Op:
    """An op from an op or a mapping with its kind; E_UNKNOWN_KIND names the kinds there are."""
    if isinstance(value, (Function, Patch, *KINDS.values())):
        return value
    if not is_mapping(value):
        raise spec_error("E_BAD_PARAM", path, f"an op is an object with a kind, got {value!r:.60}")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise spec_error("E_UNKNOWN_KIND", f"{path}.kind", f"no kind {kind!r:.60}; there are: {choices(tuple(KINDS))}")
    return KINDS[kind].of(value, path)


def _ops(value: Any) -> Any:
    if not is_list(value) or not value:
        raise spec_error("E_BAD_PARAM", "", f"ops is a list of one or more, got {value!r:.60}")
    return tuple(_as_op(op, f"[{place}]") for place, op in enumerate(value))


class InterventionSpec(Wire):
    """Ops that apply in order; specs are added to make one.

    >>> spec = InterventionSpec(ops=[{"kind": "add", "layers": 3, "vector": [0.0, 1.0], "scope": "generated"}])
    >>> [str(op.scope) for op in (spec + spec).ops]
    ['generated', 'generated']
    """

    root: ClassVar[str] = "steering"

    ops: Annotated[tuple[SerializeAsAny[Op], ...], BeforeValidator(_ops, json_schema_input_type=tuple[AnyOp, ...])]

    @classmethod
    def read(cls, value: Any, path: str = "steering") -> InterventionSpec:
        """A spec from a spec, its object, or a list of ops."""
        if isinstance(value, Op) or is_list(value):
            value = {"ops": [value] if isinstance(value, Op) else value}
        return cls.of(value, path)

    def __add__(self, other: InterventionSpec) -> Self:
        if not isinstance(other, InterventionSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return type(self)(ops=(*self.ops, *other.ops))

    def artifacts(self) -> dict[str, Artifact]:
        """Every tensor of the spec, gates' too, by id."""
        found = [artifact for op in self.ops for artifact in _tensors(op)]
        return {artifact.id: artifact for artifact in found}

    def canonical(self) -> dict[str, Any]:
        """The object with only what is set, tensors by id; E_UNKNOWN_KIND for what has no JSON form."""
        for place, op in enumerate(self.ops):
            if op.kind in IN_PROCESS:
                raise spec_error("E_UNKNOWN_KIND", f"steering.ops[{place}].kind", IN_PROCESS[op.kind])
        return {"ops": [op.canonical() for op in self.ops]}

    def described(self) -> dict[str, Any]:
        """The canonical object, with code named where it has no JSON form: to be read, not to be run again."""
        return {
            "ops": [
                {"kind": op.kind, "site": op.site, "layers": list(op.layers)}
                if op.kind in IN_PROCESS
                else op.canonical()
                for op in self.ops
            ]
        }

    def canonical_json(self) -> str:
        """Sorted keys, no spaces; E_SPEC_TOO_LARGE past 64 KiB."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        if len(text.encode()) > MAX_BYTES:
            message = f"{len(text.encode()):,} bytes of JSON, at most {MAX_BYTES:,}: name fewer positions or ops"
            raise SpecError("E_SPEC_TOO_LARGE", "steering", message)
        return text

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON, in hex: equal specs have equal ones."""
        return sha256(self.canonical_json().encode()).hexdigest()

    def without_patches(self) -> InterventionSpec | None:
        """The ops that mean the same for every prompt; None when there is none."""
        ops = tuple(op for op in self.ops if not isinstance(op, Patch))
        return InterventionSpec(ops=ops) if ops else None

    def lowered(self, rows: Rows, path: str = "steering") -> InterventionSpec:
        """The spec for one prompt, whose whole table of rows is given: patches become `replace` at positions."""
        if not any(isinstance(op, Patch) for op in self.ops):
            return self
        ops = [
            op.lowered(rows, f"{path}.ops[{place}]") if isinstance(op, Patch) else op
            for place, op in enumerate(self.ops)
        ]
        return InterventionSpec(ops=ops)  # pyright: ignore[reportArgumentType]


def _tensors(op: Op) -> list[Artifact]:
    return [*op.tensors().values(), *([] if op.gate is None else [op.gate.readout.tensor])]


def block_salt(spec: InterventionSpec | None, rows: Rows, end: int, decisions: Sequence[bool | None] = ()) -> str:
    """What a cache's key must hold of the steering of one request's rows before `end`; "" when none of them changed.

    Covers, for each op that touched one of these rows, its content, the positions that it touched and its gate's
    decision (`decisions`, one per op): two requests have one salt only where the same was done to their rows.
    """
    if spec is None:
        return ""
    before = rows.position < end
    touched: list[Any] = []
    for place, op in enumerate(spec.ops):
        decision = decisions[place] if place < len(decisions) else None
        if op.silent or decision is False:
            continue
        if op.kind in IN_PROCESS:
            raise spec_error("E_UNKNOWN_KIND", f"steering.ops[{place}].kind", IN_PROCESS[op.kind])
        positions = sorted(rows.position[acts_on(op, rows) & before].tolist())
        if positions:
            content = {name: value for name, value in op.canonical().items() if name != "scope"}
            touched.append([content, positions, decision])
    if not touched:
        return ""
    return sha256(json.dumps(touched, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_GATED: Final = SelectSpec.parse("generated, prompt[-1]")


def acts_on(op: Op, rows: Rows, layer: int | None = None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows an op acts on, `[rows]`, by its scope, positions and gate's reach, if its gate is open.

    layer: of which; a gate reaches the last prompt row only past its evidence. None: of any layer.
    """
    scope = _GATED if op.gate is not None and op.scope is None else op.scope
    found = resolve(scope, rows)
    if (positions := getattr(op, "positions", None)) is not None:
        found &= np.isin(rows.position, positions)
    if op.gate is not None and (op.layers[-1] if layer is None else layer) <= op.gate.deepest:
        found &= rows.position >= rows.prompt_len
    return found


@dataclass(frozen=True)
class OpReceipt:
    """What one op did at one layer: rows selected, computed, reused; in an answer, over all its choices.

    relative: mean of ‖change‖ / ‖row‖ over the computed rows, which is s·‖v‖/‖resid‖ for `add`; None where no row
    was computed. skipped: why the op was not applied (strength 0, a closed gate); its counts are then 0.
    """

    op: int
    kind: str
    site: Site
    layer: int
    selected: int
    computed: int
    reused: int = 0
    relative: float | None = None
    skipped: str | None = None

    @property
    def complete(self) -> bool:
        """Whether every selected row was steered."""
        return self.selected == self.computed + self.reused

    def __add__(self, other: OpReceipt) -> OpReceipt:
        """The same op at the same layer on more rows: counts add up, changes are averaged over rows."""
        rows = self.computed + other.computed
        changed = [one.relative * one.computed for one in (self, other) if one.relative is not None]
        return replace(
            self,
            selected=self.selected + other.selected,
            computed=rows,
            reused=self.reused + other.reused,
            relative=sum(changed) / rows if rows else None,
            skipped=self.skipped and other.skipped,
        )


def receipts_together(receipts: Iterable[Sequence[OpReceipt]]) -> tuple[OpReceipt, ...]:
    """The receipts of several requests with one spec, added up by op and layer."""
    found: dict[tuple[int, int], OpReceipt] = {}
    for receipt in (one for of in receipts for one in of):
        have = found.get((receipt.op, receipt.layer))
        found[receipt.op, receipt.layer] = receipt if have is None else have + receipt
    return tuple(found[key] for key in sorted(found))


def warn_of_idle(receipts: Iterable[Sequence[OpReceipt]]) -> None:
    """Warn once of ops that selected no row of some request: legal, and seldom meant."""
    idle = {
        (one.op, one.kind)
        for of in receipts
        for one in of
        if not one.skipped and not any(other.selected for other in of if other.op == one.op)
    }
    if idle:
        names = ", ".join(f"op {place} ({kind})" for place, kind in sorted(idle))
        warnings.warn(f"no row was selected by {names} of some request: nothing was steered there", stacklevel=4)
