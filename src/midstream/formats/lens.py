"""What vllm-lens' clients send: `output_residual_stream` and `apply_steering_vectors`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool
from torch import Tensor

from midstream.core.errors import spec_error
from midstream.core.interventions import InterventionSpec
from midstream.core.narrow import is_int, is_list
from midstream.core.wire import Int, Number, Wire

from .wire import decode_tensor


class SteeringVector(Wire):
    """vllm-lens' SteeringVector. activations: `[layers, hidden]`, or `[layers, positions, hidden]`.

    position_indices: of the second form; None: from 0 on.
    """

    root: ClassVar[str] = "apply_steering_vectors"

    activations: Any
    layer_indices: Annotated[tuple[Int, ...], Field(min_length=1)]
    scale: Number = 1.0
    norm_match: StrictBool = False
    position_indices: tuple[Int, ...] | None = None


def asked_layers(value: Any, path: str = "output_residual_stream") -> tuple[bool, tuple[int, ...] | None]:
    """Whether a residual stream is asked for, and of which layers (None: all), ascending, each once.

    False and null ask for nothing. E_BAD_PARAM for anything but true or a list of integers, E_LAYER_RANGE below 0.

    >>> asked_layers(True), asked_layers([3, 1, 3]), asked_layers(False)
    ((True, None), (True, (1, 3)), (False, None))
    """
    if value is None or value is False:
        return False, None
    if value is True:
        return True, None
    if not is_list(value) or not value or not all(map(is_int, value)):
        raise spec_error("E_BAD_PARAM", path, f"is a list of layers, or true for all, got {value!r:.60}")
    found = tuple(sorted({int(layer) for layer in value}))
    if found[0] < 0:
        raise spec_error("E_LAYER_RANGE", path, f"no layer {found[0]}; layers are counted from 0")
    return True, found


def steering_of(value: Any, path: str = "apply_steering_vectors", *, max_bytes: int | None = None) -> InterventionSpec:
    """vllm-lens' steering vectors as one spec: h + scale·v, with norm_match h + scale·‖h‖·v/‖v‖, in their order.

    max_bytes: of one tensor, once it is expanded. SpecError below the JSON path `path`.

    >>> import torch
    >>> from midstream.formats.wire import encode_tensor
    >>> one = {"activations": encode_tensor(torch.ones(2, 8)), "layer_indices": [4, 2]}
    >>> [(op.layers, op.strength) for op in steering_of([one]).ops]
    [((2,), 1.0), ((4,), 1.0)]
    """
    if not is_list(value) or not value:
        raise spec_error("E_BAD_PARAM", path, f"is a list of steering vectors, got {value!r:.60}")
    ops = [op for place, one in enumerate(value) for op in _ops_of(one, f"{path}[{place}]", max_bytes)]
    return InterventionSpec.of({"ops": ops}, path)


def _ops_of(value: Any, path: str, max_bytes: int | None) -> list[dict[str, Any]]:
    one = SteeringVector.of(value, path)
    limit = {} if max_bytes is None else {"max_bytes": max_bytes}
    tensor: Tensor = decode_tensor(one.activations, f"{path}.activations", **limit)
    if tensor.ndim not in (2, 3) or not tensor.is_floating_point():
        message = f"is {tensor.dtype} {list(tensor.shape)}; floats [layers, hidden] or [layers, positions, hidden]"
        raise spec_error("E_BAD_PARAM", f"{path}.activations", message)
    if len(tensor) != len(one.layer_indices):
        message = f"{len(one.layer_indices)} layers for activations of {len(tensor)}"
        raise spec_error("E_BAD_PARAM", f"{path}.layer_indices", message)
    positions: dict[str, Any] = {}
    if tensor.ndim == 3:
        positions = {"positions": one.position_indices or tuple(range(tensor.shape[1]))}
    elif one.position_indices is not None:
        message = "goes with activations [layers, positions, hidden]: these are for every position"
        raise spec_error("E_BAD_PARAM", f"{path}.position_indices", message)
    given = {"kind": "add", "strength": one.scale, "norm_match": one.norm_match, **positions}
    by_layer = sorted(zip(one.layer_indices, tensor, strict=True), key=lambda pair: pair[0])
    return [{**given, "layers": [layer], "vector": vector} for layer, vector in by_layer]
