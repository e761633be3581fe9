"""The self-test of an engine: one pass over two short prompts shows which taps hold, and refuses the rest by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from midstream.core.errors import SelfTestError
from midstream.core.sites import SITES, Site, SiteLayout
from midstream.taps.agreement import close
from midstream.taps.locate import expert_counts, sublayer_pairs

from .places import Place, Wrapped

SHARDED: Final[frozenset[Site]] = frozenset({"head_out", "q", "k"})
"""Sites of which a tensor-parallel rank has its own heads alone."""

Where = tuple[Site, int]


@dataclass(frozen=True, eq=False)
class Examined:
    """What was shown to hold. chosen: the tap of each site and layer; widths: of this rank's rows, with their dtype.

    whole_layouts: of rows whose parts from all ranks are put together. refused: why a site cannot be read.
    """

    chosen: Mapping[Where, Place]
    widths: Mapping[Where, tuple[int, torch.dtype]]
    whole_layouts: Mapping[Site, Mapping[int, SiteLayout]]
    refused: Mapping[Site, str]
    rank: int = 0

    def keeps(self, site: Site) -> bool:
        """Whether this rank keeps rows of a site: the first does of all, the others of those that are in parts."""
        return self.rank == 0 or site in SHARDED

    def plain(self) -> dict[str, Any]:
        """What a client must know, as JSON has it."""
        return {
            "layouts": {
                site: {str(layer): [one.width, one.heads, one.head_size] for layer, one in layers.items()}
                for site, layers in self.whole_layouts.items()
            },
            "refused": dict(self.refused),
        }


@dataclass(eq=False)
class Probe:
    """Looks at everything that one pass over `rows` rows shows.

    arrived: what the final norm left, of the rows in `sampled`, None for all.
    """

    places: Sequence[Place]
    rows: int
    sampled: Tensor | None = None
    seen: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    arrived: Tensor | None = None

    def at(self, place: int, delta: Tensor, residual: Tensor | None) -> None:
        """See tap_op."""
        rows = delta.reshape(-1, delta.shape[-1])[: self.rows]
        if residual is not None:
            rows = rows + residual.reshape(-1, residual.shape[-1])[: self.rows]
        self.seen.setdefault(place, []).append(rows.clone() * self.places[place].scale)

    def of(self, place: Place) -> Tensor | None:
        """The rows of a place that fired exactly once, with one row per token."""
        found = self.seen.get(place.number, [])
        return found[0] if len(found) == 1 and len(found[0]) == self.rows else None


class Examination:
    """Reads a probe's findings: `result` is what holds. Raises SelfTestError when the stream itself does not."""

    def __init__(self, name: str, wrapped: Wrapped, probe: Probe, config: Any, rank: int, ranks: int) -> None:
        self._name, self._wrapped, self._probe, self._config = name, wrapped, probe, config
        self._rank, self._ranks = rank, ranks
        self._chosen: dict[Where, Place] = {}
        self._widths: dict[Where, tuple[int, torch.dtype]] = {}
        self._layouts: dict[Site, dict[int, SiteLayout]] = {}
        self._refused: dict[Site, str] = {}
        self._by_where: dict[Where, list[Place]] = {}
        for place in wrapped.places:
            self._by_where.setdefault((place.site, place.layer), []).append(place)

    def result(self) -> Examined:
        """Everything that holds."""
        self._stream()
        self._sublayers()
        self._routers()
        self._heads()
        layouts: dict[Site, dict[int, SiteLayout]] = {
            site: self._layouts[site] for site in SITES if site in self._layouts
        }
        return Examined(self._chosen, self._widths, layouts, self._refused, self._rank)

    def _keep(self, site: Site, layer: int, place: Place, rows: Tensor, layout: SiteLayout) -> None:
        self._chosen[site, layer] = place
        self._widths[site, layer] = (rows.shape[1], rows.dtype)
        self._layouts.setdefault(site, {})[layer] = layout

    def _rows(self, site: Site, layer: int, candidate: int = 0) -> tuple[Place, Tensor] | None:
        options = self._by_where.get((site, layer), [])
        if candidate >= len(options) or (rows := self._probe.of(options[candidate])) is None:
            return None
        return options[candidate], rows

    def _stream(self) -> None:
        hidden = self._config.hidden_size
        before: Tensor | None = None
        for layer in range(len(self._wrapped.blocks)):
            pre, post = self._rows("resid_pre", layer), self._rows("resid_post", layer)
            if pre is None or post is None or {pre[1].shape[1], post[1].shape[1]} != {hidden}:
                message = f"block {layer} does not read and leave one row of {hidden} per token, once"
                raise SelfTestError(f"{self._name}: {message}")
            if before is not None and not torch.equal(before, pre[1]):
                raise SelfTestError(f"{self._name}: resid_pre of block {layer} is not resid_post of block {layer - 1}")
            rows = post[1]
            if not bool(rows.isfinite().all()) or (rows == rows[:1]).all() or not bool(rows.any()):
                raise SelfTestError(f"{self._name}: block {layer} leaves rows that are all alike or not finite")
            self._keep("resid_pre", layer, *pre, SiteLayout(hidden))
            self._keep("resid_post", layer, *post, SiteLayout(hidden))
            before = rows
        assert before is not None
        last = before if self._probe.sampled is None else before[self._probe.sampled]
        check_final(self._name, last, self._wrapped.final, self._probe.arrived)

    def _sublayers(self) -> None:
        layers = range(len(self._wrapped.blocks))
        candidates: dict[Site, dict[int, list[Place]]] = {}
        for (site, layer), options in self._by_where.items():
            candidates.setdefault(site, {})[layer] = options
        for pair in sublayer_pairs(candidates):
            if all(self._sum_holds(layer, *pair) for layer in layers):
                both: tuple[Site, Site] = ("attn_out", "mlp_out")
                for site, candidate in zip(both, pair, strict=True):
                    for layer in layers:
                        found = self._rows(site, layer, candidate)
                        assert found is not None
                        self._keep(site, layer, *found, SiteLayout(self._config.hidden_size))
                return
        why = "resid_pre + attn_out + mlp_out = resid_post does not hold for its blocks"
        self._refused["attn_out"] = self._refused["mlp_out"] = why

    def _sum_holds(self, layer: int, attn_place: int, mlp_place: int) -> bool:
        asked: tuple[tuple[Site, int], ...] = (
            ("resid_pre", 0), ("attn_out", attn_place), ("mlp_out", mlp_place), ("resid_post", 0),
        )  # fmt: skip
        parts = [self._rows(site, layer, place) for site, place in asked]
        if any(part is None for part in parts):
            return False
        pre, attn, mlp, post = (part[1] for part in parts if part is not None)
        if not pre.shape == attn.shape == mlp.shape:
            return False
        return close(pre.double() + attn.double() + mlp.double(), post, pre, attn, mlp)

    def _routers(self) -> None:
        experts = expert_counts(self._config)
        for layer in range(len(self._wrapped.blocks)):
            for candidate in range(len(self._by_where.get(("router_logits", layer), ()))):
                found = self._rows("router_logits", layer, candidate)
                if found is not None and found[1].shape[1] in experts:
                    self._keep("router_logits", layer, *found, SiteLayout(found[1].shape[1]))
                    break
        if "router_logits" not in self._layouts:
            listed = any(place.site == "router_logits" for place in self._wrapped.places)
            self._refused["router_logits"] = "its gate is not seen" if listed else "it has no experts"

    def _heads(self) -> None:
        """q, k and head_out, of this rank's heads; each must have the width that vLLM's attention layer says."""
        heads, kv_heads = self._config.num_attention_heads, getattr(self._config, "num_key_value_heads", None)
        if getattr(self._config, "kv_lora_rank", None):
            why = f"{self._config.model_type} has latent attention (MLA)"
            self._refused.update({"head_out": why, "q": why, "k": why})
            return
        for layer, module in self._wrapped.attention.items():
            attention: Any = module
            expected = {
                "q": (attention.num_heads, attention.head_size, heads),
                "k": (attention.num_kv_heads, attention.head_size, kv_heads or heads),
                "head_out": (attention.num_heads, getattr(attention, "head_size_v", attention.head_size), heads),
            }
            for site, (here, size, everywhere) in expected.items():
                found = self._rows(site, layer)  # pyright: ignore[reportArgumentType]
                if found is None:
                    continue
                rows = found[1].reshape(self._probe.rows, -1)
                if here * self._ranks == everywhere and rows.shape[1] == here * size:
                    self._keep(site, layer, found[0], rows, SiteLayout(everywhere * size, everywhere, size))  # pyright: ignore[reportArgumentType]
        for site in ("head_out", "q", "k"):
            if site not in self._layouts:
                self._refused[site] = "its attention layer does not show all heads, each on one rank"


def check_final(name: str, last: Tensor, final: Sequence[nn.Module], arrived: Tensor | None) -> None:
    """SelfTestError unless norm(resid_post[L−1]) is what the model gives to the output embedding."""
    if arrived is None or not final:
        raise SelfTestError(f"{name}: there is no final norm to check the stream by")
    rows: Any = last
    for module in final:
        rows = module(rows)
    if not close(rows, arrived):
        raise SelfTestError(f"{name}: norm(resid_post[L-1]) is not what reaches the output embedding")
