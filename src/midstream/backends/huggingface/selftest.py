"""The self-test at load: one tiny forward shows which taps hold, and refuses the rest by name (DESIGN.md §5)."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from midstream.core.errors import SelfTestError
from midstream.core.sites import Site, SiteLayout
from midstream.taps.locate import Anatomy, Tap, TapMap, locate, sublayer_pairs, text_config

from .hooks import attention_observed, heads_as_rows, on_tap

SHAPE: Final = (2, 3)  # prompts and tokens of the tiny forward: a batch, so that its rows must be flat


@dataclass
class Seen:
    """What the tiny forward showed. taps: `(site, layer, candidate)` → rows; calls: how often each fired."""

    taps: dict[tuple[Site, int, int], Tensor] = field(default_factory=dict)
    calls: Counter[tuple[Site, int, int]] = field(default_factory=Counter)
    attention: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict)
    router_inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    head_input: Tensor | None = None
    last_hidden_state: Tensor | None = None
    body_alone: bool = False  # the decoder's body, called by itself, gives the same last rows


def examine(model: Any) -> TapMap:
    """Locate a model's parts and keep the taps that hold.

    Raises SelfTestError when the residual stream itself cannot be read: blocks that do not follow one another, or
    a last block whose normed output is not what enters the output embedding. Sublayer sites that do not hold are
    refused by name in the result.
    """
    anatomy = locate(model)
    seen = _tiny_forward(anatomy)
    hidden = text_config(model).hidden_size
    taps: dict[Site, dict[int, Tap]] = {}
    layouts: dict[Site, dict[int, SiteLayout]] = {}
    refused: dict[Site, str] = dict(anatomy.refused)
    _check_stream(anatomy, seen, hidden)
    for site in ("resid_pre", "resid_post"):
        taps[site] = {layer: options[0] for layer, options in anatomy.candidates[site].items()}
        layouts[site] = dict.fromkeys(taps[site], SiteLayout(hidden))
    _keep_sublayers(anatomy, seen, hidden, taps, layouts, refused)
    _keep_heads(anatomy, seen, taps, layouts, refused)
    _keep_queries_keys(anatomy, seen, taps, layouts, refused)
    _keep_routers(anatomy, seen, taps, layouts, refused)
    if not seen.body_alone:
        anatomy = replace(anatomy, body=anatomy.model)
    return TapMap(anatomy, taps, layouts, refused)


def probe_ids(model: Any) -> Tensor:
    """Token ids `[2, 3]` that no modality claims as its placeholder."""
    config = text_config(model)
    special = {
        value
        for holder in (model.config, config)
        for key, value in vars(holder).items()
        if isinstance(value, int) and key.endswith(("token_id", "token_index"))
    }
    plain = [token for token in range(config.vocab_size - 1, -1, -1) if token not in special]
    count = SHAPE[0] * SHAPE[1]
    return torch.tensor([plain[place % len(plain)] for place in range(count)]).reshape(SHAPE)


def _tiny_forward(anatomy: Anatomy) -> Seen:
    seen = Seen()
    model: Any = anatomy.model

    def keep_attention(layer: int, query: Tensor, key: Tensor, output: Tensor) -> None:
        seen.attention.setdefault(layer, []).append((query.clone(), key.clone(), output.clone()))

    with ExitStack() as hooks, torch.inference_mode():
        for site, layers in anatomy.candidates.items():
            for layer, options in layers.items():
                for place, tap in enumerate(options):
                    hooks.callback(_watch(seen, tap, (site, layer, place)).remove)
                    if site == "router_logits":
                        hooks.callback(
                            on_tap(
                                Tap(tap.module, "input"),
                                lambda rows, at=(layer, place): seen.router_inputs.__setitem__(at, rows.clone()),
                            ).remove
                        )
        hooks.enter_context(attention_observed(anatomy.attention, keep_attention))
        if anatomy.head is not None:
            hooks.callback(on_tap(Tap(anatomy.head, "input"), lambda rows: setattr(seen, "head_input", rows)).remove)
        ids = probe_ids(model).to(model.get_input_embeddings().weight.device)
        extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        output = model(input_ids=ids, **extra)
    seen.last_hidden_state = getattr(output, "last_hidden_state", None)
    seen.body_alone = _body_agrees(anatomy, seen, ids)
    return seen


def _body_agrees(anatomy: Anatomy, seen: Seen, ids: Tensor) -> bool:
    """Whether the body can be run by itself: a wrapper may compute positions that its body would not."""
    body: Any = anatomy.body
    if "input_ids" not in inspect.signature(body.forward).parameters:
        return False
    alone: list[Tensor] = []
    hook = on_tap(Tap(anatomy.blocks[-1], "output"), alone.append)
    try:
        with torch.inference_mode():
            body(input_ids=ids)
    finally:
        hook.remove()
    return len(alone) == 1 and torch.equal(alone[0].reshape(-1, alone[0].shape[-1]), _last_rows(anatomy, seen))


def _last_rows(anatomy: Anatomy, seen: Seen) -> Tensor:
    """What the last block left in the tiny forward."""
    return seen.taps["resid_post", len(anatomy.blocks) - 1, 0]


def _watch(seen: Seen, tap: Tap, key: tuple[Site, int, int]) -> Any:
    def take(rows: Tensor) -> None:
        seen.calls[key] += 1
        seen.taps[key] = rows.reshape(-1, rows.shape[-1]).clone()  # some blocks add to a sublayer's output in place

    return on_tap(tap, take)


def _rows(seen: Seen, site: Site, layer: int, place: int = 0) -> Tensor | None:
    """A candidate's rows, if it fired exactly once and has one row per token."""
    key = (site, layer, place)
    rows = seen.taps.get(key)
    return rows if rows is not None and seen.calls[key] == 1 and len(rows) == SHAPE[0] * SHAPE[1] else None


