"""Faults that users of other tools reported (FAULTS.md, lines 1 to 21), put to the engine.

Line 9 and the entries of 18 are in test_texts.py, 15 in test_schedules.py and test_bad_input.py, 16 in test_files.py,
20 and ranks in test_slow_engines.py, other families of 1 to 4 in test_sites.py. Not put here: 6, wrappers of 7 (images
are refused), 18 over HTTP, replayed graphs of 20.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import midstream as ms
from midstream.compat import hidden_states
from midstream.core.errors import ModelLoadError, PromptError, SpecError
from on_vllm.kit import ENGINE, Checkpoint, Engines, assert_rows, relative

NAMES = ("llama", "gpt2", "mixtral")
FINAL = {"gpt2": "transformer.ln_f"}
GENERATED: dict[str, Any] = {"ignore_eos": True}
One = tuple[Checkpoint, ms.LanguageModel]


@pytest.fixture(params=NAMES, scope="module")
def source(request: Any, checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint(request.param)


@pytest.fixture
def one(source: Checkpoint, engines: Engines) -> One:
    """A model and its engine, which keeps nothing: equal numbers are shown by computing them."""
    return source, engines.get(source.folder, engine_kwargs={"enable_prefix_caching": False}, kept_row_bytes=0)


def prompts_of(*lengths: int, seed: int = 51) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 140, (length,), generator=generator).tolist() for length in lengths]


def drawn(seed: int = 0, width: int = 128) -> Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plain(source: Checkpoint, ids: list[int]) -> Any:
    """The model's own forward of one prompt."""
    return source.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)


def moved(rows: Tensor, before: Tensor) -> list[int]:
    """The places of rows that are not those of the plain model."""
    return torch.nonzero((rows - before).norm(dim=1) > 1e-3 * before.norm(dim=1)).flatten().tolist()


# --- 1 to 5, 7: which tensor


def test_01_the_last_layer_is_what_the_final_norm_reads(one: One) -> None:
    source, lm = one
    (ids,) = prompts_of(20)
    last = lm.capture([ids], max_tokens=1, logprobs=1).rows(lm.facts.num_layers - 1)
    with torch.no_grad():
        final = source.model.get_submodule(FINAL.get(source.name, "model.norm"))(last)
        logits = source.model.get_output_embeddings()(final)
    output = plain(source, ids)
    assert relative(final, output.hidden_states[-1][0]) < 1e-4
    assert relative(last, output.hidden_states[-1][0]) > 0.1, "the final norm does not show"
    assert relative(logits, output.logits[0]) < 1e-4
    (said,) = lm.generate([ids], max_tokens=1, logprobs=1, **GENERATED)
    assert said.token_ids == (int(logits[-1].argmax()),)


def test_02_layers_are_the_hidden_states_one_further(one: One) -> None:
    source, lm = one
    (ids,) = prompts_of(20)
    cap = lm.capture([ids], sites=["resid_pre", "resid_post"])
    states = plain(source, ids).hidden_states
    for layer in range(lm.facts.num_layers):
        assert relative(cap.rows(layer, "resid_pre"), states[layer][0]) < 1e-4
        if layer + 1 < lm.facts.num_layers:
            assert relative(cap.rows(layer, "resid_post"), states[layer + 1][0]) < 1e-4


def test_03_the_norm_that_a_steer_matches_is_that_of_the_whole_stream(one: One) -> None:
    _, lm = one
    (ids,), vector = prompts_of(20), drawn()
    before = lm.capture([ids], layers=[1]).rows(1)
    spec = ms.add(vector, layers=[1], strength=0.5, norm_match=True)
    after = lm.capture([ids], layers=[1], steering=spec).rows(1)
    assert relative(after, before + 0.5 * before.norm(dim=1, keepdim=True) * vector / vector.norm()) < 1e-5


def test_04_the_stream_is_the_sum_of_its_parts(one: One) -> None:
    _, lm = one
    cap = lm.capture(prompts_of(20, 3), sites=["resid_pre", "attn_out", "mlp_out", "resid_post"], max_tokens=4)
    for layer in cap.layer_ids:
        pre, attn, mlp, post = (cap.rows(layer, site) for site in ("resid_pre", "attn_out", "mlp_out", "resid_post"))
        assert relative(pre + attn + mlp, post) < 1e-5


