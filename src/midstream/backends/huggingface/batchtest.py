"""The other half of the self-test: whether a prompt in a batch has the rows that it has alone.

Prompts are padded on the right without a mask, shared prefixes come from a cache, and decoding pads on the left: each
rests on something that not every model gives.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from midstream.core.errors import SelfTestError
from midstream.taps.locate import Anatomy, Tap

from .forward import cache_argument, fresh_positions, new_cache, windows_proven
from .hooks import on_tap


def batch_facts(anatomy: Anatomy, ids: Tensor) -> tuple[bool, bool]:
    """(shares_prefix, pads_left) of a model, shown on `ids` `[2, tokens]`.

    Raises SelfTestError when padding on the right changes a prompt's rows: then its tokens see what follows them.
    """
    ids = ids.to(anatomy.model.get_input_embeddings().weight.device)  # pyright: ignore
    short = ids[:1, : ids.shape[1] // 2]
    alone = _last_rows(anatomy, anatomy.body, short)
    whole = _last_rows(anatomy, anatomy.body, ids[:1])
    padded = ids.clone()
    padded[0, short.shape[1] :] = ids[1, short.shape[1] :]
    right = _last_rows(anatomy, anatomy.body, padded)
    if alone is None or whole is None or right is None or not _same(right[: short.shape[1]], alone):
        name = type(anatomy.model).__name__
        raise SelfTestError(f"{name}: a token's rows change with what follows it: midstream reads causal decoders only")
    return _shares_prefix(anatomy, ids[:1], short.shape[1], whole), _pads_left(anatomy, ids, short, alone, whole)


def _shares_prefix(anatomy: Anatomy, ids: Tensor, prefix: int, whole: Tensor) -> bool:
    """Whether the rows after a prefix that came from a cache, repeated for two, are those of the whole prompt."""
    name, cache = cache_argument(anatomy.body), new_cache(anatomy.model)
    if name is None or cache is None or not windows_proven(anatomy.model):
        return False
    if _last_rows(anatomy, anatomy.body, ids[:, :prefix], **{name: cache, "use_cache": True}) is None:
        return False
    cache.batch_repeat_interleave(2)
    rest = ids[:, prefix:].repeat(2, 1)
    rows = _last_rows(anatomy, anatomy.body, rest, **{name: cache, "use_cache": True})
    return rows is not None and _same(rows, whole[prefix:].repeat(2, 1))


def _pads_left(anatomy: Anatomy, ids: Tensor, short: Tensor, alone: Tensor, whole: Tensor) -> bool:
    """Whether a prompt padded on the left, with mask and positions, has its own rows: also the token after it."""
    model: Any = anatomy.model
    names = inspect.signature(model.forward).parameters
    name, cache = cache_argument(model), new_cache(model)
    if name is None or cache is None or "attention_mask" not in names:
        return False
    width, count = ids.shape[1], short.shape[1]
    left = torch.cat([ids[1:2, : width - count], short], dim=1)
    mask = torch.ones_like(ids)
    mask[0, : width - count] = 0
    batch = torch.cat([left, ids[:1]])
    more: dict[str, Any] = {name: cache, "use_cache": True, "attention_mask": mask}
    if "position_ids" in names:
        more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    rows = _last_rows(anatomy, model, batch, **more)
    if rows is None or not _same(rows[width - count : width], alone) or not _same(rows[width:], whole):
        return False
    more["attention_mask"] = torch.cat([mask, mask.new_ones((2, 1))], dim=1)
    if "position_ids" in names:
        more["position_ids"] = torch.tensor([[count], [width]], device=ids.device)
    after = _last_rows(anatomy, model, ids[1:2, :1].repeat(2, 1), **more)
    longer = _last_rows(anatomy, anatomy.body, torch.cat([short, ids[1:2, :1]], dim=1))
    return after is not None and longer is not None and _same(after[:1], longer[-1:])


def _last_rows(anatomy: Anatomy, module: Any, ids: Tensor, **more: Any) -> Tensor | None:
    """What the last block leaves, `[rows, hidden]`; None where the module refuses the arguments."""
    found: list[Tensor] = []
    hook = on_tap(
        Tap(anatomy.blocks[-1], "output"), lambda rows: found.append(rows.reshape(-1, rows.shape[-1]).clone())
    )
    if "use_cache" in inspect.signature(module.forward).parameters:
        more.setdefault("use_cache", False)
    try:
        with torch.inference_mode(), fresh_positions(anatomy.model):
            module(input_ids=ids, **more)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
        return None
    finally:
        hook.remove()
    return found[0] if len(found) == 1 else None


def _same(rows: Tensor, expected: Tensor) -> bool:
    """Equal up to what batching changes in the rows' dtype: real differences are of the order of 1."""
    tolerance = 1e-4 if rows.dtype in (torch.float32, torch.float64) else 0.1
    error = (rows.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1).clamp(min=1e-9)
    return rows.shape == expected.shape and bool((error <= tolerance).all())
