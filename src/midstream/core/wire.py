"""The base of every wire model: closed, frozen, and refusing with `CODE at path: message`."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from .errors import Code, SpecError, json_path, spec_error
from .narrow import is_int, is_mapping


def _plain_int(value: Any) -> int:
    """An int from anything that is an integer (NumPy's too), but no bool and no float."""
    if not is_int(value):
        raise ValueError(f"must be an integer, not {type(value).__name__}")
    if abs(int(value)) >= 1 << 63:
        raise ValueError("is too large: 64 bits hold it not")
    return int(value)


def _plain_number(value: Any) -> float:
    """A finite float from any real number (NumPy's too), but no bool and no text."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"must be a number, got {value!r:.60}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"is too large for a float: {value!r:.20}…") from None


Int = Annotated[int, BeforeValidator(_plain_int)]
Number = Annotated[float, BeforeValidator(_plain_number)]


class Wire(BaseModel):
    """A closed, frozen model whose constructor raises `SpecError` instead of pydantic's error.

    `root` names the model in JSON paths; `bad_value` is the code of a value that does not fit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    root: ClassVar[str] = "$"
    bad_value: ClassVar[Code] = "E_BAD_PARAM"

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            found = first_error(error, type(self), type(self).root)
            found.root = type(self).root
            raise found from None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        """The JSON Schema, whose words for bounds are the standard's (pydantic knows none past a validator)."""
        found = handler(core_schema)
        _standard_bounds(handler.resolve_ref_schema(found).get("properties", {}))
        return found

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Only what is set."""
        return ((name, value) for name, value in super().__repr_args__() if value is not None)

    @classmethod
    def of(cls, value: Any, path: str | None = None) -> Self:
        """`value` as this model: an instance is taken as it is, a mapping is validated below `path`."""
        path = cls.root if path is None else path
        if isinstance(value, cls):
            return value
        if not is_mapping(value):
            got = type(value).__name__
            raise spec_error(cls.bad_value, path, f"must be an object or a midstream {cls.__name__}, not {got}")
        if odd := [key for key in value if not isinstance(key, str)]:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise spec_error("E_UNKNOWN_FIELD", path, f"field names are texts, got {odd[0]!r}")
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise first_error(error, cls, path) from None


_BOUNDS: Final = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def _standard_bounds(part: Any) -> None:
    """Rename pydantic's bounds in a part of a schema, in place."""
    if isinstance(part, list):
        for one in part:  # pyright: ignore[reportUnknownVariableType]
            _standard_bounds(one)
    elif is_mapping(part):
        schema: Any = part
        for name in [name for name in schema if name in _BOUNDS and not is_mapping(schema[name])]:
            schema[_BOUNDS[name]] = schema.pop(name)
        for one in list(schema.values()):
            _standard_bounds(one)


def first_error(error: ValidationError, model: type[Wire], root: str) -> SpecError:
    """pydantic's first complaint as one `SpecError`, with the JSON path below `root`."""
    first = error.errors(include_url=False)[0]
    path, cause = json_path(root, first["loc"]), first.get("ctx", {}).get("error")
    location = first["loc"]
    if isinstance(cause, SpecError):  # raised by a validator, or by a nested model: its path continues ours
        inner = cause.path[len(cause.root) :].lstrip(".")
        joined = path + inner if inner.startswith("[") or not inner or not path else f"{path}.{inner}"
        return type(cause)(cause.code, joined, cause.message)
    if first["type"] == "extra_forbidden":
        fields = ", ".join(model.model_fields)
        return spec_error("E_UNKNOWN_FIELD", path, f"unknown field {location[-1]!r}; there are: {fields}")
    message = first["msg"].removeprefix("Value error, ")
    if cause is None and first["type"] != "missing":
        message += f", got {first['input']!r:.80}"
    return spec_error(model.bad_value, path, message)