def test_05_a_capture_changes_no_logit(one: One) -> None:
    _, lm = one
    given: dict[str, Any] = {"max_tokens": 6, "logprobs": 3, "prompt_logprobs": 1, **GENERATED}
    prompts = prompts_of(20, 3, 40)
    off = lm.generate(prompts, **given)
    on = lm.capture(prompts, sites=list(lm.capabilities.capture.sites), **given).outputs
    for before, after in zip(off, on, strict=True):
        assert (before.token_ids, before.logprobs, before.prompt_logprobs) == (
            after.token_ids,
            after.logprobs,
            after.prompt_logprobs,
        )


def test_07_grouped_heads_keep_their_number(one: One) -> None:
    source, lm = one
    layouts = lm.capture(prompts_of(3), sites=["q", "k"]).layouts
    keys = getattr(source.model.config, "num_key_value_heads", 4)
    assert {(of.heads, of.head_size) for of in layouts["q"].values()} == {(4, 32)}
    assert {(of.heads, of.head_size) for of in layouts["k"].values()} == {(keys, 32)}


# --- 8, 10 to 13: tokens and positions


def test_08_a_short_prompt_beside_long_ones_is_itself(one: One) -> None:
    source, lm = one
    prompts = prompts_of(3, 90, 40, 1, 70)
    cap = lm.capture(prompts, max_tokens=5, **GENERATED)
    assert_rows(cap, source)
    for sample in (0, 3):
        alone = lm.capture([prompts[sample]], max_tokens=5, **GENERATED)
        assert alone.outputs[0].token_ids == cap.outputs[sample].token_ids
        for layer, rows in alone.sample(0).items():
            assert relative(cap.sample(sample)[layer], rows) < 1e-5


def test_10_a_request_that_ends_early_has_no_row_after_it(one: One) -> None:
    source, lm = one
    prompts = prompts_of(9, 3, 14, 2, 5)
    free = lm.generate(prompts, max_tokens=8, **GENERATED)
    stop = free[1].token_ids[2]
    cap = lm.capture(prompts, max_tokens=8, stop_token_ids=[stop], **GENERATED)
    assert len(cap.outputs) == 5
    lengths = [len(done.token_ids) for done in cap.outputs]
    assert lengths[1] < 8
    for sample, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        assert list(cap.sample_positions(sample)) == list(range(len(prompt) + length - 1))
    assert_rows(cap, source)


def test_11_position_0_is_left_out_of_each_prompt_and_nothing_else(one: One) -> None:
    _, lm = one
    prompts = prompts_of(9, 3, 14, 2)
    cap = lm.capture(prompts, rows="prompt, !prompt[0]")
    assert [list(cap.sample_positions(sample)) for sample in range(4)] == [
        list(range(1, len(prompt))) for prompt in prompts
    ]


@pytest.mark.parametrize("position", [0, 4, 5, 9])
def test_12_an_absolute_position_is_steered_when_it_comes_and_only_then(position: int, one: One) -> None:
    source, lm = one
    prompts = prompts_of(5, 9, 2)
    spec = ms.add(drawn(), layers=[0], rows=f"sequence[{position}]")
    once = ms.replace(drawn()[None], layers=[0], positions=[position])
    cap = lm.capture(prompts, layers=[0], max_tokens=6, steering=[spec, once, None], **GENERATED)
    for sample, where in enumerate(([position], [position], [])):
        ids = [*prompts[sample], *cap.outputs[sample].token_ids[:-1]]
        assert moved(cap.sample(sample)[0], source.oracle(ids)["resid_post", 0]) == where
        assert [line.computed for line in cap.outputs[sample].steering] == [len(where)] * len(where)


def test_13_generated_leaves_the_first_token_and_the_last_prompt_row_does_not(one: One) -> None:
    _, lm = one
    prompts, vector = prompts_of(5, 9, 2, 14), drawn(4)

    def tokens(rows: str | None) -> list[tuple[int, ...]]:
        steering = None if rows is None else ms.add(vector, layers=[1], strength=30.0, rows=rows)
        return [done.token_ids for done in lm.generate(prompts, max_tokens=3, steering=steering, **GENERATED)]

    before, generated, both = tokens(None), tokens("generated"), tokens("prompt[-1], generated")
    assert [ids[0] for ids in generated] == [ids[0] for ids in before]
    assert [ids[1:] for ids in generated] != [ids[1:] for ids in before]
    assert [ids[0] for ids in both] != [ids[0] for ids in before]


