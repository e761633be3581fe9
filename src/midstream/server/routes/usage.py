"""`/v1/budget` and `/v1/usage`: tokens left, held, spent."""

from dataclasses import asdict
from typing import Any

from anyio import to_thread
from fastapi import APIRouter

from ..api import Caller, TheApi

router = APIRouter(tags=["budgets"])


@router.get("/v1/budget")
async def budget(api: TheApi, key: Caller) -> dict[str, Any]:
    """The tokens of this key; budget and left are null where there is no limit."""
    return {"object": "budget", "key": key.id, **asdict(await to_thread.run_sync(api.ledger.budget, key.id))}


@router.get("/v1/usage")
async def usage(api: TheApi, key: Caller) -> dict[str, Any]:
    """What this key has used in all."""
    return {"object": "usage", "key": key.id, **asdict(await to_thread.run_sync(api.ledger.usage, key.id))}