def _close(a: Tensor, b: Tensor, *scale: Tensor) -> bool:
    """Equal up to the rounding of sums of `scale` (default: of `b`) in the model's dtype, row by row.

    Norms of what was added bound the rounding, so that a stream with massive activations does not hide a sublayer
    that is wrong elsewhere more than its own arithmetic does.
    """
    epsilon = torch.finfo(b.dtype).eps
    bound = torch.stack([part.double().norm(dim=-1) for part in scale or (b,)]).sum(0) * (16 * epsilon) + 1e-12
    return a.shape == b.shape and bool(((a.double() - b.double()).norm(dim=-1) <= bound).all())


def _check_stream(anatomy: Anatomy, seen: Seen, hidden: int) -> None:
    name = type(anatomy.model).__name__
    before: Tensor | None = None
    for layer in range(len(anatomy.blocks)):
        pre, post = _rows(seen, "resid_pre", layer), _rows(seen, "resid_post", layer)
        if pre is None or post is None or pre.shape[1] != hidden or post.shape[1] != hidden:
            raise SelfTestError(f"{name}: block {layer} does not read and leave one row of {hidden} per token, once")
        if before is not None and not torch.equal(before, pre):
            raise SelfTestError(f"{name}: resid_pre of block {layer} is not resid_post of block {layer - 1}")
        before = post
    assert before is not None
    final = before
    with torch.inference_mode():
        for module in anatomy.final:
            final = module(final)
    for what, arrived in (("output embedding", seen.head_input), ("end of the decoder", seen.last_hidden_state)):
        if arrived is not None and not _close(final, arrived.reshape(-1, arrived.shape[-1])):
            raise SelfTestError(f"{name}: norm(resid_post[{layer}]) is not what reaches the {what}")
    if seen.head_input is None and seen.last_hidden_state is None:
        raise SelfTestError(f"{name} has neither an output embedding nor a last_hidden_state to check the stream by")


def _keep_sublayers(
    anatomy: Anatomy,
    seen: Seen,
    hidden: int,
    taps: dict[Site, dict[int, Tap]],
    layouts: dict[Site, dict[int, SiteLayout]],
    refused: dict[Site, str],
) -> None:
    """attn_out and mlp_out: the first candidates whose sum with resid_pre is resid_post at every layer."""
    layers = range(len(anatomy.blocks))
    for pair in sublayer_pairs(anatomy.candidates):
        if all(_sum_holds(seen, layer, *pair) for layer in layers):
            for site, place in zip(("attn_out", "mlp_out"), pair, strict=True):
                taps[site] = {layer: anatomy.candidates[site][layer][place] for layer in layers}
                layouts[site] = dict.fromkeys(layers, SiteLayout(hidden))
            return
    why = "resid_pre + attn_out + mlp_out = resid_post does not hold for its blocks"
    refused["attn_out"] = refused["mlp_out"] = why


