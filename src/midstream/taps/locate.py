"""Where an architecture keeps its blocks, sublayers, head projections and routers.

A table of data for the families we list, and a structural search for the rest. Either way the answer is a list
of *candidates* per site: a backend's self-test at load takes the first that holds on a tiny forward and refuses
the site by name when none does, so that an unknown architecture never gives wrong rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final, Literal

from torch import Tensor, nn

from midstream.core.errors import ModelLoadError
from midstream.core.narrow import is_list
from midstream.core.sites import Site, SiteLayout


@dataclass(frozen=True, eq=False)
class Tap:
    """One place to read: a module's input or output, times `scale` (a block's residual multiplier)."""

    module: nn.Module
    side: Literal["input", "output"]
    scale: float = 1.0

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor:
        """The tensor at this place, from what a forward (pre-)hook was given."""
        if self.side == "input":
            value = args[0] if args else next(iter(kwargs.values()), None)
            value = kwargs.get("hidden_states", value)
        else:
            value = output[0] if is_list(output) else output
        if not isinstance(value, Tensor):
            raise ModelLoadError(f"{type(self.module).__name__} gave a {type(value).__name__} where a tensor was due")
        return value if self.scale == 1.0 else value * self.scale


@dataclass(frozen=True)
class Family:
    """Paths inside a block. attn_out, mlp_out: the modules whose output is *added to the stream*."""

    attn: str = "self_attn"
    attn_out: str = "self_attn"
    mlp_out: str = "mlp"
    out_proj: str = "self_attn.o_proj"
    router: str = "mlp.gate"
    q: str = ""  # where q and k are whole projections (no rotary): read there; else at the attention function
    k: str = ""
    final: tuple[str, ...] = ("norm",)  # from the last block to the output embedding


_LLAMA: Final = Family()
_GEMMA: Final = Family(attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm")

FAMILIES: Final[dict[str, Family]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": _LLAMA,
    "mixtral": _LLAMA,
    "qwen3_moe": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": Family("attn", "attn", "mlp", "attn.c_proj", final=("ln_f",)),
    "gpt_neox": Family("attention", "attention", "mlp", "attention.dense", final=("final_layer_norm",)),
    "opt": Family(
        # transformers scales OPT's queries before its attention function: the projection is what `q` means
        mlp_out="fc2",
        out_proj="self_attn.out_proj",
        q="self_attn.q_proj",
        k="self_attn.k_proj",
        final=("final_layer_norm", "project_out"),
    ),
}
"""Listed families by the text config's `model_type`."""

_ATTENTION: Final = ("self_attn", "attn", "attention", "self_attention", "linear_attn")
_MIXERS: Final = (*_ATTENTION, "mixer", "mamba")
_OUT_PROJ: Final = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_MLP: Final = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "fc2")
_AFTER_ATTENTION: Final = ("post_attention_layernorm", "post_self_attn_layernorm", "post_attention_norm")
_AFTER_MLP: Final = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_feedforward_norm")
_ROUTER: Final = ("gate", "router", "router.layer", "router.proj", "gate.wg")
_FINAL: Final = (
    "norm",
    "final_layernorm",
    "final_layer_norm",
    "ln_f",
    "norm_f",
    "final_norm",
    "layer_norm",
    "embedding_norm",
)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of one model. candidates: `[site][layer]` → taps to try, best first.

    body: the text decoder that holds `blocks`, run without the head. final: what stands between the last block and
    the output embedding. attention: layer → module whose attention function sees q and k after rotary.
    """

    model: nn.Module
    body: nn.Module
    blocks: tuple[nn.Module, ...]
    final: tuple[nn.Module, ...]
    head: nn.Module | None
    candidates: Mapping[Site, Mapping[int, tuple[Tap, ...]]]
    attention: Mapping[int, nn.Module]
    refused: Mapping[Site, str] = field(default_factory=dict[Site, str])


def submodule(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted path, or None."""
    found: Any = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def text_config(model: Any) -> Any:
    """The config of the text decoder, which a multimodal wrapper keeps inside its own."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def caps_scores(config: Any) -> bool:
    """Whether attention scores are softly capped, which only some attention functions do."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return getattr(text, "attn_logit_softcapping", None) is not None


def locate(model: Any) -> Anatomy:
    """The parts of a Hugging Face model: a decoder, or a multimodal wrapper around one.

    Raises ModelLoadError for encoder-decoder models and where no stack of blocks is found.
    """
    if not hasattr(model, "config") or not hasattr(model, "modules"):
        raise ModelLoadError(f"a {type(model).__name__} is no transformers model: give a folder, a hub id, or a model")
    config = text_config(model)
    if getattr(model.config, "is_encoder_decoder", False) or not hasattr(config, "num_hidden_layers"):
        raise ModelLoadError(f"{model.config.model_type} is no decoder-only model: midstream reads decoders only")
    body, blocks = find_blocks(model, config.num_hidden_layers)
    family = FAMILIES.get(config.model_type)
    final = final_modules(body, family.final if family else None)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    candidates: dict[Site, dict[int, tuple[Tap, ...]]] = {}
    attention: dict[int, nn.Module] = {}
    for layer, block in enumerate(blocks):
        found = _listed(block, family) if family else searched(block)
        found["resid_pre"] = [Tap(block, "input")]
        found["resid_post"] = [Tap(block, "output")]
        for site, taps in found.items():
            if taps:
                candidates.setdefault(site, {})[layer] = tuple(taps)
        names = (family.attn,) if family else _ATTENTION
        if module := next((child for name in names if (child := submodule(block, name))), None):
            attention[layer] = module
    refused: dict[Site, str] = {}
    if getattr(config, "kv_lora_rank", None):
        why = f"{config.model_type} has latent attention (MLA)"
        refused = {"head_out": why, "q": why, "k": why}
    return Anatomy(model, body, blocks, final, head, candidates, attention, refused)


