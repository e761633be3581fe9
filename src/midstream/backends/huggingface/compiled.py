"""Blocks that are compiled for long runs of captures: the same rows up to rounding, in less time.

Each block's forward is compiled by itself; hooks stay outside. Sizes are dynamic from the start, and what is compiled
follows from two shapes that are run beforehand, so that no bit depends on which shapes come first.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from midstream.core.errors import MidstreamError, spec_error
from midstream.core.sites import Site
from midstream.taps.locate import FAMILIES, TapMap, text_config

from .forward import input_device, token_budget
from .workers import even_workers, hooked_by_others, side_by_side

_SITES: Final = ("resid_pre", "resid_post")
"""What stands outside of a block's own forward, where hooks on it still see it."""


def check_compilable(taps: TapMap, sites: Mapping[Site, Sequence[int]]) -> None:
    """E_UNKNOWN_KIND, at `compiled`, where captures of these sites cannot run on compiled blocks."""
    kind = text_config(taps.anatomy.model).model_type
    why = None
    if inside := [site for site in sites if site not in _SITES]:
        why = f"{inside[0]} is read inside of a block: only resid_pre and resid_post are not"
    elif kind not in FAMILIES:
        why = f"{kind} is not among the listed families"
    elif hooked_by_others(taps.anatomy):
        why = "the model has hooks of yours"
    if why is not None:
        raise spec_error("E_UNKNOWN_KIND", "compiled", f"cannot be: {why}")


class CompiledBlocks:
    """The compiled forwards of a model's blocks; made once, which takes half a minute to some minutes."""

    def __init__(self, taps: TapMap, sites: Mapping[Site, Sequence[int]]) -> None:
        check_compilable(taps, sites)
        self._taps = taps
        deepest = max(layer for layers in sites.values() for layer in layers)
        self._forwards = {
            block: torch.compile(block.forward, dynamic=True) for block in taps.anatomy.blocks[: deepest + 1]
        }
        try:
            with self.installed():
                self._run_first()
        except RuntimeError as error:  # what torch raises, and for the want of a C++ compiler too
            said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise MidstreamError(f"the model's blocks cannot be compiled here: {said:.200}") from error

    def fit(self, sites: Mapping[Site, Sequence[int]]) -> bool:
        """Whether captures of these sites can run on them."""
        return all(site in _SITES and max(layers) < len(self._forwards) for site, layers in sites.items())

    @contextmanager
    def installed(self) -> Generator[None]:
        """While open, the model's blocks run as compiled."""
        blocks: list[Any] = list(self._forwards)
        before = {block: vars(block)["forward"] for block in blocks if "forward" in vars(block)}
        try:
            for block in blocks:
                block.forward = self._forwards[block]
            yield
        finally:
            for block in blocks:  # some have one of their own, as accelerate gives them
                vars(block).pop("forward", None)
                vars(block).update({"forward": before[block]} if block in before else {})

    def _run_first(self) -> None:
        """Two shapes, one row and several, in a thread like those of all later passes."""
        body: Any = self._taps.anatomy.body
        device = input_device(self._taps.anatomy.model)
        budget = token_budget(device)

        def run(rows: int) -> int:
            ids = torch.zeros((rows, budget // rows), dtype=torch.long, device=device)
            with torch.inference_mode():
                body(input_ids=ids, use_cache=False)
            return 0

        workers = even_workers(self._taps.anatomy)
        side_by_side([lambda: run(4)], workers, set(), lambda _: None)
        side_by_side([lambda: run(1)], workers, set(), lambda _: None)