def _sum_holds(seen: Seen, layer: int, attn_place: int, mlp_place: int) -> bool:
    pre, post = seen.taps["resid_pre", layer, 0], seen.taps["resid_post", layer, 0]
    attn, mlp = _rows(seen, "attn_out", layer, attn_place), _rows(seen, "mlp_out", layer, mlp_place)
    if attn is None or mlp is None or attn.shape != pre.shape or mlp.shape != pre.shape:
        return False
    return _close(pre.double() + attn.double() + mlp.double(), post, pre, attn, mlp)


def _keep_heads(
    anatomy: Anatomy,
    seen: Seen,
    taps: dict[Site, dict[int, Tap]],
    layouts: dict[Site, dict[int, SiteLayout]],
    refused: dict[Site, str],
) -> None:
    """head_out: what enters the output projection must be what the attention function gave, head by head."""
    if "head_out" in refused:
        return
    for layer, options in anatomy.candidates.get("head_out", {}).items():
        calls, rows = seen.attention.get(layer, []), _rows(seen, "head_out", layer)
        if len(calls) != 1 or rows is None:
            continue
        output = calls[0][2]  # [batch, tokens, heads, size]
        if output.numel() == rows.numel() and torch.equal(output.reshape(rows.shape), rows):
            taps.setdefault("head_out", {})[layer] = options[0]
            layouts.setdefault("head_out", {})[layer] = SiteLayout(rows.shape[1], output.shape[2], output.shape[3])
    if "head_out" not in layouts:
        refused["head_out"] = "what enters the output projection is not the attention function's output"


def _keep_queries_keys(
    anatomy: Anatomy,
    seen: Seen,
    taps: dict[Site, dict[int, Tap]],
    layouts: dict[Site, dict[int, SiteLayout]],
    refused: dict[Site, str],
) -> None:
    """q and k: at the attention function, or at whole projections where the family says so."""
    if "q" in refused:
        return
    both: tuple[Site, Site] = ("q", "k")
    for layer in anatomy.attention:
        calls = seen.attention.get(layer, [])
        if len(calls) != 1:
            continue
        for site, states in zip(both, calls[0][:2], strict=True):
            if heads_as_rows(states).shape[0] != SHAPE[0] * SHAPE[1]:
                continue
            layout = SiteLayout(states.shape[1] * states.shape[3], states.shape[1], states.shape[3])
            options = anatomy.candidates.get(site, {}).get(layer, ())
            if options:
                rows = _rows(seen, site, layer)
                if rows is None or rows.shape[1] != layout.width:
                    continue
                taps.setdefault(site, {})[layer] = options[0]
            layouts.setdefault(site, {})[layer] = layout
    for site in both:
        if site not in layouts:
            refused[site] = "its attention does not go through transformers' attention functions"


def _keep_routers(
    anatomy: Anatomy,
    seen: Seen,
    taps: dict[Site, dict[int, Tap]],
    layouts: dict[Site, dict[int, SiteLayout]],
    refused: dict[Site, str],
) -> None:
    """router_logits: the gate's logits before any softmax, which must be its weight applied to its input."""
    for layer, options in anatomy.candidates.get("router_logits", {}).items():
        for place, tap in enumerate(options):
            rows, inputs = _rows(seen, "router_logits", layer, place), seen.router_inputs.get((layer, place))
            logits = None if inputs is None else _gate(tap.module, inputs.reshape(-1, inputs.shape[-1]))
            if rows is not None and logits is not None and _close(rows, logits):
                taps.setdefault("router_logits", {})[layer] = tap
                layouts.setdefault("router_logits", {})[layer] = SiteLayout(rows.shape[1])
                break
    if "router_logits" not in layouts:
        found = "router_logits" in anatomy.candidates
        refused["router_logits"] = "its gate's output is not its logits" if found else "it has no experts"


def _gate(module: nn.Module, inputs: Tensor) -> Tensor | None:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != inputs.shape[1]:
        return None
    with torch.inference_mode():
        return nn.functional.linear(inputs.to(weight.dtype), weight, bias if isinstance(bias, Tensor) else None)


def layers_by_site(taps: TapMap) -> Mapping[Site, tuple[int, ...]]:
    """Every site that can be captured, with its layers."""
    return {site: tuple(layouts) for site, layouts in taps.layouts.items()}
