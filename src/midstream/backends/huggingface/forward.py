"""Prompts through the decoder's body: no output embedding, no layer past the deepest tap, little padding.

Prompts are padded on the right and no mask is given: a causal model's tokens never see what follows them, so the
padding changes no row, and attention keeps its fastest form. Hooks are the caller's (`hooks.tapped`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from midstream.taps.locate import FAMILIES, Anatomy, TapMap, text_config
from midstream.taps.passes import Passes
from midstream.taps.step import Run, step_of

from .batching import TOKEN_BUDGET, Batch, Group, Ids, plan
from .facts import compute_dtype
from .hooks import PassComplete, deepest_stop
from .workers import even_workers, side_by_side, worker_count

Done = Callable[[int], None]
"""Called with the number of tokens that a pass has settled: of prompts, or generated."""


def cache_argument(module: Any) -> str | None:
    """What a model's forward calls its cache of keys and values: `cache` since transformers 5.2x."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def new_cache(model: Any) -> Any:
    """An empty cache of the model's own layer types; None when one of them cannot be repeated row by row."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return cache if plain else None


def windows_proven(model: Any) -> bool:
    """Whether what slides in the cache slides in the model's masks too: not everywhere, so only in listed families."""
    from transformers.cache_utils import DynamicLayer

    listed = text_config(model).model_type in FAMILIES
    return listed or all(type(layer) is DynamicLayer for layer in new_cache(model).layers)


def input_device(model: Any) -> torch.device:
    """Where token ids go in."""
    return model.get_input_embeddings().weight.device


@contextmanager
def fresh_positions(model: Any) -> Generator[None]:
    """Without what an earlier image prompt left of its positions; the caller's own is put back.

    Qwen2-VL and its kin keep `rope_deltas` of the last prompt on the model, and add it to the next.
    """
    holders = [module for module in model.modules() if "rope_deltas" in vars(module)]
    before = [module.rope_deltas for module in holders]
    for module in holders:
        module.rope_deltas = None
    try:
        yield
    finally:
        for module, deltas in zip(holders, before, strict=True):
            module.rope_deltas = deltas


def rotary_boundary(model: Any) -> int | None:
    """The length past which a model turns all of a prompt's rows by other frequencies (longrope, dynamic); or None.

    Prompts on different sides of it never share a pass or a prefix, and no cache crosses it.
    """
    config: Any = text_config(model)
    for name in ("rope_parameters", "rope_scaling"):
        rope = vars(config).get(name)
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("longrope", "dynamic"):
            own = rope.get("original_max_position_embeddings")
            return own or vars(config).get("original_max_position_embeddings") or config.max_position_embeddings
    return None


def split_at(boundary: int | None, prompts: Mapping[int, Ids]) -> list[dict[int, Ids]]:
    """Prompts up to a rotary boundary, and those past it."""
    if boundary is None:
        return [dict(prompts)]
    return [
        {index: ids for index, ids in prompts.items() if len(ids) <= boundary},
        {index: ids for index, ids in prompts.items() if len(ids) > boundary},
    ]


def token_budget(device: torch.device) -> int:
    """Padded tokens of one pass; a GPU wants more of them (not measured yet)."""
    return TOKEN_BUDGET if device.type == "cpu" else 8 * TOKEN_BUDGET


