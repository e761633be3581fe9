"""What a completion's body asks of taps: our own fields, and vllm-lens'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, StrictBool

from midstream.core.capture import CaptureSpec
from midstream.core.errors import choices, spec_error
from midstream.core.interventions import InterventionSpec
from midstream.core.narrow import is_mapping
from midstream.core.wire import Int, Wire
from midstream.formats.lens import asked_layers, steering_of
from midstream.formats.spec_json import decode_spec

from ..requests import FIELDS, KEY

XARGS: Final = "vllm_xargs"
TRANSPORTS: Final = ("base64", "binary")
_INLINE_BYTES: Final = 64 << 20
"""What one tensor inside a request may expand to: a larger one is an artifact."""


class OwnWishes(Wire):
    """What our own client says besides, under `vllm_xargs["midstream"]`.

    prompt_len: how many of the prompt's tokens are prompt (a scored reference is not). decided: what gates decided on
    this prompt before, by the place of their op. model_fingerprint: of the model that is meant.
    """

    root: ClassVar[str] = f"{XARGS}.{KEY}"

    prompt_len: Annotated[Int, Field(ge=0)] | None = None
    decided: dict[str, StrictBool] | None = None
    model_fingerprint: str | None = None


@dataclass(frozen=True)
class Asked:
    """What one completion asks. residual: it is answered in vllm-lens' form. binary: tensors by handle."""

    capture: CaptureSpec | None
    steering: InterventionSpec | None
    own: OwnWishes
    residual: bool = False
    binary: bool = False


def asked_of(fields: Mapping[str, Any], xargs: Mapping[str, Any]) -> Asked | None:
    """What a body's other fields and its `vllm_xargs` ask of us; None: nothing. SpecError names what is wrong.

    >>> asked_of({"capture": {"layers": [2], "select": "prompt[-1]"}}, {}).capture.layers
    (2,)
    >>> asked_of({}, {"output_residual_stream": "false"}) is None
    True
    """
    given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    path_of = {name: name for name in given}
    for name in FIELDS:
        if xargs.get(name) is None:
            continue
        if name in given:
            raise spec_error("E_BAD_PARAM", f"{XARGS}.{name}", f"{name} stands in the body too: give it once")
        path_of[name] = f"{XARGS}.{name}"
        given[name] = xargs[name] if name == "activations_transport" else _json(xargs[name], path_of[name])
    own = None if xargs.get(KEY) is None else OwnWishes.of(_json(xargs[KEY], OwnWishes.root))
    for name, instead in (("apply_hooks", "steering"), ("output_qk", 'capture with "sites": ["q", "k"]')):
        if given.get(name) not in (None, False):
            why = "code of a caller is never run" if name == "apply_hooks" else "is not answered in that form"
            raise spec_error("E_UNKNOWN_KIND", path_of[name], f"{why}: use {instead}")
    wanted, layers = asked_layers(given.get("output_residual_stream"), path_of.get("output_residual_stream", ""))
    capture = given.get("capture")
    if capture is not None and wanted:
        raise spec_error("E_BAD_PARAM", path_of["capture"], "output_residual_stream is one too: give one of them")
    if capture is not None:
        spec = CaptureSpec.of(capture, path_of["capture"])
    else:
        spec = CaptureSpec(layers=layers) if wanted else None
    steering = _steering(given, path_of)
    if spec is None and steering is None and own is None:
        return None
    return Asked(spec, steering, own or OwnWishes(), wanted, _is_binary(given, path_of))


def _json(value: Any, path: str) -> Any:
    """The value of a text of JSON; a number or a list, which a client may have sent as it is, stays."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise spec_error("E_BAD_PARAM", path, f"is no JSON: {error}") from None


def _steering(given: Mapping[str, Any], path_of: Mapping[str, str]) -> InterventionSpec | None:
    ours, lens = given.get("steering"), given.get("apply_steering_vectors")
    if ours not in (None, False) and lens is not None:
        raise spec_error("E_BAD_PARAM", path_of["steering"], "apply_steering_vectors is one too: give one of them")
    if lens is not None:
        return steering_of(lens, path_of["apply_steering_vectors"], max_bytes=_INLINE_BYTES)
    if ours in (None, False):
        return None
    if not is_mapping(ours):
        raise spec_error("E_BAD_PARAM", path_of["steering"], f"is an object with ops, got {ours!r:.60}")
    return decode_spec(ours, path_of["steering"], max_bytes=_INLINE_BYTES)


def _is_binary(given: Mapping[str, Any], path_of: Mapping[str, str]) -> bool:
    transport = given.get("activations_transport", TRANSPORTS[0])
    if transport not in TRANSPORTS:
        message = f"no transport {transport!r:.40}; there are: {choices(TRANSPORTS)}"
        raise spec_error("E_BAD_PARAM", path_of["activations_transport"], message)
    return transport == TRANSPORTS[1]
