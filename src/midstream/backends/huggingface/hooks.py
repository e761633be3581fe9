"""Hooks that hand each tapped module's rows to a sink, and nothing left behind when they are gone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any, Protocol

from torch import Tensor, nn

from midstream.core.sites import Site
from midstream.taps.locate import Tap, TapMap
from midstream.taps.places import altered

Sink = Callable[[Site, int, Tensor], None]


class Steers(Protocol):
    """What knows the rows of the pass under way, and changes them."""

    @property
    def sites(self) -> dict[Site, tuple[int, ...]]:
        """Where it may change or read something."""
        ...

    def steer(self, site: Site, layer: int, values: Tensor) -> Tensor | None:
        """What shall stand in the place of `values`; None leaves them."""
        ...


class PassComplete(Exception):
    """Ends a forward pass after its deepest tap."""


@contextmanager
def tapped(
    taps: TapMap,
    sites: Mapping[Site, Sequence[int]],
    sink: Sink,
    *,
    steerer: Steers | None = None,
    stop: bool = False,
    threads: Container[int] | None = None,
) -> Generator[None]:
    """While open, every forward of this thread is steered, and calls `sink(site, layer, rows)` at each site and layer.

    The sink sees what the steerer has made of the rows. stop: end each pass after the deepest tap, by PassComplete.
    threads: of which threads, if not of this one. Hooks run after those a user has put there, let forwards of other
    threads pass, and are all removed on the way out, also when one cannot be registered.
    """
    mine_are: Container[int] = {get_ident()} if threads is None else threads

    def mine(site: Site, layer: int, rows: Tensor) -> None:
        if get_ident() in mine_are:
            sink(site, layer, rows)

    with ExitStack() as hooks:
        if steerer is not None:
            hooks.enter_context(steered(taps, steerer))
        at_attention: dict[Site, set[int]] = {}
        for site, layers in sites.items():
            for layer in layers:
                tap = taps.taps.get(site, {}).get(layer)
                if tap is None:
                    at_attention.setdefault(site, set()).add(layer)
                else:
                    hooks.callback(on_tap(tap, lambda rows, site=site, layer=layer: mine(site, layer, rows)).remove)
        if at_attention:
            hooks.enter_context(attention_observed(taps.anatomy.attention, _query_key_sink(at_attention, mine)))
        if stop:
            everything = [*sites.items(), *(steerer.sites.items() if steerer is not None else ())]
            hooks.callback(_stop_after(taps, everything, mine_are).remove)
        yield


@contextmanager
def steered(taps: TapMap, steerer: Steers) -> Generator[None]:
    """While open, every forward of this thread has its rows changed by `steerer`, which knows each pass's rows."""
    thread = get_ident()
    with ExitStack() as hooks:
        for site, layers in steerer.sites.items():
            for layer in layers:

                def alter(values: Tensor, site: Site = site, layer: int = layer) -> Tensor | None:
                    return steerer.steer(site, layer, values) if get_ident() == thread else None

                hooks.enter_context(altered(taps.taps[site][layer], alter))
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


def deepest_stop(sites: Iterable[tuple[Site, Sequence[int]]]) -> tuple[int, bool]:
    """The deepest tapped block, and whether a pass may end before it runs (only what it reads is asked for)."""
    pairs = list(sites)
    deepest = max(layer for _, layers in pairs for layer in layers)
    return deepest, all(site == "resid_pre" for site, layers in pairs if deepest in layers)


def _stop_after(taps: TapMap, sites: Iterable[tuple[Site, Sequence[int]]], threads: Container[int]) -> Any:
    deepest, before = deepest_stop(sites)
    block = taps.anatomy.blocks[deepest]

    def done(*_: Any) -> None:
        if get_ident() in threads:
            raise PassComplete

    return block.register_forward_pre_hook(done) if before else block.register_forward_hook(done)


@dataclass(frozen=True)
class AttentionCall:
    """What an attention function was given and gave.

    query, key: `[batch, heads, tokens, size]`, after rotary. output: `[batch, tokens, heads, size]`. scaling: what the
    function multiplies the scores by; None where it was left to the default.
    """

    query: Tensor
    key: Tensor
    output: Tensor
    scaling: float | None


AttentionSink = Callable[[int, AttentionCall], None]
"""Called with the layer and the call."""


def _query_key_sink(wanted: Mapping[Site, set[int]], sink: Sink) -> AttentionSink:
    def take(layer: int, call: AttentionCall) -> None:
        if layer in wanted.get("q", ()):
            sink("q", layer, heads_as_rows(call.query))
        if layer in wanted.get("k", ()):
            past = call.key.shape[2] - call.query.shape[2]
            sink("k", layer, heads_as_rows(call.key[:, :, past:]))

    return take


def heads_as_rows(states: Tensor) -> Tensor:
    """`[batch, heads, tokens, size]` as rows `[batch × tokens, heads × size]`."""
    return states.transpose(1, 2).reshape(states.shape[0] * states.shape[2], -1)


# transformers looks its attention function up in a registry at each forward. While somebody observes a module, the
# registry's entry is wrapped; the wrapper finds the observers here, so that it does not matter who leaves first.
_OBSERVERS: dict[int, list[tuple[int, AttentionSink]]] = {}
_WRAPPED: dict[tuple[int, str], tuple[Any, Any]] = {}
_LOCK = Lock()


@contextmanager
def attention_observed(modules: Mapping[int, nn.Module], sink: AttentionSink) -> Generator[None]:
    """While open, the attention function of each of `modules` (by layer) also shows its call; others pass through."""
    entries = {id(module): (layer, sink) for layer, module in modules.items()}
    with _LOCK:
        for place, entry in entries.items():
            _OBSERVERS.setdefault(place, []).append(entry)
        for module in modules.values():
            registry = getattr(_source_file(module), "ALL_ATTENTION_FUNCTIONS", None)
            name = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if registry is not None and name is not None:
                _wrap(registry, name)
    try:
        yield
    finally:
        with _LOCK:
            for place, entry in entries.items():
                _OBSERVERS[place].remove(entry)
                if not _OBSERVERS[place]:
                    del _OBSERVERS[place]
            if not _OBSERVERS:
                _unwrap_all()


def _source_file(module: nn.Module) -> Any:
    return sys.modules.get(type(module).__module__)


def _wrap(registry: Any, name: str) -> None:
    """Wrap one entry of the registry's own instance, unless it is."""
    if (id(registry), name) in _WRAPPED:
        return
    original = registry.get(name)  # None for eager, which each modeling file defines for itself
    _WRAPPED[id(registry), name] = (registry, registry._local_mapping.get(name))

    def observed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        attend = original or getattr(_source_file(module), "eager_attention_forward", None)
        if attend is None:
            raise RuntimeError(f"{type(module).__name__} asked for {name!r} attention, which its file does not define")
        result = attend(module, query, key, value, *args, **kwargs)
        for layer, sink in tuple(_OBSERVERS.get(id(module), ())):
            sink(layer, AttentionCall(query, key, result[0], kwargs.get("scaling")))
        return result

    registry._local_mapping[name] = observed


def _unwrap_all() -> None:
    for (_, name), (registry, local) in _WRAPPED.items():
        if local is None:
            registry._local_mapping.pop(name, None)
        else:
            registry._local_mapping[name] = local
    _WRAPPED.clear()
