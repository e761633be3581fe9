"""What every kind of intervention has: where it acts, on which rows, with which tensors (docs/semantics.md).

A tensor's own rank is what one layer takes; with one more axis in front it holds one tensor per layer, in the order
of `layers`. At `head_out` a row is the listed heads' values side by side, in ascending order of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, StrictBool, field_validator, model_validator

from .artifacts import Artifact, Floats
from .errors import SpecError, choices, spec_error
from .gates import Gate, listed_layers, out_of_order
from .narrow import is_int, items_of, plain
from .select import Selection, SelectSpec
from .sites import Site, as_site, layer_ids
from .wire import Int, Wire

STREAM: Final[tuple[Site, ...]] = ("resid_post", "resid_pre", "attn_out", "mlp_out", "head_out")


class Op(Wire):
    """What every op has: where it acts (site, layers, heads), on which rows (scope), and whether (gate).

    Subclasses name their tensors with the rank that one layer takes (`ranks`), and the sites that they act on.
    """

    root: ClassVar[str] = "op"
    kinds_sites: ClassVar[tuple[Site, ...]] = ("resid_post",)
    ranks: ClassVar[Mapping[str, int]] = {}

    kind: Any  # a name, which each subclass fixes
    site: Site = "resid_post"
    layers: tuple[Int, ...]
    scope: Selection = None
    gate: Gate | None = None

    @field_validator("layers", mode="before", json_schema_input_type=int | list[int])
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return layer_ids(value, "")

    @field_validator("site", mode="before")
    @classmethod
    def _site(cls, value: Any) -> Any:
        site = as_site(value, "")
        if site not in cls.kinds_sites:
            raise spec_error("E_SITE", "", f"{cls.root} acts on {choices(cls.kinds_sites)}; not on {site}")
        return site

    @model_validator(mode="wrap")
    @classmethod
    def _layers_in_order(cls, data: Any, handler: Callable[[Any], Any]) -> Any:
        data, given = listed_layers(data)
        made = handler(data)
        if given is not None and given != list(made.layers):
            for name, artifact in made.tensors().items():
                if artifact.array is None or artifact.array.ndim > made.rank(name):
                    raise out_of_order(name, given)
        return made

    @model_validator(mode="after")
    def _gated_scope(self) -> Self:
        if self.gate is not None and self.scope is not None:
            _check_gated_scope(self.scope, self.layers, self.gate)
        return self

    @model_validator(mode="after")
    def _tensors_fit(self) -> Self:
        for name, artifact in self.tensors().items():
            if artifact.array is not None:
                self.check_tensor(name, artifact.array)
        return self

    def tensors(self) -> dict[str, Artifact]:
        """The op's own tensors by field name (a gate has its own)."""
        return {name: found for name in self.ranks if (found := getattr(self, name)) is not None}

    def rank(self, name: str) -> int:
        """The rank of a tensor that is the same for all layers."""
        return self.ranks[name]

    def check_tensor(self, name: str, array: Floats) -> None:
        """E_BAD_PARAM for a tensor of a wrong rank, or with another number of layers than the op has."""
        own = self.rank(name)
        if array.ndim not in (own, own + 1):
            wanted = " or ".join(_SHAPES[rank] for rank in (own, own + 1))
            raise SpecError("E_BAD_PARAM", name, f"has the shape {list(array.shape)}; {self.kind} takes {wanted}")
        if array.ndim > own and len(array) != len(self.layers):
            message = f"is for {len(array)} layers, and the op has layers {list(self.layers)}"
            raise SpecError("E_BAD_PARAM", name, message)
        for place, part in enumerate(array if array.ndim > own else [array]):
            self.check_values(name if array.ndim == own else f"{name}[{place}]", part)

    def check_values(self, path: str, array: Floats) -> None:
        """E_BAD_PARAM for one layer's tensor that this kind cannot use."""

    def of_layer(self, name: str, layer: int) -> Floats:
        """The tensor of one layer, of the op's own rank; the artifact must hold its array."""
        array = self.tensors()[name].array
        assert array is not None, "artifacts are fetched before an op is bound"
        return array[self.layers.index(layer)] if array.ndim > self.rank(name) else array

    @property
    def silent(self) -> str | None:
        """Why the op would change nothing and is not applied; None when it acts."""
        return "strength 0" if getattr(self, "strength", None) == 0 else None

    def canonical(self) -> dict[str, Any]:
        """The op with only what is set, tensors by id: what is stored, hashed and sent."""
        found = self.model_dump(mode="json", exclude_none=True)
        return {name: value for name, value in found.items() if value is not False and value != []}


_SHAPES: Final = {0: "[]", 1: "[width]", 2: "[n, width]", 3: "[layers, n, width]"}


def _check_gated_scope(scope: SelectSpec, layers: tuple[int, ...], gate: Gate) -> None:
    """A gate is decided at the last prompt row: nothing before that can wait for it."""
    named = {name for name in scope.canonical() if not name.startswith(("generation", "exclude_generation"))}
    if named - {"prompt_positions"} or scope.prompt_positions not in (None, (-1,)):
        message = f"a gated op acts on generation rows and prompt[-1]; not on {str(scope)!r}"
        raise SpecError("E_SELECTION", "scope", message)
    if scope.prompt_positions and layers[0] <= gate.deepest:
        message = f"at layer {layers[0]} prompt[-1] comes before the gate's evidence at layer {gate.deepest}"
        raise SpecError("E_SELECTION", "scope", message)


class OnRows(Op):
    """An op on rows of the residual stream, of a sublayer, or of heads; rows may be kept from growing."""

    cap_norm: StrictBool = False


class OnSublayers(OnRows):
    """An op that also acts on what sublayers add and, with a list of heads, on heads."""

    kinds_sites: ClassVar[tuple[Site, ...]] = STREAM

    heads: tuple[Annotated[Int, Field(ge=0)], ...] | None = None

    @field_validator("heads", mode="before", json_schema_input_type=int | list[int] | None)
    @classmethod
    def _heads(cls, value: Any) -> Any:
        return None if value is None else ascending(value, "heads", "their values in a row")

    @model_validator(mode="after")
    def _heads_where_due(self) -> Self:
        if (self.site == "head_out") != (self.heads is not None):
            message = f"{self.site} has none: leave them out, or name the site head_out"
            if self.heads is None:
                message = "head_out takes a list of heads, e.g. heads=[0, 3]"
            raise SpecError("E_BAD_PARAM", "heads", message)
        return self


def ascending(value: Any, what: str, order: str) -> tuple[int, ...]:
    """One or several distinct integers, in the order in which what goes with them stands."""
    given = [value] if is_int(value) else items_of(plain(value))
    if isinstance(value, set | frozenset):  # which have no order to keep
        given = sorted(given)
    if not given or not all(is_int(item) for item in given):
        raise ValueError(f"{what} are integers, one or more, got {value!r:.60}")
    if list(given) != sorted(set(given)):
        raise ValueError(f"{what} ascend, each once, as {order} do, got {value!r:.60}")
    return tuple(int(item) for item in given)
