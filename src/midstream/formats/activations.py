"""The `activations` of one completion, as JSON has them (docs/serving.md): rows by site, their labels, and a receipt.

`{"<site>": {tensor of [layers, rows, width], "layers": […]}, "labels": {"position", "token_id", "phase"}, "receipt"}`;
a site whose layers differ in width or type has a list of such objects. A tensor is in the answer (`wire`), or has in
place of `data` a `handle`, under which its bytes wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from midstream.core.capture import PHASES, CaptureReceipt
from midstream.core.errors import FileFormatError, SpecError
from midstream.core.interventions import OpReceipt
from midstream.core.narrow import is_list, is_mapping
from midstream.core.sites import SITES, Site
from midstream.core.wire import Int

from .wire import TensorForm, decode_tensor, encode_tensor, tensor_form

HANDLE: Final = "/v1/activations/{handle}"
"""Where the bytes of a tensor with a handle are."""
RESIDUAL: Final = "residual_stream"
"""The name that vllm-lens gives to what blocks leave, at every row."""
_BESIDE: Final = ("labels", "receipt")


class HeldTensor(TensorForm):
    """A tensor whose bytes wait under a handle. nbytes: of the tensor, not compressed."""

    handle: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    nbytes: Annotated[Int, Field(ge=0)]
    transport: Literal["binary"] = "binary"


@dataclass(frozen=True, eq=False)
class Stack:
    """Rows of some layers of one site. tensor: `[layers, rows, width]`."""

    site: Site
    layers: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Activations:
    """What was captured of one completion. position, token_id, generated: `[rows]`."""

    stacks: Sequence[Stack]
    position: NDArray[np.int64]
    token_id: NDArray[np.int64]
    generated: NDArray[np.bool_]
    receipt: CaptureReceipt

    def plain(
        self, handles: Sequence[str] | None = None, form: Callable[[Tensor], dict[str, Any]] = encode_tensor
    ) -> dict[str, Any]:
        """As JSON has it. handles: one for each stack, under which its tensor is held; None: each in this `form`."""
        found: dict[str, Any] = {}
        for place, stack in enumerate(self.stacks):
            if handles is None:
                tensor = form(stack.tensor)
            else:
                tensor = held_form(stack.tensor, handles[place])
            one = {**tensor, "layers": list(stack.layers)}
            if stack.site not in found:
                found[stack.site] = one
            else:
                before = found[stack.site]
                found[stack.site] = [*(before if isinstance(before, list) else [before]), one]
        labels = {
            "position": self.position.tolist(),
            "token_id": self.token_id.tolist(),
            "phase": [PHASES[int(one)] for one in self.generated],
        }
        return {**found, "labels": labels, "receipt": asdict(self.receipt)}

    def residual(
        self, handles: Sequence[str] | None = None, form: Callable[[Tensor], dict[str, Any]] = encode_tensor
    ) -> dict[str, Any]:
        """The same in vllm-lens' form, of one stack that has every row."""
        (stack,) = self.stacks
        return {RESIDUAL: form(stack.tensor) if handles is None else held_form(stack.tensor, handles[0])}


def receipt_plain(receipt: OpReceipt) -> dict[str, Any]:
    """What an op did, as JSON has it: that has no NaN and no infinity, which a row may have had."""
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value
        for name, value in asdict(receipt).items()
    }


def held_form(tensor: Tensor, handle: str) -> dict[str, Any]:
    """The JSON object of a tensor that is held."""
    return {"handle": handle, "nbytes": tensor.nbytes, "transport": "binary", **tensor_form(tensor)}


def read_activations(obj: Any, fetch: Callable[[HeldTensor], Tensor], path: str = "activations") -> Activations:
    """What `plain` wrote. fetch: a held tensor, of the form that its object says. FileFormatError: it is none.

    >>> import torch
    >>> rows = Stack("resid_post", (3,), torch.ones(1, 2, 4))
    >>> labels = np.array([0, 1]), np.array([7, 8]), np.array([False, False])
    >>> made = Activations([rows], *labels, CaptureReceipt(2, 2)).plain()
    >>> read_activations(made, lambda held: held).stacks[0].tensor.shape
    torch.Size([1, 2, 4])
    """
    try:
        return _read(obj, fetch, path)
    except (SpecError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path} is not what was asked for: {error}") from error


def held_tensors(obj: Any, path: str = "activations") -> list[HeldTensor]:
    """The tensors among activations that have to be fetched."""
    return [
        HeldTensor.of(_tensor(one), f"{path}.{site}")
        for site in SITES
        for one in (_listed(obj.get(site)) if is_mapping(obj) else [])
        if is_mapping(one) and "handle" in one
    ]


def _read(obj: Any, fetch: Callable[[HeldTensor], Tensor], path: str) -> Activations:
    if not is_mapping(obj):
        raise FileFormatError(f"{path} is no object")
    if unknown := sorted(set(obj) - set(SITES) - set(_BESIDE)):
        raise FileFormatError(f"{path} has {unknown[0]!r}, which is no site")
    labels = obj["labels"]
    position, token_id = (_integers(labels[name], f"{path}.labels.{name}") for name in ("position", "token_id"))
    generated = np.array([PHASES.index(one) == 1 for one in labels["phase"]], dtype=np.bool_)
    if not len(position) == len(token_id) == len(generated):
        raise FileFormatError(f"{path}.labels has columns of different lengths")
    stacks = [
        _stack(site, one, fetch, len(position), f"{path}.{site}") for site in SITES for one in _listed(obj.get(site))
    ]
    return Activations(stacks, position, token_id, generated, CaptureReceipt(**obj["receipt"]))


def _integers(value: Any, path: str) -> NDArray[np.int64]:
    array = np.array(value if value else [], dtype=None if value else np.int64)
    if array.ndim != 1 or array.dtype.kind != "i":
        raise FileFormatError(f"{path} is no list of integers")
    return array.astype(np.int64)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if is_list(value) else [value]


def _tensor(obj: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in obj.items() if name != "layers"}


def _stack(site: Site, obj: Mapping[str, Any], fetch: Callable[[HeldTensor], Tensor], rows: int, path: str) -> Stack:
    tensor = _tensor(obj)
    layers = tuple(int(layer) for layer in obj["layers"])
    found = fetch(HeldTensor.of(tensor, path)) if "handle" in tensor else decode_tensor(tensor, path)
    if found.ndim != 3 or tuple(found.shape[:2]) != (len(layers), rows):
        raise FileFormatError(f"{path} is {list(found.shape)}, of {len(layers)} layers and {rows} rows")
    return Stack(site, layers, found)