# --- 14, 17, 19, 21: a serving engine


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("kept", [0, 1 << 28])
def test_14_first_again_in_a_batch_of_eight_and_shuffled(
    kept: int, caching: bool, checkpoint: Callable[[str], Checkpoint], engines: Engines
) -> None:
    source = checkpoint("llama")
    lm = engines.get(source.folder, engine_kwargs={"enable_prefix_caching": caching}, kept_row_bytes=kept)
    (ids,), others = prompts_of(70), prompts_of(9, 40, 33, 64, 1, 100, 70, seed=2)
    batches = [[ids], [ids], [ids, *others], [*others[:3], ids, *others[3:], ids], [ids, ids]]
    for batch in batches:
        cap = lm.capture(batch, max_tokens=3, **GENERATED)
        assert cap.receipt.complete
        assert_rows(cap, source)
    assert cap.receipt.reused == (128 if kept else 0)  # whatever the engine's own cache holds


def test_17_two_vectors_in_one_batch_are_each_its_own(one: One) -> None:
    _, lm = one
    (ids,) = prompts_of(9)
    specs = [ms.add(drawn(1), layers=[1], strength=4.0), None, ms.add(drawn(2), layers=[1], strength=4.0)]
    cap = lm.capture([ids] * 3, max_tokens=4, steering=specs, **GENERATED)
    for sample, spec in enumerate(specs):
        alone = lm.capture([ids], max_tokens=4, steering=spec, **GENERATED)
        assert cap.outputs[sample].token_ids == alone.outputs[0].token_ids
        for layer, rows in alone.sample(0).items():
            assert relative(cap.sample(sample)[layer], rows) < 1e-5
    assert not torch.equal(cap.sample(0)[1], cap.sample(2)[1])


def test_17_the_same_file_with_new_values_is_the_new_values(one: One, tmp_path: Path) -> None:
    from midstream.formats.vectors import write_vectors

    _, lm = one
    (ids,), path = prompts_of(6), tmp_path / "vector.safetensors"
    for seed in (1, 2):
        write_vectors(path, {1: drawn(seed).numpy()})
        by_file = lm.capture([ids], layers=[1], steering=ms.add(path, strength=3.0)).rows(1)
        by_value = lm.capture([ids], layers=[1], steering=ms.add(drawn(seed), layers=[1], strength=3.0)).rows(1)
        assert torch.equal(by_file, by_value)


def test_19_captured_tensors_stay_when_the_engine_goes_on(one: One) -> None:
    _, lm = one
    sites = list(lm.capabilities.capture.sites)
    first = lm.capture(prompts_of(9, 70), sites=sites, max_tokens=4, **GENERATED)
    copies = {key: rows.clone() for key, rows in first.tensors.items()}
    for seed in range(5):
        lm.capture(prompts_of(70, 9, seed=seed), sites=sites, max_tokens=4, **GENERATED)
    assert all(torch.equal(rows, copies[key]) for key, rows in first.tensors.items())


def test_21_what_is_not_proven_is_refused_by_name(checkpoint: Callable[[str], Checkpoint], engines: Engines) -> None:
    engines.close()
    source = checkpoint("llama")
    for given, name in (
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
    ):
        with pytest.raises((SpecError, ModelLoadError), match=name) as raised:
            ms.load(str(source.folder), backend="vllm", dtype="float32", engine_kwargs=ENGINE | given)
        assert "\n" not in str(raised.value)
    lm = engines.get(source.folder)
    with pytest.raises(PromptError, match="embed"):
        lm.capture([{"prompt_embeds": torch.zeros(3, 128)}])


def test_router_logits_by_another_tools_name(checkpoint: Callable[[str], Checkpoint], engines: Engines) -> None:
    source = checkpoint("mixtral")
    lm = engines.get(source.folder)
    prompts = [[5, 6, 7], [8, 9]]
    logits, outputs = hidden_states.get_moe_router_logits_generate(lm, prompts)
    want = source.hf.capture(prompts, site="router_logits")
    assert sorted(logits) == list(want.layer_ids)
    for layer, rows in logits.items():
        assert relative(rows, want.rows(layer)) < 1e-4
    assert [one.prompt_token_ids for one in outputs] == prompts
