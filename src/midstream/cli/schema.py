"""`midstream schema`: the JSON Schema of what travels between programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .output import print_json, say

if TYPE_CHECKING:
    from midstream.core.wire import Wire


def schema(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One model, e.g. SelectSpec; without it, all of them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write NAME.json files into this directory.")
    ] = None,
) -> None:
    """Print JSON Schemas of what is sent and stored.

    There is one for CaptureSpec, SelectSpec, InterventionSpec, GenerationParams and WireTensor. Without NAME it is
    one object, from name to schema. Each schema is of the object form; where a SelectSpec stands, the row grammar
    (a text) is taken too.
    """
    known = _models()
    if name is not None and name not in known:
        from midstream.core.errors import choices, spec_error

        raise spec_error("E_BAD_PARAM", "NAME", f"no schema {name!r}; there are: {choices(tuple(known))}")
    found = {one: _schema_of(model) for one, model in known.items() if name in (None, one)}
    if out is None:
        return print_json(found if name is None else found[name], indent=2)
    options.check_out_directory(out)
    out.mkdir(exist_ok=True)
    from midstream.formats.atomic import replacing

    for one, text in found.items():
        with replacing(out / f"{one}.json") as temporary:
            temporary.write_text(json.dumps(text, indent=2) + "\n")
    say(f"wrote {', '.join(f'{one}.json' for one in found)} into {out}")


def _models() -> dict[str, type[Wire]]:
    from midstream.core.capture import CaptureSpec
    from midstream.core.generation import GenerationParams
    from midstream.core.interventions import InterventionSpec
    from midstream.core.select import SelectSpec
    from midstream.formats.wire import WireTensor

    models = (CaptureSpec, SelectSpec, InterventionSpec, GenerationParams, WireTensor)
    return {model.__name__: model for model in models}


def _schema_of(model: type[Wire]) -> dict[str, Any]:
    found = model.model_json_schema()
    for part in (found, *found.get("$defs", {}).values()):
        if "description" in part:  # a docstring, whose first paragraph says what the object is
            part["description"] = " ".join(part["description"].split("\n\n")[0].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
