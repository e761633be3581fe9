"""What to capture (CaptureSpec) and how each captured row is labelled (Labels)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, field_validator

from .errors import choices, spec_error
from .narrow import is_list
from .select import Selection, SelectSpec
from .sites import Site, as_site, layer_ids
from .wire import Int, Wire

StorageDtype = Literal["float16", "bfloat16", "float32", "float64", "int32", "int64"]
STORAGE_DTYPES: Final[tuple[StorageDtype, ...]] = get_args(StorageDtype)

PHASES: Final = ("prompt", "generation")


def _sites(value: Any) -> Any:
    given = [value] if isinstance(value, str) else value
    if not is_list(given) or not given:
        raise spec_error("E_SITE", "", f"name one or more sites, e.g. ['resid_post'], got {value!r:.60}")
    return tuple(dict.fromkeys(as_site(site, f"[{place}]") for place, site in enumerate(given)))


def as_storage_dtype(value: Any, path: str = "dtype") -> StorageDtype | None:
    """`value` (a name, or a torch or NumPy dtype) as a storage dtype's name; `None` keeps the model's.

    >>> as_storage_dtype("torch.float16")
    'float16'
    """
    if value is None:
        return None
    name = getattr(value, "__name__", None) or str(value).removeprefix("torch.")
    if name not in STORAGE_DTYPES:
        raise spec_error("E_BAD_PARAM", path, f"no storage dtype {name!r}; there are: {choices(STORAGE_DTYPES)}")
    return name  # pyright: ignore[reportReturnType]


class CaptureSpec(Wire):
    """Sites, layers, rows and the storage type of one capture.

    `layers` None is every layer that has the site; `select` None is every row; `dtype` None keeps the model's
    bits. Layer ids are checked against the model by `layer_set` once it is known.

    >>> CaptureSpec(layers=[12], select="prompt[-1]").canonical()
    {'sites': ['resid_post'], 'layers': [12], 'select': {'prompt_positions': [-1]}}
    """

    root: ClassVar[str] = "capture"

    sites: Annotated[tuple[Site, ...], BeforeValidator(_sites)] = ("resid_post",)
    layers: tuple[Int, ...] | None = None
    select: Selection = None
    dtype: StorageDtype | None = None

    @field_validator("layers", mode="before", json_schema_input_type=int | list[int] | None)
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return None if value is None else layer_ids(value, "")

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype(cls, value: Any) -> Any:
        return as_storage_dtype(value, "")

    @classmethod
    def short(
        cls,
        layers: Any = None,
        mode: Literal["all_tokens", "last_token"] = "all_tokens",
        location: Literal["layer_output", "layer_input"] = "layer_output",
    ) -> CaptureSpec:
        """The short form of a session's capture: every row or the last prompt row, of what blocks leave or read.

        >>> CaptureSpec.short([3], mode="last_token").canonical()
        {'sites': ['resid_post'], 'layers': [3], 'select': {'prompt_positions': [-1]}}
        """
        if mode not in ("all_tokens", "last_token"):
            raise spec_error("E_SELECTION", "mode", f"no mode {mode!r}; there are: all_tokens, last_token")
        if location not in ("layer_output", "layer_input"):
            raise spec_error("E_SITE", "location", f"no location {location!r}; there are: layer_output, layer_input")
        return cls(
            sites=("resid_post" if location == "layer_output" else "resid_pre",),
            layers=layers,
            select=SelectSpec(prompt_positions=(-1,)) if mode == "last_token" else None,
        )

    def canonical(self) -> dict[str, Any]:
        """The object with only the fields that are set: what is stored, hashed and sent."""
        return self.model_dump(mode="json", exclude_none=True)


@dataclass(frozen=True)
class Labels:
    """One label per captured row, ordered by sample, choice, position; every array is `[rows]`.

    sample: index of the prompt in the call. choice: −1 for prompt rows, which all choices share; else the choice.
    position: absolute, 0-based, BOS counted. token_id: the token consumed there. generated: bool, the phase.
    """

    sample: NDArray[np.int64]
    choice: NDArray[np.int64]
    position: NDArray[np.int64]
    token_id: NDArray[np.int64]
    generated: NDArray[np.bool_]

    def __post_init__(self) -> None:
        lengths = {len(self.sample), len(self.choice), len(self.position), len(self.token_id), len(self.generated)}
        if len(lengths) != 1:
            raise ValueError(f"label columns of different lengths: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def phase(self) -> NDArray[np.str_]:
        """`prompt` or `generation` for each row."""
        return np.where(self.generated, PHASES[1], PHASES[0])

    def take(self, rows: NDArray[Any]) -> Self:
        """The labels of some rows, by mask or index."""
        return type(self)(
            self.sample[rows], self.choice[rows], self.position[rows], self.token_id[rows], self.generated[rows]
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Labels):
            return NotImplemented
        names = ("sample", "choice", "position", "token_id", "generated")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def __repr__(self) -> str:
        samples = len(np.unique(self.sample))
        return f"Labels({len(self)} rows of {samples} samples, {int(self.generated.sum())} of them generated)"


@dataclass(frozen=True)
class CaptureReceipt:
    """How many rows were selected, computed and reused from a cache, over all samples.

    overflowed: values that became infinite in the storage dtype (float16).
    """

    selected: int
    computed: int
    reused: int = 0
    overflowed: int = 0

    @classmethod
    def total(cls, receipts: Sequence[CaptureReceipt]) -> CaptureReceipt:
        """Of several together.

        >>> CaptureReceipt.total([CaptureReceipt(3, 2, 1), CaptureReceipt(1, 1)])
        CaptureReceipt(selected=4, computed=3, reused=1, overflowed=0)
        """
        return cls(*(sum(getattr(one, field.name) for one in receipts) for field in fields(cls)))

    @property
    def complete(self) -> bool:
        """Whether every selected row is there."""
        return self.selected == self.computed + self.reused
