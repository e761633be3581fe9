"""The custom op that stands at a boundary of a compiled graph, and the taps that are at work in this process.

To a compiler the op is opaque and may change what it is given, so it stays in the graph, in its place. It finds what
to do in `CURRENT`: a graph outlives the engine that traced it, so nothing of an engine may be in it but numbers.
"""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from midstream.taps.fixed import FixedTaps


class AtWork(Protocol):
    """What handles the rows at a place."""

    def at(self, place: int, delta: Tensor, residual: Tensor | None) -> None:
        """The rows that stand at a place, which may be changed where they lie."""
        ...


class _Current:
    """The taps of the forward pass under way in this process; None while nothing is asked of a pass.

    fixed: the work that a graph records, of the engine that records any.
    """

    taps: AtWork | None = None
    fixed: FixedTaps | None = None


CURRENT: Final = _Current()


def _at(place: int, delta: Tensor, residual: Tensor | None) -> None:
    fixed = CURRENT.fixed
    if fixed is not None and delta.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph is being recorded
        if place in fixed.places:
            fixed.at(place, delta, residual)
    elif CURRENT.taps is not None:
        CURRENT.taps.at(place, delta, residual)


def _tap(delta: Tensor, place: int) -> None:
    _at(place, delta, None)


def _tap_fused(delta: Tensor, residual: Tensor, place: int) -> None:
    _at(place, delta, residual)


def _nothing(*_: Any) -> None:
    """What a tracer sees of it."""


OPS: Final = ("midstream::tap", "midstream::tap_fused")
_LIBRARY: Final = torch.library.Library("midstream", "FRAGMENT")
for _schema, _body in (
    ("tap(Tensor(a!) delta, int place) -> ()", _tap),
    ("tap_fused(Tensor(a!) delta, Tensor(b!) residual, int place) -> ()", _tap_fused),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"midstream::{_name}", _nothing, lib=_LIBRARY)


@contextmanager
def at_work(taps: AtWork) -> Generator[None]:
    """While open, a forward pass of this process shows `taps` what stands at its places."""
    CURRENT.taps = taps
    try:
        yield
    finally:
        CURRENT.taps = None


def touch(place: int, in_graph: bool, delta: Tensor, residual: Tensor | None) -> None:
    """Show what stands at a place: by the op while a graph is traced, directly while it is not."""
    if torch.compiler.is_compiling():
        if in_graph:
            if residual is None:
                torch.ops.midstream.tap(delta, place)
            else:
                torch.ops.midstream.tap_fused(delta, residual, place)
    elif CURRENT.taps is not None or CURRENT.fixed is not None:
        _at(place, delta, residual)


def without_graph() -> None:
    """Let the pass that begins run the model itself: neither its compiled form nor a recorded one."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    context.skip_compiled = True
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE
