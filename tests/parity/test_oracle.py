"""The oracle is right on its own terms: its sites are what the models compute."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from parity.architectures import ARCHITECTURES, LISTED, UNLISTED, extra_inputs, prompt
from parity.oracle import FAMILIES, PARTIAL, REFUSED, SITES, expected, trace
from parity.oracle_math import Trace

NAMES = sorted(FAMILIES)
#: Without a hand-written value: an encoder-decoder, and a decoder of several streams.
WITHOUT_ORACLE = {"t5", "gemma3n"}
MOE = [
    "mixtral",
    "qwen3_moe",
    "granitemoe",
    "olmoe",
    "deepseek_v3",
    "qwen3_next",
    "gpt_oss",
    "llama4",
    "gemma4_moe",
]

BLOCKS = {
    "gpt2": "transformer.h",
    "gpt_neox_parallel": "gpt_neox.layers",
    "gpt_neox_sequential": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    "opt_post_norm": "model.decoder.layers",
    "llava": "model.language_model.layers",
    "falcon_new": "transformer.h",
    "falcon_multi_query": "transformer.h",
    "falcon_alibi": "transformer.h",
    "bloom": "transformer.h",
    "bloom_norm_residual": "transformer.h",
    "gpt_neo": "transformer.h",
    "mpt": "transformer.blocks",
    "mamba": "backbone.layers",
}
#: Attention module of a block, and its output projection.
ATTENTION = {
    "gpt2": ("attn", "c_proj"),
    "gpt_neox_parallel": ("attention", "dense"),
    "gpt_neox_sequential": ("attention", "dense"),
    "opt": ("self_attn", "out_proj"),
    "opt_post_norm": ("self_attn", "out_proj"),
    "phi": ("self_attn", "dense"),
    "falcon_new": ("self_attention", "dense"),
    "falcon_multi_query": ("self_attention", "dense"),
    "falcon_alibi": ("self_attention", "dense"),
    "bloom": ("self_attention", "dense"),
    "bloom_norm_residual": ("self_attention", "dense"),
    "gpt_neo": ("attn.attention", "out_proj"),
    "mpt": ("attn", "out_proj"),
}
#: What the stream is given where a norm stands between it and the attention.
POST_NORM = {
    **dict.fromkeys(["gemma2", "gemma3_text", "olmo2"], "post_attention_layernorm"),
    "glm4": "post_self_attn_layernorm",
}
#: Families whose attention goes through no `eager_attention_forward` that could be watched.
OWN_ATTENTION = {
    *("falcon_new", "falcon_multi_query", "falcon_alibi", "bloom", "bloom_norm_residual"),
    *("gpt_neo", "mpt", "mamba"),
}
#: Its eager attention adds the ALiBi bias twice, so only the default one can be compared.
EAGER_IS_WRONG = {"falcon_alibi"}


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    """The architecture's model with eager attention."""
    model = ARCHITECTURES[name]()
    if name.startswith("falcon") and name not in EAGER_IS_WRONG:
        # Refused with no more than a warning by `set_attn_implementation`; read anew at each forward.
        model.config._attn_implementation = "eager"
    elif name not in OWN_ATTENTION:
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == ("sdpa" if name in EAGER_IS_WRONG else "eager")
    return model


@functools.cache
def trace_of(name: str) -> Trace:
    """The oracle's account of the architecture's prompt."""
    return trace(name, model_of(name), prompt(name), **extra_inputs(name))


@torch.no_grad()
def forward(name: str, model: PreTrainedModel | None = None, **options: Any) -> Any:
    """The model's own forward on the prompt."""
    ids = torch.tensor([prompt(name)])
    return (model or model_of(name))(input_ids=ids, use_cache=False, **extra_inputs(name), **options)


def assert_equal(got: Tensor, want: Tensor, what: str) -> None:
    """Within 1e-5 of the larger of one and the row's largest value."""
    got = got.detach().double().reshape(want.shape)
    bound = 1e-5 * want.abs().amax(dim=-1, keepdim=True).clamp(min=1)
    worst = ((got - want).abs() / bound).max().item()
    assert worst <= 1, f"{what}: {worst:.2f} times the bound"


def blocks_of(name: str) -> Any:
    """The decoder's list of blocks."""
    return model_of(name).get_submodule(BLOCKS.get(name, "model.layers"))


def watch(modules: dict[Any, Any], name: str) -> dict[Any, tuple[Tensor, Tensor]]:
    """First input and first output of each module, copied as they pass."""
    seen: dict[Any, tuple[Tensor, Tensor]] = {}

    def hook(key: Any) -> Any:
        def record(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            read = args[0] if args else kwargs["hidden_states"]
            left = output[0] if isinstance(output, tuple) else output
            seen[key] = (read.detach().clone(), left.detach().clone())

        return record

    handles = [module.register_forward_hook(hook(key), with_kwargs=True) for key, module in modules.items()]
    try:
        forward(name)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def test_every_architecture_has_an_oracle_or_is_known_not_to() -> None:
    assert set(ARCHITECTURES) == set(LISTED) | set(UNLISTED)
    assert set(LISTED) <= set(FAMILIES)
    assert set(ARCHITECTURES) - set(FAMILIES) == WITHOUT_ORACLE
    assert set(REFUSED) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_models_are_the_same_each_time_and_hide_nothing(name: str) -> None:
    state = torch.random.get_rng_state()
    once, twice = ARCHITECTURES[name](), ARCHITECTURES[name]()
    assert torch.equal(state, torch.random.get_rng_state())
    assert not once.training
    for (key, left), (_, right) in zip(once.named_parameters(), twice.named_parameters(), strict=True):
        assert left.dtype == torch.float32, key
        assert torch.equal(left, right), key
        assert left.numel() == 1 or left.min() < left.max(), f"{key} is constant"


@pytest.mark.parametrize("name", NAMES)
def test_sites_have_their_layers_and_widths(name: str) -> None:
    model = model_of(name)
    values = expected(name, model, prompt(name), **extra_inputs(name))
    layers = len(blocks_of(name))
    for site in SITES:
        if site in REFUSED[name]:
            want = []
        else:
            want = PARTIAL.get(name, {}).get(site, list(range(layers)))
        assert sorted(layer for got, layer in values if got == site) == want, site
    config = model.config.get_text_config()
    for (site, layer), value in values.items():
        assert value.dtype == torch.float32
        assert value.shape[:-1] == (len(prompt(name)),)
        if site in ("resid_pre", "resid_post", "attn_out", "mlp_out"):
            assert value.shape[1] == config.hidden_size, (site, layer)
    for layer in range(layers):
        if ("k", layer) in values:
            q, k = values["q", layer].shape[1], values["k", layer].shape[1]
            assert q % config.num_attention_heads == 0
            assert q % k == 0
    grouped = getattr(config, "num_key_value_heads", None)
    if grouped and grouped < config.num_attention_heads and ("k", layers - 1) in values:
        ratio = config.num_attention_heads // grouped
        assert values["q", layers - 1].shape[1] == ratio * values["k", layers - 1].shape[1]


@pytest.mark.parametrize("name", NAMES)
def test_residual_sites_are_what_blocks_read_and_leave(name: str) -> None:
    sites, blocks = trace_of(name).sites, blocks_of(name)
    seen = watch(dict(enumerate(blocks)), name)
    for layer in range(len(blocks)):
        read, left = seen[layer]
        assert_equal(read[0], sites["resid_pre", layer], f"resid_pre {layer}")
        assert_equal(left[0], sites["resid_post", layer], f"resid_post {layer}")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mamba"])
def test_residual_sites_are_the_hidden_states_up_to_the_final_norm(name: str) -> None:
    sites, states = trace_of(name).sites, forward(name, output_hidden_states=True).hidden_states
    layers = len(blocks_of(name))
    assert len(states) == layers + 1
    for layer in range(layers):
        assert_equal(states[layer][0], sites["resid_pre", layer], f"hidden_states {layer}")
        if layer < layers - 1:
            assert_equal(states[layer + 1][0], sites["resid_post", layer], f"hidden_states {layer + 1}")


def test_hidden_states_of_mamba_begin_after_the_first_block() -> None:
    sites, states = trace_of("mamba").sites, forward("mamba", output_hidden_states=True).hidden_states
    for layer in range(3):
        assert_equal(states[layer][0], sites["resid_post", layer], f"hidden_states {layer}")


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "default"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_follow_from_the_last_residual(name: str, eager: bool) -> None:
    want = trace_of(name).logits
    assert want is not None
    model = model_of(name) if eager else ARCHITECTURES[name]()
    assert_equal(forward(name, model).logits[0], want, "logits")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in EAGER_IS_WRONG | {"mamba"}])
def test_patterns_follow_from_q_and_k(name: str) -> None:
    patterns = trace_of(name).patterns
    attentions = forward(name, output_attentions=True).attentions
    assert len(attentions) == len(patterns)
    for given, layer in zip(attentions, sorted(patterns), strict=True):
        assert_equal(given[0], patterns[layer], f"attentions {layer}")
        # A uniform pattern would agree whatever q and k were.
        assert patterns[layer][:, -1].max() > 2 / len(prompt(name))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_ATTENTION])
