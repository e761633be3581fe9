"""Hooks that hand each tapped module's rows to a sink, and nothing left behind when they are gone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from midstream.core.sites import Site
from midstream.taps.locate import Tap, TapMap

Sink = Callable[[Site, int, Tensor], None]


class PassComplete(Exception):
    """Ends a forward pass after its deepest tap."""


@contextmanager
def tapped(taps: TapMap, sites: Mapping[Site, Sequence[int]], sink: Sink, *, stop: bool = False) -> Generator[None]:
    """While open, every forward calls `sink(site, layer, rows)` once per site and layer.

    stop: end each pass after the deepest tap, by PassComplete. Hooks run after those a user has put there, and are
    all removed on the way out, also when one cannot be registered or a forward fails.
    """
    with ExitStack() as hooks:
        at_attention: dict[Site, set[int]] = {}
        for site, layers in sites.items():
            for layer in layers:
                tap = taps.taps.get(site, {}).get(layer)
                if tap is None:
                    at_attention.setdefault(site, set()).add(layer)
                else:
                    hooks.callback(on_tap(tap, lambda rows, site=site, layer=layer: sink(site, layer, rows)).remove)
        if at_attention:
            modules = taps.anatomy.attention
            hooks.enter_context(attention_observed(modules, _query_key_sink(at_attention, sink)))
        if stop:
            hooks.callback(_stop_after(taps, sites).remove)
        yield


def on_tap(tap: Tap, sink: Callable[[Tensor], None]) -> Any:
    """Register a hook that reads `tap` at each forward; returns its handle."""
    if tap.side == "input":

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sink(tap.read(args, kwargs, None))

        return tap.module.register_forward_pre_hook(before, with_kwargs=True)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        sink(tap.read(args, {}, output))

    return tap.module.register_forward_hook(after)


def _stop_after(taps: TapMap, sites: Mapping[Site, Sequence[int]]) -> Any:
    deepest = max(layer for layers in sites.values() for layer in layers)
    block = taps.anatomy.blocks[deepest]

    def done(*_: Any) -> None:
        raise PassComplete

    if all(site == "resid_pre" for site, layers in sites.items() if deepest in layers):
        return block.register_forward_pre_hook(done)
    return block.register_forward_hook(done)


AttentionSink = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called with (layer, queries `[batch, heads, tokens, size]`, keys likewise, output `[batch, tokens, heads, size]`)."""


def _query_key_sink(wanted: Mapping[Site, set[int]], sink: Sink) -> AttentionSink:
    def take(layer: int, query: Tensor, key: Tensor, _: Tensor) -> None:
        if layer in wanted.get("q", ()):
            sink("q", layer, heads_as_rows(query))
        if layer in wanted.get("k", ()):
            sink("k", layer, heads_as_rows(key[:, :, key.shape[2] - query.shape[2] :]))  # without the cached past

    return take


def heads_as_rows(states: Tensor) -> Tensor:
    """`[batch, heads, tokens, size]` as rows `[batch × tokens, heads × size]`."""
    return states.transpose(1, 2).reshape(states.shape[0] * states.shape[2], -1)


@contextmanager
def attention_observed(modules: Mapping[int, nn.Module], sink: AttentionSink) -> Generator[None]:
    """While open, the attention function of each of `modules` also shows its arguments and its output.

    transformers looks its attention function up in a registry at each forward. The entry is wrapped, on the
    registry's own instance, and put back on the way out; modules of others pass through it untouched.
    """
    layer_of = {id(module): layer for layer, module in modules.items()}
    with ExitStack() as entries:
        wrapped: set[tuple[int, str]] = set()
        for module in modules.values():
            registry = getattr(_source_file(module), "ALL_ATTENTION_FUNCTIONS", None)
            name = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if registry is None or name is None or (id(registry), name) in wrapped:
                continue
            wrapped.add((id(registry), name))
            _wrap(entries, registry, name, layer_of, sink)
        yield


def _source_file(module: nn.Module) -> Any:
    return sys.modules.get(type(module).__module__)


def _wrap(entries: ExitStack, registry: Any, name: str, layer_of: Mapping[int, int], sink: AttentionSink) -> None:
    original = registry.get(name)  # None for eager, which each modeling file defines for itself

    def observed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        attend = original or getattr(_source_file(module), "eager_attention_forward", None)
        if attend is None:
            raise RuntimeError(f"{type(module).__name__} asked for {name!r} attention, which its file does not define")
        result = attend(module, query, key, value, *args, **kwargs)
        if (layer := layer_of.get(id(module))) is not None:
            sink(layer, query, key, result[0])
        return result

    local = registry._local_mapping
    before = local.get(name)
    local[name] = observed
    if before is None:
        entries.callback(local.pop, name)
    else:
        entries.callback(local.__setitem__, name, before)
