"""Prompts through the decoder's body: no output embedding, no layer past the deepest tap, little padding.

Prompts are padded on the right and no mask is given: a causal model's tokens never see what follows them, so the
padding changes no row, and attention keeps its fastest form. Hooks are the caller's (`hooks.tapped`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch

from midstream.taps.locate import Anatomy
from midstream.taps.recorder import Recorder
from midstream.taps.step import Run, step_of

from .batching import Batch, Group, Ids, plan
from .hooks import PassComplete

Done = Callable[[int], None]
"""Called with the number of prompt tokens that a pass has settled."""


def cache_argument(module: Any) -> str | None:
    """What a model's forward calls its cache of keys and values: `cache` since transformers 5.2x."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def new_cache(model: Any) -> Any:
    """An empty cache of the model's own layer types; None when one of them cannot be repeated row by row."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=model.config)
    plain = all(
        isinstance(layer, DynamicLayer) and type(layer).__name__.startswith("Dynamic") for layer in cache.layers
    )
    return cache if plain else None


def input_device(model: Any) -> torch.device:
    """Where token ids go in."""
    return model.get_input_embeddings().weight.device


def run_prompts(anatomy: Anatomy, recorder: Recorder, prompts: Mapping[int, Ids], done: Done) -> None:
    """Record prompts, given by their request's index in the recorder."""
    body: Any = anatomy.body
    share = cache_argument(body) is not None and new_cache(anatomy.model) is not None
    for group in plan(prompts, share=share):
        cache = _run_prefix(anatomy, recorder, prompts, group, done) if group.prefix else None
        for batch in group.batches:
            _run_batch(anatomy, recorder, prompts, batch, group.prefix, cache, done)


def _run_prefix(anatomy: Anatomy, recorder: Recorder, prompts: Mapping[int, Ids], group: Group, done: Done) -> Any:
    """Compute a shared prefix once; its rows belong to every prompt of the group. Returns its cache."""
    shared = prompts[group.prompts[0]][: group.prefix]
    cache = new_cache(anatomy.model)
    runs = [Run(index, 0, 0, shared, len(prompts[index])) for index in group.prompts]
    ids = torch.tensor([shared])
    _run_pass(anatomy, recorder, runs, ids, cache)
    done(group.prefix * len(group.prompts))
    return cache


def _run_batch(
    anatomy: Anatomy, recorder: Recorder, prompts: Mapping[int, Ids], batch: Batch, prefix: int, cache: Any, done: Done
) -> None:
    ids = torch.zeros((len(batch.prompts), batch.width), dtype=torch.long)
    runs: list[Run] = []
    for place, index in enumerate(batch.prompts):
        rest = prompts[index][prefix:]
        ids[place, : len(rest)] = torch.tensor(rest)
        runs.append(Run(index, place * batch.width, prefix, rest, len(prompts[index])))
    if cache is not None:
        cache = deepcopy(cache)
        cache.batch_repeat_interleave(len(batch.prompts))
    _run_pass(anatomy, recorder, runs, ids, cache)
    done(sum(len(run.token_ids) for run in runs))


def _run_pass(anatomy: Anatomy, recorder: Recorder, runs: Sequence[Run], ids: torch.Tensor, cache: Any) -> None:
    body: Any = anatomy.body
    device = input_device(anatomy.model)
    names = inspect.signature(body.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": cache is not None} if "use_cache" in names else {}
    if cache is not None:
        kwargs[cache_argument(body) or "cache"] = cache
    recorder.begin(step_of(runs, ids.numel()), device)
    with torch.inference_mode(), suppress(PassComplete):
        body(input_ids=ids.to(device), **kwargs)
    recorder.end()


def run_multimodal(anatomy: Anatomy, recorder: Recorder, request: int, ids: Ids, inputs: dict[str, Any]) -> None:
    """Record one prompt with images or the like, through the whole wrapper."""
    model: Any = anatomy.model
    device = input_device(model)
    moved = {name: value.to(device) if hasattr(value, "to") else value for name, value in inputs.items()}
    recorder.begin(step_of([Run(request, 0, 0, ids, len(ids))], len(ids)), device)
    with torch.inference_mode(), suppress(PassComplete):
        model(input_ids=torch.tensor([ids], device=device), use_cache=False, **moved)
    recorder.end()
