"""REF: the slow, obvious implementation, and the oracle of every test.

One prompt, no padding, no cache, eager attention, plain PyTorch forward hooks on the whole Hugging Face model, every
row kept. It shares only the places to read (`TapMap`) with the fast path, none of its mechanism.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from midstream.core.interventions import InterventionSpec
from midstream.core.sites import Site

from .locate import Tap, TapMap, text_config
from .places import altered
from .reference_ops import ReferenceSteering
from .step import whole_sequence


def reference(
    taps: TapMap,
    token_ids: Sequence[int],
    sites: Mapping[Site, Sequence[int]],
    *,
    steering: InterventionSpec | None = None,
    prompt_len: int | None = None,
    logits: list[Tensor] | None = None,
    **inputs: Any,
) -> dict[tuple[Site, int], Tensor]:
    """Every row of one sequence: `(site, layer)` → `[tokens, width]`, float32, on the CPU.

    steering: applied to each row by itself; what gates decide is found first, on the prompt alone. prompt_len: where
    generation begins; None: all of it is prompt. logits: a list that gets the model's `[tokens, vocabulary]`.

    The model computes in its own dtype: give one in float32 for the REF of docs/semantics.md. inputs: what a
    multimodal wrapper takes beside ids. Families whose attention does not go through transformers' attention
    functions keep their own form of it (Falcon's eager form adds its position bias twice).
    """
    model: Any = taps.anatomy.model
    rows: dict[tuple[Site, int], Tensor] = {}

    def keep(site: Site, layer: int, values: Tensor) -> None:
        rows[site, layer] = values.detach().reshape(-1, values.shape[-1]).float().cpu().clone()

    with ExitStack() as hooks, torch.no_grad():
        hooks.enter_context(_eager(taps))
        if steering is not None:
            hooks.enter_context(_steered(taps, token_ids, steering, prompt_len or len(token_ids)))
        hooks.enter_context(_at_attention(taps, sites, keep))
        for site, layers in sites.items():
            for layer in layers:
                if (tap := taps.taps.get(site, {}).get(layer)) is None:
                    continue  # q and k, at the attention function
                if tap.side == "input":

                    def before(
                        _: Any, args: Any, kwargs: Any, tap: Tap = tap, site: Site = site, layer: int = layer
                    ) -> None:
                        keep(site, layer, tap.read(args, kwargs, None))

                    hooks.callback(tap.module.register_forward_pre_hook(before, with_kwargs=True).remove)
                else:

                    def after(
                        _: Any, args: Any, output: Any, tap: Tap = tap, site: Site = site, layer: int = layer
                    ) -> None:
                        keep(site, layer, tap.read(args, {}, output))

                    hooks.callback(tap.module.register_forward_hook(after).remove)
        device = model.get_input_embeddings().weight.device
        given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        if "use_cache" in inspect.signature(model.forward).parameters:
            given["use_cache"] = False
        output = model(input_ids=torch.tensor([list(token_ids)], device=device), **given)
        if logits is not None:
            logits.append(output.logits[0].float().cpu())
    return rows


@contextmanager
def _steered(taps: TapMap, token_ids: Sequence[int], spec: InterventionSpec, prompt_len: int) -> Generator[None]:
    """With every op applied, row by row, wherever the spec says."""
    spec = spec.lowered(whole_sequence(token_ids, prompt_len))
    model: Any = taps.anatomy.model
    decisions: dict[int, bool] = {}
    gated = any(op.gate for op in spec.ops)
    if gated:
        first = ReferenceSteering(spec, whole_sequence(token_ids[:prompt_len], prompt_len), {})
        for place, op in enumerate(spec.ops):  # a gate may read what an earlier gate has let through
            if op.gate:
                with _applied(taps, first):
                    ids = torch.tensor(
                        [list(token_ids[:prompt_len])], device=model.get_input_embeddings().weight.device
                    )
                    model(input_ids=ids)
                first.decisions[place] = first.decide()[place]
        decisions = first.decisions
    with _applied(taps, ReferenceSteering(spec, whole_sequence(token_ids, prompt_len), decisions)):
        yield


@contextmanager
def _applied(taps: TapMap, steering: ReferenceSteering) -> Generator[None]:
    with ExitStack() as stack:
        for site, layer in sorted(steering.places):

            def alter(values: Tensor, site: Site = site, layer: int = layer) -> Tensor:
                rows = values.reshape(-1, values.shape[-1])
                out = steering.steer(site, layer, rows.double().cpu().numpy(), taps.layouts[site][layer])
                return torch.as_tensor(out).to(values.device, values.dtype).reshape(values.shape)

            stack.enter_context(altered(taps.taps[site][layer], alter))
        yield


@contextmanager
def _eager(taps: TapMap) -> Generator[None]:
    """The text decoder's attention in its eager form while open, where its modeling file has one."""
    config: Any = text_config(taps.anatomy.model)
    before = config._attn_implementation
    files = [sys.modules[type(module).__module__] for module in taps.anatomy.attention.values()]
    if any(hasattr(file, "eager_attention_forward") for file in files):
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _at_attention(
    taps: TapMap, sites: Mapping[Site, Sequence[int]], keep: Callable[[Site, int, Tensor], None]
) -> Generator[None]:
    """q and k as they enter each modeling file's own eager attention, which is replaced by one that looks."""
    both: tuple[Site, Site] = ("q", "k")
    wanted: dict[Any, tuple[int, tuple[Site, ...]]] = {}
    for layer, module in taps.anatomy.attention.items():
        found: tuple[Site, ...] = tuple(
            site for site in both if layer in sites.get(site, ()) and layer not in taps.taps.get(site, {})
        )
        if found:
            wanted[module] = (layer, found)
    with ExitStack() as patches:
        for name in {type(module).__module__ for module in wanted}:
            file = sys.modules[name]
            original = file.eager_attention_forward

            def looked(module: Any, query: Tensor, key: Tensor, *rest: Any, of: Any = original, **more: Any) -> Any:
                layer, found = wanted.get(module, (0, ()))
                for site, states in zip(both, (query, key), strict=True):
                    if site in found:
                        keep(site, layer, states.transpose(1, 2).flatten(2))
                return of(module, query, key, *rest, **more)

            patches.enter_context(mock.patch.object(file, "eager_attention_forward", looked))
        yield
