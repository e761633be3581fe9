"""What is served: models, capabilities, facts; and whether it is well."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from midstream.core.generation import CONSTRAINT_KINDS
from midstream.core.ops import KINDS
from midstream.formats import discovery

from ..api import Api, Caller, TheApi
from ..asking import Served

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def models(api: TheApi, _: Caller) -> dict[str, Any]:
    """Every model, with what can be done with it."""
    return {"object": "list", "data": [_model(api, one) for one in api.served]}


@router.get("/v1/models/{model:path}")
async def model(model: str, api: TheApi, _: Caller) -> dict[str, Any]:
    """One model."""
    return _model(api, api.model(model))


def _model(api: Api, served: Served) -> dict[str, Any]:
    facts, capabilities = served.engine.facts, served.engine.capabilities
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "midstream",
        "root": served.name,
        "parent": None,
        "max_model_len": facts.context_length,
        "aliases": list(served.aliases),
        "capabilities": {
            "n_layers": facts.num_layers,
            "hidden_size": facts.hidden_size,
            "n_heads": facts.num_attention_heads,
            "head_dim": facts.head_dim,
            "dtype": facts.dtype,
            "context_length": facts.context_length,
            "sites": list(capabilities.capture.sites),
            "interventions": list(capabilities.interventions.kinds),
            "capture_cap": api.limits.capture_cap,
            "fingerprint": facts.model_fingerprint,
        },
    }


@router.get("/v1/capabilities")
async def capabilities(api: TheApi, _: Caller, model: str | None = None) -> dict[str, Any]:
    """Versions, sites, kinds and limits: what a client negotiates with. model: where there are several."""
    said = _said(api, api.model(model) if model is not None or len(api.served) == 1 else api.served[0])
    return {**said.model_dump(mode="json"), "server_limits": api.limits.model_dump(mode="json")}


@router.get("/v1/midstream/capabilities")
async def discovered(api: TheApi, _: Caller) -> dict[str, Any]:
    """The same in the form that midstream's own client reads; of the first model, where there are several."""
    return _said(api, api.served[0]).model_dump(mode="json")


def _said(api: Api, served: Served) -> discovery.Capabilities:
    engine, limits = served.engine, api.limits
    able = engine.capabilities
    return discovery.Capabilities(
        versions=discovery.Versions(
            wire=discovery.WIRE, midstream=version("midstream"), engine=f"{discovery.OWN_ENGINE}{version('midstream')}"
        ),
        backend=able.backend,
        model=engine.identity,
        capture=discovery.Capture(
            layouts={
                site: {layer: (one.width, one.heads, one.head_size) for layer, one in layers.items()}
                for site, layers in engine.layouts.items()
            },
            refused=dict(able.refused),
        ),
        interventions=tuple(kind for kind in KINDS if kind in able.interventions.kinds),
        constraints=tuple(kind for kind in CONSTRAINT_KINDS if kind in able.constraints.kinds),
        engine=discovery.Engine(
            vocabulary=engine.facts.vocab_size, has_tokenizer=engine.tokenizer is not None, lora=False, ranks=1
        ),
        limits=discovery.Limits(
            held_bytes=limits.held_bytes, held_seconds=limits.held_seconds, artifact_bytes=limits.artifact_bytes
        ),
        artifact_transports=("http",),
    )


# --- health


@router.get("/health/live", response_class=PlainTextResponse)
@router.get("/health", response_class=PlainTextResponse)
async def live() -> PlainTextResponse:
    """That the server answers."""
    return PlainTextResponse("ok")


@router.get("/health/ready")
async def ready(api: TheApi) -> JSONResponse:
    """Whether every model answers, and nothing stops: 200 or 503."""
    unwell = [one.name for one in api.served if not one.engine.well]
    if api.stopping.is_set():
        return JSONResponse({"ready": False, "why": "stopping"}, status_code=503)
    if unwell:
        return JSONResponse({"ready": False, "why": f"not well: {', '.join(unwell)}"}, status_code=503)
    return JSONResponse({"ready": True})


@router.get("/version")
async def versions() -> dict[str, str]:
    """Which midstream this is."""
    return {"version": version("midstream")}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(api: TheApi) -> PlainTextResponse:
    """For Prometheus."""
    return PlainTextResponse(api.metrics.text(), media_type="text/plain; version=0.0.4")
