"""The prefix cache of an engine that has taps: what a hit may skip, and what a block's key must hold.

A request that wants rows reads the cache up to the first row that it wants, and writes it under the ordinary key. A
block whose rows were steered has a key of its own, from the first touched position on.
"""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from midstream.core.errors import SpecError
from midstream.core.select import resolve
from midstream.taps.step import whole_sequence

from ..block_keys import block_key, block_rows
from ..requests import EngineRequest, text_of

_OURS: Final = "_midstream_request"
_DONE: Final = "_midstream"


def attach(scheduler: Any) -> None:
    """Give an engine's scheduler both rules."""
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils.generate_block_hash_extra_keys
    if not hasattr(original, _DONE):
        kv_cache_utils.generate_block_hash_extra_keys = _with_our_keys(original)
    manager = scheduler.kv_cache_manager
    for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):
        if hasattr(manager, name):
            setattr(manager, name, _up_to_the_first_wanted(getattr(manager, name)))


class Noticed:
    """A request that has wishes, as the scheduler sees it: how far a hit may go."""

    def __init__(self, wishes: EngineRequest, prompt: Sequence[int]) -> None:
        self.wishes = wishes
        self.limit = hit_limit(wishes, prompt)


def hit_limit(wishes: EngineRequest, ids: Sequence[int]) -> int | None:
    """The first position whose row must be computed, whatever the cache holds; None: any row may come from it.

    >>> from midstream.core.capture import CaptureSpec
    >>> last = EngineRequest(id="a", prompt_len=4, max_len=4, capture=CaptureSpec(select="prompt[-1]"))
    >>> hit_limit(last, [5, 6, 7, 8])
    3
    """
    rows = whole_sequence(ids, wishes.prompt_len)
    wanted = np.zeros(len(ids), dtype=np.bool_)
    if wishes.wants_rows:
        wanted |= resolve(wishes.select, rows) & (rows.position >= wishes.first)
    for place, op in enumerate(wishes.steering.ops if wishes.steering is not None else ()):
        if (
            op.gate is not None and not op.silent and str(place) not in (wishes.decided or {})
        ):  # it sees the whole prompt
            wanted |= rows.position < wishes.prompt_len
    found = np.flatnonzero(wanted)
    return int(found[0]) if len(found) else None


def noticed(request: Any) -> Noticed | None:
    """The wishes of one of vLLM's requests, read once; a request whose text is wrong has none here."""
    if hasattr(request, _OURS):
        return getattr(request, _OURS)
    found: Noticed | None = None
    if (text := text_of(request.sampling_params)) is not None and request.prompt_token_ids:
        try:
            ids = request.prompt_token_ids
            found = Noticed(EngineRequest.read(text).settled(request.request_id, len(ids), None), ids)
        except SpecError:  # the worker says so, to whoever asked
            found = None
    setattr(request, _OURS, found)
    return found


def _with_our_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def extra_keys(request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
        keys, next_mm = original(request, start_token_idx, end_token_idx, start_mm_idx)
        ours = noticed(request)
        if ours is None or ours.wishes.steering is None:
            return keys, next_mm
        ids = request.all_token_ids[start_token_idx:end_token_idx]
        rows = block_rows(ids, start_token_idx, ours.wishes.prompt_len)
        key = block_key(ours.wishes.steering, rows)
        return (keys if key is None else (*(keys or ()), ("midstream", key))), next_mm

    setattr(extra_keys, _DONE, True)
    return extra_keys


class _Shorter:
    """A request that seems to end after the position at which a hit must end."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request, self.num_tokens = request, num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _up_to_the_first_wanted(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def computed_blocks(request: Any) -> Any:
        ours = noticed(request)
        if ours is None or ours.limit is None:
            return original(request)
        # vLLM takes at most num_tokens − 1 tokens from the cache
        return original(_Shorter(request, min(request.num_tokens, ours.limit + 1)))

    return computed_blocks
