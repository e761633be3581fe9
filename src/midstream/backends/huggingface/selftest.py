"""The self-test at load: one tiny forward shows which taps hold, and refuses the rest by name."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from midstream.core.errors import SelfTestError
from midstream.core.sites import Site, SiteLayout
from midstream.taps.agreement import close, close_products
from midstream.taps.locate import Anatomy, Tap, TapMap, caps_scores, expert_counts, locate, sublayer_pairs, text_config

from .batchtest import batch_facts
from .hooks import AttentionCall, attention_observed, heads_as_rows, on_tap

SHAPE: Final = (2, 3)  # prompts and tokens of the tiny forward: a batch, so that its rows must be flat
BATCH_SHAPE: Final = (2, 6)


@dataclass
class Seen:
    """What the tiny forward showed. taps: `(site, layer, candidate)` → rows; calls: how often each fired."""

    taps: dict[tuple[Site, int, int], Tensor] = field(default_factory=dict)
    calls: Counter[tuple[Site, int, int]] = field(default_factory=Counter)
    attention: dict[int, list[AttentionCall]] = field(default_factory=dict[int, list[AttentionCall]])
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
    if caps_scores(model.config) and text_config(model)._attn_implementation == "sdpa":
        message = (
            "its attention scores have a soft cap, which sdpa leaves out: load it with attn_implementation='eager'"
        )
        raise SelfTestError(f"{type(model).__name__}: {message}")
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
    shares_prefix, pads_left = batch_facts(anatomy, probe_ids(model, BATCH_SHAPE))
    return TapMap(anatomy, taps, layouts, refused, shares_prefix, pads_left)


def probe_ids(model: Any, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Token ids spread over the vocabulary, none of them a modality's placeholder.

    The last ids of a vocabulary are often padding that was never trained.
    """
    config = text_config(model)
    special = {
        value
        for holder in (model.config, config)
        for key, value in vars(holder).items()
        if isinstance(value, int) and key.endswith(("token_id", "token_index"))
    }
    plain = [token for token in range(config.vocab_size) if token not in special]
    count = shape[0] * shape[1]
    places = torch.linspace(0, len(plain) - 1, count + 2).long()[1:-1]  # neither the first nor the last
    return torch.tensor([plain[place] for place in places]).reshape(shape)


def _tiny_forward(anatomy: Anatomy) -> Seen:
    seen = Seen()
    model: Any = anatomy.model

    def keep_attention(layer: int, call: AttentionCall) -> None:
        cloned = replace(call, query=call.query.clone(), key=call.key.clone(), output=call.output.clone())
        seen.attention.setdefault(layer, []).append(cloned)

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
        try:
            output = model(input_ids=ids, **extra)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise SelfTestError(
                f"{type(model).__name__} cannot run {ids.numel()} token ids: {said[-1]:.200}"
            ) from error
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
    except (TypeError, ValueError, RuntimeError):
        return False  # it wants what its wrapper computes: prompts go through the wrapper
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


def _check_stream(anatomy: Anatomy, seen: Seen, hidden: int) -> None:
    name = type(anatomy.model).__name__
    before: Tensor | None = None
    for layer in range(len(anatomy.blocks)):
        pre, post = _rows(seen, "resid_pre", layer), _rows(seen, "resid_post", layer)
        if pre is None or post is None or pre.shape[1] != hidden or post.shape[1] != hidden:
            raise SelfTestError(f"{name}: block {layer} does not read and leave one row of {hidden} per token, once")
        if before is not None and not torch.equal(before, pre):
            raise SelfTestError(f"{name}: resid_pre of block {layer} is not resid_post of block {layer - 1}")
        if not bool(post.isfinite().all()) or (post == post[:1]).all() or not bool(post.any()):
            raise SelfTestError(
                f"{name}: block {layer} leaves rows that are all alike or not finite: nothing can be shown"
            )
        before = post
    assert before is not None
    final = before
    with torch.inference_mode():
        for module in anatomy.final:
            final = module(final)
    for what, arrived in (("output embedding", seen.head_input), ("end of the decoder", seen.last_hidden_state)):
        if arrived is not None and not close(final, arrived.reshape(-1, arrived.shape[-1])):
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
    return close(pre.double() + attn.double() + mlp.double(), post, pre, attn, mlp)


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
        output = calls[0].output
        if output.shape[2] != _config_heads(anatomy):
            continue  # a shard of the heads would pass for all of them
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
        for site, states in zip(both, (calls[0].query, calls[0].key), strict=True):
            if heads_as_rows(states).shape[0] != SHAPE[0] * SHAPE[1]:
                continue
            if site == "q" and not _queries_hold(anatomy, layer, calls[0]):
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


def _queries_hold(anatomy: Anatomy, layer: int, call: AttentionCall) -> bool:
    """Whether the attention function's queries are what `q` means: all heads, and not scaled beforehand.

    A scaling of 1 says that the module scaled its queries itself, or norms them; only a listed family tells which.
    """
    read_elsewhere = bool(anatomy.candidates.get("q", {}).get(layer))
    return call.query.shape[1] == _config_heads(anatomy) and (call.scaling != 1.0 or read_elsewhere)


def _config_heads(anatomy: Anatomy) -> int | None:
    return vars(text_config(anatomy.model)).get("num_attention_heads", vars(text_config(anatomy.model)).get("n_head"))


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
            known = rows is not None and rows.shape[1] in expert_counts(text_config(anatomy.model))
            if known and rows is not None and logits is not None and close_products(rows, logits):
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
