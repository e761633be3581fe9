"""Where a model of vLLM has its blocks and sublayers, and their wrapping so that a tap stands at each place."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from midstream.core.errors import ModelLoadError
from midstream.core.narrow import is_list
from midstream.core.sites import Site
from midstream.taps.locate import Tap, final_modules, find_blocks, searched

from .extraction import extracted_ids
from .file_settings import FileSettings
from .tap_op import touch


@dataclass(frozen=True, eq=False)
class Place:
    """One tap: of which site and layer, and which of the modules that may hold it.

    scale: what a block multiplies it by before it joins the stream.
    """

    number: int
    site: Site
    layer: int
    candidate: int = 0
    scale: float = 1.0

    @property
    def where(self) -> tuple[Site, int]:
        """Its site and layer."""
        return (self.site, self.layer)


@dataclass(frozen=True, eq=False)
class Wrapped:
    """A model with taps. places: by number. attention: layer → the module whose arguments are q and k."""

    blocks: Sequence[nn.Module]
    final: Sequence[nn.Module]
    places: Sequence[Place]
    attention: Mapping[int, nn.Module]


def wrap(model: nn.Module, config: Any, in_graph: frozenset[Site]) -> Wrapped:
    """Put taps at every place that blocks may have; ModelLoadError where no stack of blocks is found.

    in_graph: sites whose taps a compiler sees; the others are there only in passes that run without it.
    """
    decoder = model.get_language_model() if hasattr(model, "get_language_model") else model  # pyright: ignore
    body, blocks = find_blocks(decoder, config.num_hidden_layers)
    wrapping = _Wrapping(in_graph)
    attention: dict[int, nn.Module] = {}
    for layer, block in enumerate(blocks):
        found = searched(block)
        for site in ("attn_out", "mlp_out", "head_out", "router_logits"):
            for candidate, tap in enumerate(found.get(site, ())):
                wrapping.wrap_tap(site, layer, candidate, tap)
        if (module := _attention_of(block)) is not None:
            attention[layer] = module
            wrapping.wrap_attention(layer, module)
        wrapping.wrap_block(layer, block)
    return Wrapped(blocks, final_modules(body), wrapping.places, attention)


def _attention_of(block: nn.Module) -> nn.Module | None:
    """vLLM's own attention layer in a block, if there is one and it is a decoder's."""
    from vllm.model_executor.layers.attention import Attention

    found = [module for module in block.modules() if isinstance(module, Attention)]
    return found[0] if len(found) == 1 else None


class _Wrapping:
    """Replaces modules' `forward`, on the instance, by one that shows what goes by."""

    def __init__(self, in_graph: frozenset[Site]) -> None:
        self.places: list[Place] = []
        self._in_graph = in_graph

    def _place(self, site: Site, layer: int, candidate: int = 0, scale: float = 1.0) -> tuple[int, bool]:
        number = len(self.places)
        self.places.append(Place(number, site, layer, candidate, scale))
        return number, site in self._in_graph

    def wrap_block(self, layer: int, block: Any) -> None:
        """resid_pre and resid_post: both parts of the residual, where an engine keeps two."""
        before, before_in_graph = self._place("resid_pre", layer)
        after, after_in_graph = self._place("resid_post", layer)
        original = block.forward
        names = list(inspect.signature(original).parameters)
        stream = names.index("hidden_states") if "hidden_states" in names else 0
        second = names.index("residual") if "residual" in names else None

        def forward(*args: Any, **kwargs: Any) -> Any:
            delta = kwargs["hidden_states"] if "hidden_states" in kwargs else args[stream]
            residual = kwargs.get("residual")
            if residual is None and second is not None and second < len(args):
                residual = args[second]
            touch(before, before_in_graph, delta, residual)
            output = original(*args, **kwargs)
            if isinstance(output, Tensor):
                touch(after, after_in_graph, output, None)
            elif len(output) > 1 and second is not None:
                touch(after, after_in_graph, output[0], output[1])
            else:
                touch(after, after_in_graph, output[0], None)
            return output

        block.forward = forward

    def wrap_tap(self, site: Site, layer: int, candidate: int, tap: Tap) -> None:
        """A module's input or output."""
        number, in_graph = self._place(site, layer, candidate, tap.scale)
        module: Any = tap.module
        original = module.forward
        if tap.side == "input":

            def forward(*args: Any, **kwargs: Any) -> Any:
                touch(number, in_graph, args[0] if args else next(iter(kwargs.values())), None)
                return original(*args, **kwargs)
        else:

            def forward(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                touch(number, in_graph, output[0] if is_list(output) else output, None)
                return output

        module.forward = forward

    def wrap_attention(self, layer: int, module: Any) -> None:
        """q and k, after rotary embedding, as the attention layer is given them."""
        (q, q_in_graph), (k, k_in_graph) = self._place("q", layer), self._place("k", layer)
        original: Callable[..., Any] = module.forward

        def forward(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            touch(q, q_in_graph, query, None)
            if key is not None:
                touch(k, k_in_graph, key, None)
            return original(query, key, *args, **kwargs)

        module.forward = forward


def check_supported(vllm_config: Any) -> None:
    """Refuse by name what has not been shown to be right."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ModelLoadError("midstream reads no pipeline-parallel engine yet: use tensor_parallel_size")
    files = FileSettings.read(vllm_config)
    if vllm_config.speculative_config is not None and (extracted_ids(vllm_config) is None or files is None):
        raise ModelLoadError(
            "midstream reads no engine with speculative decoding yet, but for vLLM's extract_hidden_states together "
            "with midstream.backends.vllm.hidden_states_files(…): leave speculative_config out"
        )
    if vllm_config.kv_transfer_config is not None and files is None:
        raise ModelLoadError(
            "a KV connector may hand steered blocks to others: leave kv_transfer_config out, or make it with "
            "midstream.backends.vllm.hidden_states_files(…)"
        )
    if parallel.data_parallel_size > 1:
        raise ModelLoadError("midstream reads no data-parallel engine yet: leave data_parallel_size out")
    if vllm_config.scheduler_config.async_scheduling:
        raise ModelLoadError("midstream labels rows by ids that are there: make the engine with async_scheduling=False")
    if getattr(vllm_config.model_config, "enable_prompt_embeds", False):
        raise ModelLoadError("midstream labels rows by token: leave enable_prompt_embeds out")
    if getattr(parallel, "use_ubatching", False):
        raise ModelLoadError("midstream reads no engine that splits its batches: leave enable_dbo out")