def test_q_and_k_are_what_the_attention_function_gets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sites, calls = model_of(name), trace_of(name).sites, {}
    path = ATTENTION.get(name, ("self_attn", ""))[0]
    layers = sorted(layer for site, layer in sites if site == "q")
    module = sys.modules[type(blocks_of(name)[layers[0]].get_submodule(path)).__module__]
    original = module.__dict__["eager_attention_forward"]

    def spy(attention: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls[attention.layer_idx] = (query.detach().clone(), key.detach().clone())
        return original(attention, query, key, *args, **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", spy)
    forward(name)
    assert sorted(calls) == layers
    # OPT hands over a query that is already scaled; the site is the one before.
    factor = (64 / model.config.num_attention_heads) ** -0.5 if name.startswith("opt") else 1.0
    for layer, (query, key) in calls.items():
        for site, got in (("q", query / factor), ("k", key)):
            assert_equal(got[0].transpose(0, 1).flatten(1), sites[site, layer], f"{site} {layer}")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mamba"])
def test_the_output_projection_of_head_out_is_the_attention_output(name: str) -> None:
    sites = trace_of(name).sites
    path, projection = ATTENTION.get(name, ("self_attn", "o_proj"))
    layers = sorted(layer for site, layer in sites if site == "head_out")
    attentions = {layer: blocks_of(name)[layer].get_submodule(path) for layer in layers}
    outputs = watch(attentions, name)
    projections = watch({layer: module.get_submodule(projection) for layer, module in attentions.items()}, name)
    for layer in layers:
        read, left = projections[layer]
        assert_equal(read[0], sites["head_out", layer], f"head_out {layer}")
        projected = attentions[layer].get_submodule(projection)(sites["head_out", layer].float())
        assert_equal(projected, left[0].double(), f"projection {layer}")
        if not name.startswith("bloom"):
            assert_equal(outputs[layer][1][0], projected.detach().double(), f"attention output {layer}")


@pytest.mark.parametrize("name", [name for name in NAMES if "attn_out" not in REFUSED[name]])
def test_attn_out_is_what_a_module_gives_once_norms_and_factors_are_applied(name: str) -> None:
    sites, blocks = trace_of(name).sites, blocks_of(name)
    path, _ = ATTENTION.get(name, ("self_attn", "o_proj"))
    paths = {
        layer: POST_NORM.get(name, path if ("head_out", layer) in sites else "linear_attn")
        for layer in range(len(blocks))
    }
    seen = watch({layer: blocks[layer].get_submodule(path) for layer, path in paths.items()}, name)
    factor = 0.6 if name.startswith("granite") else 1.0
    for layer in range(len(blocks)):
        inside = sites["resid_pre", layer] if name == "bloom" else 0
        added = seen[layer][1][0].double() * factor - inside
        assert_equal(added, sites["attn_out", layer], f"attn_out {layer}")


@pytest.mark.parametrize("name", MOE)
def test_router_logits_are_those_before_the_softmax(name: str) -> None:
    sites = trace_of(name).sites
    layers = sorted(layer for site, layer in sites if site == "router_logits")
    body = model_of(name).get_submodule("model")
    with torch.no_grad():
        ids = torch.tensor([prompt(name)])
        given = body(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    assert len(given) == len(layers)
    chosen = set()
    for got, layer in zip(given, layers, strict=True):
        want = sites["router_logits", layer]
        # gemma4's router returns probabilities where the others return logits.
        assert_equal(got, want.softmax(-1) if name == "gemma4_moe" else want, f"router_logits {layer}")
        assert want.min() < 0
        chosen |= set(want.topk(2, dim=-1).indices.flatten().tolist())
    assert len(chosen) > 3, "the prompt visits too few experts to tell them apart"


def test_image_tokens_hold_image_features_and_move_later_rows() -> None:
    name = "llava"
    model, ids = model_of(name), prompt(name)
    plain = trace(name, model, ids).sites
    seen = trace_of(name).sites
    image = torch.tensor(ids) == model.config.image_token_id
    assert image.sum() == 4
    assert torch.equal(plain["resid_pre", 0][~image], seen["resid_pre", 0][~image])
    assert not torch.isclose(plain["resid_pre", 0][image], seen["resid_pre", 0][image]).all(-1).any()
    assert not torch.isclose(plain["resid_post", 2][-1], seen["resid_post", 2][-1]).all()


def test_refusals_have_reasons() -> None:
    for name, sites in REFUSED.items():
        assert set(sites) <= set(SITES), name
        assert all(reason for reason in sites.values())


@torch.no_grad()
def test_gemma3n_blocks_read_several_streams() -> None:
    seen = watch(dict(enumerate(blocks_of("gemma3n"))), "gemma3n")
    for read, left in seen.values():
        assert read.shape == left.shape == (4, 1, len(prompt("gemma3n")), 64)


@torch.no_grad()
def test_t5_decoder_blocks_add_three_sublayers() -> None:
    model, ids = model_of("t5"), torch.tensor([prompt("t5")])
    assert len(list(model.get_submodule("decoder.block.0.layer").children())) == 3
    assert model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.shape == (1, 24, 160)
