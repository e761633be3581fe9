"""What a key may ask for: a body understood, and everything in it the key's own."""

from __future__ import annotations

from anyio import to_thread

from midstream.core.errors import spec_error

from .api import Api, need
from .asking import Ask, understood
from .bodies import Body
from .errors import ApiError
from .keys import Key


async def permitted(api: Api, key: Key, body: Body) -> Ask:
    """What a body asks for, by a key that may; ApiError, SpecError or PromptError for what cannot be."""
    need(key, "complete")
    served = api.model(body.model)
    ask = await to_thread.run_sync(understood, body, served, api.limits)
    need(key, *(("capture",) if ask.captures else ()), *(("steer",) if ask.steers else ()))
    meant = None if ask.asked is None else ask.asked.own.model_fingerprint
    if meant is not None and meant != (there := served.engine.facts.model_fingerprint):
        raise ApiError(409, f"another model is served here: {there}, and {meant} is meant")
    await to_thread.run_sync(_check_owned, api, key, ask)
    return ask


def _check_owned(api: Api, key: Key, ask: Ask) -> None:
    """E_ARTIFACT_MISSING for an artifact that a request names and this key does not own."""
    steering = None if ask.asked is None else ask.asked.steering
    if steering is None:
        return
    for name, artifact in steering.artifacts().items():
        if artifact.array is None and api.owned.artifact(key.id, name) is None:
            message = f"no artifact {name} here: put its array first, or give the tensor itself in place of the id"
            raise spec_error("E_ARTIFACT_MISSING", "steering", message)
