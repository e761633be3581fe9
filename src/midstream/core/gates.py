"""What decides whether an op acts: gates over the prompt, and the alignment of a row (docs/semantics.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, InstanceOf, PlainSerializer, WithJsonSchema, field_validator, model_validator

from .artifacts import Artifact, Floats
from .errors import SpecError, spec_error
from .narrow import is_mapping, items_of, plain
from .sites import Site, as_site, layer_ids
from .wire import Int, Number, Wire

GATE_SITES: tuple[Site, ...] = ("resid_pre", "resid_post", "attn_out", "mlp_out")

TensorField = Annotated[
    InstanceOf[Artifact],
    BeforeValidator(Artifact.of),
    PlainSerializer(lambda artifact: artifact.id, return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^sha256:[0-9a-f]{64}$", "description": "an artifact's id"}),
]
"""A float32 tensor: an id on the wire, an array in Python."""


def listed_layers(data: Any) -> tuple[Any, list[Any] | None]:
    """A model's input with its `layers` as a list, and that list; None where there is no list of them."""
    given = plain(data.get("layers")) if is_mapping(data) else None
    if not hasattr(given, "__iter__") or isinstance(given, str | bytes | Mapping):
        return data, None
    layers = items_of(given)
    return dict(data) | {"layers": layers}, layers


def out_of_order(name: str, layers: list[Any]) -> SpecError:
    """What is said of layers that are sorted where a tensor may hold one for each, in the order that was given."""
    message = f"ascend, each once, where {name} may have a tensor for each; got {layers!r:.60}"
    return SpecError("E_LAYER_RANGE", "layers", message)


class OnlyAligned(Wire):
    """A modifier: the op acts on rows whose cosine with, or projection on, its direction is above a number."""

    root: ClassVar[str] = "only_aligned"

    measure: Literal["cosine", "projection"]
    above: Number


class Readout(Wire):
    """One number off the pooled evidence x of a layer: `affine` w·x + b, or `cosine` of x and d.

    w, d: `[hidden]`, or one per evidence layer, `[layers, hidden]`.
    """

    root: ClassVar[str] = "readout"

    kind: Literal["affine", "cosine"]
    w: TensorField | None = None
    b: Number = 0.0
    d: TensorField | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        needed, other = ("w", "d") if self.kind == "affine" else ("d", "w")
        if getattr(self, needed) is None or getattr(self, other) is not None:
            path = needed if getattr(self, needed) is None else other
            raise SpecError("E_BAD_PARAM", path, f"the readout {self.kind} takes {needed}, and no {other}")
        if self.kind == "cosine" and self.b:
            raise SpecError("E_BAD_PARAM", "b", "the readout cosine takes no b: put it into the rule")
        return self

    @property
    def name(self) -> str:
        """Which of w and d it has."""
        return "w" if self.kind == "affine" else "d"

    @property
    def tensor(self) -> Artifact:
        """w or d."""
        found = self.w if self.kind == "affine" else self.d
        assert found is not None, "checked when the readout was made"
        return found


class Rule(Wire):
    """How a gate decides: `sum` of the readouts + bias ≥ 0, or `per_layer` each readout against a threshold."""

    root: ClassVar[str] = "rule"

    kind: Literal["sum", "per_layer"]
    bias: Number = 0.0
    threshold: Number | None = None
    compare: Literal["ge", "le"] | None = None
    combine: Literal["any", "all"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, data: Any) -> Any:
        per_layer = is_mapping(data) and data.get("kind") == "per_layer"
        return {"compare": "ge", "combine": "any"} | dict(data) if per_layer else data

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.kind == "per_layer") != (self.threshold is not None):
            raise SpecError("E_BAD_PARAM", "threshold", "the rule per_layer takes a threshold, the rule sum takes none")
        if self.kind == "per_layer" and self.bias:
            raise SpecError("E_BAD_PARAM", "bias", "the rule per_layer takes no bias: put it into the threshold")
        for name in ("compare", "combine"):
            if self.kind == "sum" and getattr(self, name) is not None:
                raise SpecError("E_BAD_PARAM", name, f"the rule sum takes no {name}: it asks for Σ + bias ≥ 0")
        return self

    def decide(self, readouts: list[float]) -> bool:
        """Whether the gate is open; no evidence is closed. per_layer: `ge` and `any` where nothing else is said.

        >>> Rule(kind="sum", bias=-1.0).decide([0.5, 0.5]), Rule(kind="sum").decide([])
        (True, False)
        """
        if not readouts:
            return False
        if self.kind == "sum":
            return sum(readouts) + self.bias >= 0
        assert self.threshold is not None, "checked when the rule was made"
        bound = self.threshold
        holds = [value <= bound if self.compare == "le" else value >= bound for value in readouts]
        return all(holds) if self.combine == "all" else any(holds)


class Gate(Wire):
    """Decided once over the whole prompt, at its last row: whether an op acts at all.

    The rows of the prompt at `layers` of `site` are pooled (mean, or the last), each layer's pool is read out, and
    the rule makes one decision of the readouts.
    """

    root: ClassVar[str] = "gate"

    layers: tuple[Int, ...]
    site: Site = "resid_post"
    pooling: Literal["mean", "last"] = "mean"
    readout: Readout
    rule: Rule

    @field_validator("layers", mode="before", json_schema_input_type=int | list[int])
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return layer_ids(value, "")

    @field_validator("site", mode="before")
    @classmethod
    def _site(cls, value: Any) -> Any:
        site = as_site(value, "")
        if site not in GATE_SITES:
            raise spec_error("E_SITE", "", f"a gate reads {', '.join(GATE_SITES)}; not {site}")
        return site

    @model_validator(mode="wrap")
    @classmethod
    def _layers_in_order(cls, data: Any, handler: Callable[[Any], Any]) -> Any:
        data, given = listed_layers(data)
        made = handler(data)
        array = made.readout.tensor.array
        if given is not None and given != list(made.layers) and (array is None or array.ndim > 1):
            raise out_of_order("the readout", given)
        return made

    @model_validator(mode="after")
    def _readout_fits(self) -> Self:
        if (array := self.readout.tensor.array) is not None:
            self.check_readout(array, f"readout.{self.readout.name}")
        return self

    def check_readout(self, array: Floats, path: str) -> None:
        """E_BAD_PARAM for a readout tensor that is no `[hidden]`, nor one per evidence layer, or points nowhere."""
        if array.ndim not in (1, 2) or (array.ndim == 2 and len(array) != len(self.layers)):
            message = f"is [hidden] or one per evidence layer, {list(self.layers)}; got {list(array.shape)}"
            raise SpecError("E_BAD_PARAM", path, message)
        if self.readout.kind == "cosine" and not array.any(axis=-1).all():
            raise SpecError("E_BAD_PARAM", path, "is a zero direction, which points nowhere")

    @property
    def deepest(self) -> int:
        """The deepest evidence layer."""
        return self.layers[-1]
