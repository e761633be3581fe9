"""That steering is read: what is written at a tap must reach what comes after it. Shown once per model and site.

One tiny pass holds a plain copy of a prompt, and one more copy per layer that is steered there alone. A tap whose
change does not arrive (a module that copied its input, a fused kernel that reads elsewhere) is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from midstream.core.binding import BoundOp
from midstream.core.errors import spec_error
from midstream.core.op import Op
from midstream.core.ops import Add, Router
from midstream.core.sites import Site
from midstream.taps.locate import Tap, TapMap
from midstream.taps.steerer import Steerer
from midstream.taps.step import Run, step_of

from .forward import fresh_positions, input_device
from .hooks import on_tap, steered, tapped
from .selftest import probe_ids

_TOKENS: Final = 3
_PROVEN: WeakKeyDictionary[TapMap, set[Site]] = WeakKeyDictionary()


def prove_steering(taps: TapMap, sites: Iterable[Site]) -> None:
    """Show that `sites` can be steered at every layer that has them; E_SITE for one where nothing comes of it."""
    proven = _PROVEN.setdefault(taps, set())
    for site in sorted(set(sites) - proven):
        for layer, moved in _moved(taps, site).items():
            if not moved:
                message = f"what is written at {site} of layer {layer} does not reach the stream of this model"
                raise spec_error("E_SITE", "steering.site", f"{message}: it can be captured there, not steered")
        proven.add(site)


def _moved(taps: TapMap, site: Site) -> dict[int, bool]:
    """Layer → whether a change at `site` of it alone changes what that block, or the next, works with."""
    layers = tuple(taps.layouts[site])
    blocks = len(taps.anatomy.blocks)
    # what a block leaves is seen where the next one reads it; the last one's, where a final norm does
    steerer = Steerer([(), *[(_poke(taps, site, layer),) for layer in layers]])
    seen: dict[int, Tensor] = {}

    def keep(_: Site, layer: int, rows: Tensor) -> None:
        seen[layer] = rows.detach().reshape(len(layers) + 1, _TOKENS, -1).float().cpu()

    final: list[Tensor] = []
    handles = [
        on_tap(Tap(module, "input"), lambda rows: final.append(rows.float().cpu())) for module in taps.anatomy.final[:1]
    ]
    ids = probe_ids(taps.anatomy.model, (1, _TOKENS))[0]
    runs = [Run(copy, copy * _TOKENS, 0, ids.tolist(), _TOKENS) for copy in range(len(layers) + 1)]
    steerer.begin(step_of(runs, len(runs) * _TOKENS), input_device(taps.anatomy.model))
    body: Any = taps.anatomy.body
    names = inspect.signature(body.forward).parameters
    try:
        with (
            steered(taps, steerer),
            tapped(taps, {"resid_pre": range(blocks)}, keep),
            fresh_positions(taps.anatomy.model),
            torch.inference_mode(),
        ):
            batch = ids.repeat(len(runs), 1).to(input_device(taps.anatomy.model))
            body(input_ids=batch, **({"use_cache": False} if "use_cache" in names else {}))
    finally:
        for handle in handles:
            handle.remove()
    last = final[-1].reshape(len(runs), _TOKENS, -1) if final else None
    found: dict[int, bool] = {}
    for copy, layer in enumerate(layers, start=1):
        rows = seen[layer + 1] if layer + 1 < blocks else last
        found[layer] = rows is None or _apart(rows[copy], rows[0])
    return found


def _apart(rows: Tensor, plain: Tensor) -> bool:
    """Whether rows differ by more than the places of a batch do."""
    return float((rows - plain).norm()) > 1e-3 * float(plain.norm())


def _poke(taps: TapMap, site: Site, layer: int) -> BoundOp:
    """An op that no block can overlook: large in a fixed random direction, or experts put on and off."""
    layout = taps.layouts[site][layer]
    if site == "router_logits":
        turn = {place: 50.0 * (-1) ** place for place in range(layout.width)}
        op: Op = Router(layers=layer, shift=turn)  # pyright: ignore[reportArgumentType]
        return BoundOp(0, op, {layer: {}}, {layer: layout})
    vector = np.random.default_rng(0).normal(size=layout.width).astype(np.float32)
    heads = None if layout.heads is None or site != "head_out" else tuple(range(layout.heads))
    op = Add(site=site, layers=layer, vector=vector, heads=heads, strength=4.0)  # pyright: ignore[reportArgumentType]
    return BoundOp(0, op, {layer: {"vectors": vector[None]}}, {layer: layout})
