"""The OpenAPI document: bodies that routes read themselves, and the one form of every error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel

_REFERENCE: Final = "#/components/schemas/{model}"
_ERROR: Final = {
    "type": "object",
    "required": ["error", "request_id"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        },
        "request_id": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"},
    },
}


class Bytes(Response):
    """Bytes as they are."""

    media_type = "application/octet-stream"


_BODIES: dict[str, type[BaseModel]] = {}


def request_of(model: type[BaseModel], **examples: Mapping[str, Any]) -> dict[str, Any]:
    """What a route that reads a body itself says of it. examples: bodies that are answered, by their names."""
    _BODIES[model.__name__] = model
    shown = {name.replace("_", " "): {"value": dict(value)} for name, value in examples.items()}
    content = {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}, "examples": shown}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document of an app, made once."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        for name, model in _BODIES.items():
            own = model.model_json_schema(ref_template=_REFERENCE)
            schemas |= own.pop("$defs", {})
            schemas[name] = own
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        schemas["Error"] = _ERROR
        refused = {
            "description": "Refused: what was asked, what exists, what to type.",
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}},
        }
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = refused
        app.openapi_schema = found
    return app.openapi_schema