def run_prompts(
    taps: TapMap, passes: Passes, prompts: Mapping[int, Ids], done: Done, *, compiled: bool = False
) -> None:
    """Run prompts, given by their request's index, to the deepest tap.

    A prefix is shared where nothing is steered: rows that are one for several prompts cannot be steered for one. On
    compiled blocks there is no cache, which they are not compiled for, and every pass has as many threads.
    """
    anatomy, recorder = taps.anatomy, passes.recorder
    assert recorder is not None, "prompts alone are run to be recorded"
    # a pass that ends before the first block leaves its cache empty: there is no prefix to go on from
    whole = deepest_stop(recorder.sites.items()) != (0, True)
    share = not compiled and taps.shares_prefix and not (passes.steerer is not None and passes.steerer.sites) and whole
    budget = token_budget(input_device(anatomy.model))
    with fresh_positions(anatomy.model):
        short, *long = split_at(rotary_boundary(anatomy.model), prompts)
        planned = plan(short, budget=budget, share=share) if short else []
        planned += [group for part in long if part for group in plan(part, budget=budget, share=False)]
        for group in planned:
            cache = _run_prefix(anatomy, passes, prompts, group, done) if group.prefix else None
            tasks = [_Task(anatomy, passes, prompts, batch, group.prefix, cache) for batch in group.batches]
            workers = even_workers(anatomy) if compiled else worker_count(anatomy, passes, len(tasks))
            side_by_side(tasks, workers, passes.threads, done)


@dataclass(frozen=True, eq=False)
class _Task:
    """One batch to run: after a shared prefix, on a copy of its cache."""

    anatomy: Anatomy
    passes: Passes
    prompts: Mapping[int, Ids]
    batch: Batch
    prefix: int
    cache: Any

    def __call__(self) -> int:
        """Run it. Returns how many tokens it settled."""
        return _run_batch(self.anatomy, self.passes, self.prompts, self.batch, self.prefix, deepcopy(self.cache))


def _run_prefix(anatomy: Anatomy, passes: Passes, prompts: Mapping[int, Ids], group: Group, done: Done) -> Any:
    """Compute a shared prefix once; its rows belong to every prompt of the group. Returns its cache."""
    shared = prompts[group.prompts[0]][: group.prefix]
    cache = new_cache(anatomy.model)
    runs = [Run(index, 0, 0, shared, len(prompts[index])) for index in group.prompts]
    _run_pass(anatomy, passes, runs, torch.tensor([shared]), cache)
    done(group.prefix * len(group.prompts))
    return cache


def _run_batch(
    anatomy: Anatomy, passes: Passes, prompts: Mapping[int, Ids], batch: Batch, prefix: int, cache: Any
) -> int:
    ids = torch.zeros((len(batch.prompts), batch.width), dtype=torch.long)
    runs: list[Run] = []
    for place, index in enumerate(batch.prompts):
        rest = prompts[index][prefix:]
        ids[place, : len(rest)] = torch.tensor(rest)
        runs.append(Run(index, place * batch.width, prefix, rest, len(prompts[index])))
    if cache is not None:
        cache.batch_repeat_interleave(len(batch.prompts))
    _run_pass(anatomy, passes, runs, ids, cache)
    return sum(len(run.token_ids) for run in runs)


def _run_pass(anatomy: Anatomy, passes: Passes, runs: Sequence[Run], ids: torch.Tensor, cache: Any) -> None:
    body: Any = anatomy.body
    device = input_device(anatomy.model)
    names = inspect.signature(body.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": cache is not None} if "use_cache" in names else {}
    if cache is not None:
        kwargs[cache_argument(body) or "cache"] = cache
    passes.begin(step_of(runs, ids.numel()), device)
    with torch.inference_mode(), suppress(PassComplete):
        body(input_ids=ids.to(device), **kwargs)
    passes.end()


def run_multimodal(anatomy: Anatomy, passes: Passes, request: int, ids: Ids, inputs: Mapping[str, Any]) -> None:
    """Record one prompt with images or the like, through the whole wrapper."""
    model: Any = anatomy.model
    device = input_device(model)
    passes.begin(step_of([Run(request, 0, 0, ids, len(ids))], len(ids)), device)
    with torch.inference_mode(), suppress(PassComplete), fresh_positions(model):
        model(input_ids=torch.tensor([ids], device=device), use_cache=False, **moved(model, inputs))
    passes.end()


def moved(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A multimodal prompt's tensors on the model's device; floating ones in its dtype, as a processor's user does."""
    device = input_device(model)
    dtype = getattr(torch, compute_dtype(model))
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in inputs.items()
    }
