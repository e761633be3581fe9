"""Every site that a model offers is the oracle's, for every architecture, in batches of mixed lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import midstream as ms
from parity.architectures import ARCHITECTURES, LISTED, UNLISTED, WINDOW, extra_inputs, prompt
from parity.oracle import FAMILIES, PARTIAL, REFUSED, SITES

NAMES = [name for name in ARCHITECTURES if name in FAMILIES]
#: Shorter than a sliding window or an attention chunk, as long, one longer, several windows.
LENGTHS = (WINDOW - 3, 3 * WINDOW, 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 5 * WINDOW + 3)
#: Sites that an unlisted architecture has and that may nevertheless be refused: their attention goes through no
#: common function, modules add the residual inside, or gates return something else.
MAY_REFUSE: dict[str, set[str]] = {
    "falcon_new": {"head_out", "q", "k"},
    "falcon_multi_query": {"head_out", "q", "k"},
    "falcon_alibi": {"head_out", "q", "k"},
    "gpt_neo": {"head_out", "q", "k"},
    "bloom": {"attn_out", "mlp_out", "head_out", "q", "k"},
    "bloom_norm_residual": {"head_out", "q", "k"},
    "mpt": {"attn_out", "mlp_out", "head_out", "q", "k"},
    "qwen3_next": {"head_out"},
    "llama4": {"router_logits"},
    "gemma4_moe": {"q"},  # queries are normed and the scores not scaled: nothing tells that from a scaling beforehand
}
#: What a registry of attention functions is never asked for.
OWN_ATTENTION = {"falcon_new", "falcon_multi_query", "falcon_alibi", "bloom", "bloom_norm_residual"} | {
    *("gpt_neo", "mpt", "mamba")
}


def prompts_of(name: str) -> list[list[int]]:
    """One prompt of each length; without an image none holds image tokens."""
    generator = torch.Generator().manual_seed(3)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in LENGTHS]


def layers_of(name: str, site: str, count: int) -> list[int]:
    return PARTIAL.get(name, {}).get(site, list(range(count)))


# --- what is offered


@pytest.mark.parametrize("name", NAMES)
def test_each_site_of_the_oracle_is_offered_or_refused_by_name(name: str, tiny: Any) -> None:
    offered, refused = set(tiny(name).sites), tiny(name).lm.capabilities.refused
    right = set(SITES) - set(REFUSED[name])
    assert not offered - right, "offered against the semantics"
    missing = right - offered
    assert missing <= (MAY_REFUSE.get(name, set()) if name in UNLISTED else set())
    for site in set(SITES) - offered:
        assert refused.get(site), f"{site} is refused without a reason"


@pytest.mark.parametrize("name", LISTED)
def test_listed_families_have_every_site(name: str, tiny: Any) -> None:
    assert set(tiny(name).sites) == set(SITES) - set(REFUSED[name])


@pytest.mark.parametrize("name", NAMES)
def test_refused_sites_are_an_error_that_names_what_there_is(name: str, tiny: Any, tools: Any) -> None:
    lm = tiny(name).lm
    for site in set(SITES) - set(tiny(name).sites):
        with pytest.raises(ms.UnsupportedOperationError) as caught:
            lm.capture([[1, 5]], sites=["resid_post", site])
        assert caught.value.code == "E_SITE"
        tools.one_line(str(caught.value), site, lm.capabilities.refused[site], "resid_post")


@pytest.mark.parametrize("name", ["t5", "gemma3n"])
def test_models_without_one_stream_are_refused_at_load(name: str, tools: Any) -> None:
    with pytest.raises(ms.ModelLoadError) as caught:
        ms.load(ARCHITECTURES[name]())
    tools.one_line(str(caught.value))


@pytest.mark.parametrize("name", sorted(PARTIAL))
def test_a_layer_without_the_site_is_an_error_that_names_those_with_it(name: str, tiny: Any, tools: Any) -> None:
    lm, sites = tiny(name).lm, set(tiny(name).sites)
    for site, layers in PARTIAL[name].items():
        if site not in sites:
            continue
        absent = next(layer for layer in range(lm.facts.num_layers) if layer not in layers)
        with pytest.raises(ms.SpecError) as caught:
            lm.capture([[1, 5]], site=site, layers=[layers[0], absent])
        assert caught.value.code == "E_LAYER_RANGE"
        tools.one_line(str(caught.value), str(absent), *map(str, layers))
        assert lm.capture([[1, 5]], site=site).layer_ids == tuple(layers)


# --- the rows


@pytest.mark.parametrize("name", NAMES)
def test_every_site_in_a_mixed_batch_is_the_oracles(name: str, tiny: Any, tools: Any) -> None:
    one, prompts = tiny(name), prompts_of(name)
    cap = one.lm.capture(prompts, sites=one.sites)
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    assert [list(output.prompt_token_ids) for output in cap.outputs] == prompts
    assert {output.token_ids for output in cap.outputs} == {()}
    assert cap.receipt == ms.CaptureReceipt(sum(LENGTHS), sum(LENGTHS))
    assert cap.sites == tuple(one.sites)
    for site in one.sites:
        assert list(cap.layouts[site]) == layers_of(name, site, one.lm.facts.num_layers), site
        for layer, layout in cap.layouts[site].items():
            assert cap.rows(layer, site).shape == (sum(LENGTHS), layout.width)
            assert cap.rows(layer, site).dtype == torch.float32
            if site in ("head_out", "q", "k"):
                assert layout.heads * layout.head_size == layout.width
    one.assert_rows(cap)


@pytest.mark.parametrize("name", NAMES)
def test_each_site_alone_and_each_prompt_alone_is_the_oracles(name: str, tiny: Any) -> None:
    one, prompts = tiny(name), prompts_of(name)
    for place, site in enumerate(one.sites):
        one.assert_rows(one.lm.capture([prompts[place % len(prompts)]], site=site))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_ATTENTION])
def test_eager_attention_gives_the_same_rows(name: str, fresh: Any) -> None:
    one = fresh(name)
    default = one.model.config._attn_implementation
    one.model.set_attn_implementation("eager")
    one.assert_rows(one.lm.capture(prompts_of(name), sites=one.sites))
    # the other way round: loaded as eager, changed afterwards
    again = ms.load(one.model)
    one.model.set_attn_implementation(default)
    one.assert_rows(again.capture(prompts_of(name), sites=one.sites))


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt2", "opt", "mistral", "phi3"])
def test_head_layouts_are_those_of_the_config(name: str, tiny: Any) -> None:
    one = tiny(name)
    cap, config = one.lm.capture([[1, 5, 9]], sites=["head_out", "q", "k"]), one.model.config
    keys = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for site, heads in (("head_out", config.num_attention_heads), ("q", config.num_attention_heads), ("k", keys)):
        layout = cap.layouts[site][0]
        assert (layout.heads, layout.head_size, layout.width) == (heads, size, heads * size), site


@pytest.mark.parametrize("name", NAMES)
def test_some_rows_of_some_layers_are_the_oracles(name: str, tiny: Any) -> None:
    one, prompts = tiny(name), prompts_of(name)
    cap = one.lm.capture(prompts, sites=["resid_pre", "resid_post"], layers=[1], rows="prompt[-1], prompt[2:4]")
    want = [position for p in prompts for position in sorted({2, 3, len(p) - 1} & set(range(len(p))))]
    assert cap.labels.position.tolist() == want
    assert cap.layer_ids == (1,)
    one.assert_rows(cap)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_share_a_long_prefix_are_the_oracles(name: str, tiny: Any) -> None:
    """Enough saved for a prefix to be computed once, longer than every window; one prompt is all prefix."""
    one = tiny(name)
    generator = torch.Generator().manual_seed(5)
    prefix = [1, *torch.randint(3, 140, (119,), generator=generator).tolist()]
    tails = [torch.randint(3, 140, (length,), generator=generator).tolist() for length in (1, 9, 0, 17, 3, 0, 4)]
    one.assert_rows(one.lm.capture([[*prefix, *tail] for tail in tails], sites=one.sites))


# --- images


def test_an_image_and_text_beside_it_are_the_oracles(tiny: Any, tools: Any) -> None:
    one, image, other = tiny("llava"), extra_inputs("llava"), extra_inputs("llava", seed=12)
    texts = prompts_of("llava")[:3]
    prompts = [
        texts[0],
        {"prompt_token_ids": prompt("llava"), "multi_modal_data": image},
        texts[1],
        {"prompt_token_ids": prompt("llava", length=31, seed=8), "multi_modal_data": other},
        texts[2],
    ]
    cap = one.lm.capture(prompts, sites=one.sites)
    assert tools.table_of(cap.labels) == tools.every_row(cap.outputs)
    one.assert_rows(cap, {1: image, 3: other})


def test_the_same_ids_with_two_images_and_without_differ(tiny: Any) -> None:
    one, ids = tiny("llava"), prompt("llava")
    images = [extra_inputs("llava", seed=seed) for seed in (11, 12)]
    prompts: list[Any] = [{"prompt_token_ids": ids, "multi_modal_data": image} for image in images]
    cap = one.lm.capture([*prompts, ids], layers=[2], rows="prompt[-1]")
    one.assert_rows(cap, dict(enumerate(images)))
    rows = cap.rows(2)
    assert not torch.isclose(rows[0], rows[1]).all()
    assert not torch.isclose(rows[0], rows[2]).all()


def test_layers_of_a_wrapper_are_those_of_its_text_decoder(tiny: Any) -> None:
    facts = tiny("llava").lm.facts
    assert (facts.num_layers, facts.hidden_size, facts.model_type) == (3, 64, "llava")
    assert tiny("llava").lm.capture([[1, 5]]).layer_ids == (0, 1, 2)