def find_blocks(model: nn.Module, count: int) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The module that holds the list of `count` decoder blocks, and the blocks; ModelLoadError where there is none."""
    found = [
        (parent, child)
        for parent, child in _module_lists(model)
        if len(child) == count and any(submodule(child[0], name) for name in _MIXERS)
    ]
    if len(found) > 1:  # a wrapper whose vision tower is as deep: the text decoder owns the token embedding
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # pyright: ignore
        found = [pair for pair in found if any(child is embedding for child in pair[0].modules())]
    if len(found) != 1:
        raise ModelLoadError(
            f"{type(model).__name__}: found {len(found)} stacks of {count} decoder blocks where one was due; "
            "midstream cannot read this architecture"
        )
    parent, blocks = found[0]
    return parent, tuple(blocks)


def _module_lists(model: nn.Module) -> Iterator[tuple[nn.Module, nn.ModuleList]]:
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child):
                yield parent, child


def final_modules(body: nn.Module, names: tuple[str, ...] | None = None) -> tuple[nn.Module, ...]:
    """What stands between the last block and the output embedding: the modules named, else the first that is found."""
    if names is not None:
        return tuple(module for name in names if (module := submodule(body, name)))
    return tuple(module for name in _FINAL if (module := submodule(body, name)))[:1]


def _listed(block: nn.Module, family: Family) -> dict[Site, list[Tap]]:
    """The taps of a listed family."""

    def at(path: str, side: Literal["input", "output"] = "output") -> list[Tap]:
        module = submodule(block, path) if path else None
        return [Tap(module, side)] if module else []

    return {
        "attn_out": at(family.attn_out),
        "mlp_out": at(family.mlp_out),
        "head_out": at(family.out_proj, "input"),
        "router_logits": at(family.router),
        "q": at(family.q),
        "k": at(family.k),
    }


def searched(block: nn.Module) -> dict[Site, list[Tap]]:
    """The taps that a block of an unlisted architecture may have, likeliest first."""
    scale = float(getattr(block, "residual_multiplier", 1.0))

    def children(of: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
        return [module for name in names if (module := submodule(of, name))]

    attention, mlps = children(block, _ATTENTION)[:1], children(block, _MLP)[:1]
    after_attention, after_mlp = children(block, _AFTER_ATTENTION), children(block, _AFTER_MLP)
    return {
        "attn_out": [Tap(module, "output", scale) for module in [*after_attention, *attention]],
        "mlp_out": [Tap(module, "output", scale) for module in [*after_mlp, *mlps]],
        "head_out": [Tap(module, "input") for module in children(attention[0], _OUT_PROJ)[:1]] if attention else [],
        "router_logits": [Tap(module, "output") for of in [*mlps, block] for module in children(of, _ROUTER)],
    }


def same_parts(anatomy: Anatomy, model: Any) -> bool:
    """Whether `model` is still made of the modules that were located: an adapter may have wrapped one since."""
    if anatomy.model is not model:
        return False
    now = locate(model)
    return all(
        [tap.module for tap in options] == [tap.module for tap in now.candidates.get(site, {}).get(layer, ())]
        for site, layers in anatomy.candidates.items()
        for layer, options in layers.items()
    )


def expert_counts(text: Any) -> set[int]:
    """The numbers of experts that a text config speaks of: a linear layer named gate need not be a router."""
    own: dict[str, Any] = text.__dict__
    return {value for key, value in own.items() if "experts" in key and isinstance(value, int)}


def sublayer_pairs(candidates: Mapping[Site, Mapping[int, Sequence[Any]]]) -> Iterator[tuple[int, int]]:
    """Which (attn_out, mlp_out) candidates to try together, by place in their lists, best first."""

    def places(site: Site) -> range:
        return range(max((len(taps) for taps in candidates.get(site, {}).values()), default=0))

    return product(places("attn_out"), places("mlp_out"))


@dataclass(frozen=True, eq=False)
class TapMap:
    """The taps of one model that a self-test has shown to hold.

    taps: `[site][layer]`; q and k of a layer that has none are read at its attention function. layouts: the widths
    of every site and layer that can be captured. refused: site → why it cannot. shares_prefix, pads_left:
    whether a prompt has the rows that it has alone after a prefix from a cache, and with padding on its left.
    """

    anatomy: Anatomy
    taps: Mapping[Site, Mapping[int, Tap]]
    layouts: Mapping[Site, Mapping[int, SiteLayout]]
    refused: Mapping[Site, str]
    shares_prefix: bool = False
    pads_left: bool = False

    @property
    def sites(self) -> dict[Site, tuple[int, ...]]:
        """Every site that can be captured, with its layers."""
        return {site: tuple(layouts) for site, layouts in self.layouts.items()}
