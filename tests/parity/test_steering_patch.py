"""Patches: rows of one run in the place of another's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import midstream as ms

PLAIN: dict[str, Any] = {"ignore_eos": True}
SITES = ("resid_pre", "resid_post", "attn_out", "mlp_out", "head_out")


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prompts_of(*lengths: int, seed: int = 131) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def patched(cap: ms.CaptureResult, site: str, **given: Any) -> ms.InterventionSpec:
    return ms.patch(cap, site=site, heads=[0, 1, 2, 3] if site == "head_out" else None, **given)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_a_run_into_itself_changes_no_bit(name: str, tiny: Any) -> None:
    one, (ids,) = tiny(name), prompts_of(9)
    plain = one.lm.capture(ids, sites=one.sites)
    texts = one.lm.generate(ids, max_tokens=4, logprobs=3, **PLAIN)[0]
    scores = one.lm.score([ids], [[5, 6, 7]])
    for site in SITES:
        for source, target in (("prompt", "prompt"), ("prompt[2:-1]", "sequence[2:8]"), ("prompt[-1]", "prompt[8]")):
            spec = patched(plain, site, source=source, target=target)
            cap = one.lm.capture(ids, sites=one.sites, steering=spec)
            assert all(bits(rows) == bits(plain.tensors[key]) for key, rows in cap.tensors.items()), (site, source)
            assert {line.relative for line in cap.outputs[0].steering} == {0.0}
            assert {line.computed for line in cap.outputs[0].steering} == {len(spec.ops[0].vector.array[0])}
        # a decode pass and a scoring pass are padded in other ways than a capture: rows are those of its own kind
        rows = one.lm.capture(ids, site=site, max_tokens=2, **PLAIN)
        spec = patched(rows, site, source="prompt", target="prompt")
        done = one.lm.generate(ids, max_tokens=4, logprobs=3, steering=spec, **PLAIN)[0]
        assert (done.token_ids, done.logprobs) == (texts.token_ids, texts.logprobs), site
        assert torch.allclose(one.lm.score([ids], [[5, 6, 7]], steering=spec), scores, atol=1e-4), site


def test_a_run_into_itself_under_a_residual_multiplier(tiny: Any, tools: Any) -> None:
    one, (ids,) = tiny("granite"), prompts_of(9)
    plain = one.lm.capture(ids, sites=one.sites)
    for site in SITES:
        cap = one.lm.capture(ids, sites=one.sites, steering=patched(plain, site, source="prompt", target="prompt"))
        assert all(tools.worst(rows, plain.tensors[key]) <= 1 for key, rows in cap.tensors.items()), site


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral", "gpt_neox_parallel"])
def test_all_rows_of_another_run_at_the_bottom_make_it_that_run(name: str, tiny: Any, tools: Any) -> None:
    one, (source, target) = tiny(name), prompts_of(9, 9)
    cap = one.lm.capture([target, source], sites=one.sites, max_tokens=4, **PLAIN)
    settings: dict[str, Any] = {"source": "prompt", "target": "prompt", "layers": [0], "sample": 1}
    for site in ("resid_pre", "resid_post"):
        spec = ms.patch(cap, site=site, **settings)
        found = one.lm.capture(target, sites=one.sites, max_tokens=4, steering=spec, **PLAIN)
        # what block 0 attends to is the target's own where its output is patched: rows after the prompt see that
        rows = 12 if site == "resid_pre" else 9
        tokens, want = found.outputs[0].token_ids, cap.outputs[1].token_ids
        assert tokens[: rows - 8] == want[: rows - 8]
        assert found.sample_token_ids(0).tolist() == [*target, *tokens[:-1]]
        for (at, layer), values in found.tensors.items():
            if layer > 0 or site == "resid_pre" or at == "resid_post":
                assert tools.worst(values[:rows], cap.sample(1, at)[layer][:rows]) <= 1, (at, layer)
    references = [[5, 6, 7]]
    spec = ms.patch(cap, site="resid_post", **(settings | {"layers": [2]}))
    got, want = one.lm.score([target], references, steering=spec), one.lm.score([source], references)
    assert torch.allclose(got[:, 0], want[:, 0], atol=1e-4)  # later rows still attend to the target's
    assert not torch.allclose(got[:, 1:], want[:, 1:], atol=1e-3)


def test_rows_pair_in_order(tiny: Any, tools: Any) -> None:
    one, (first, second) = tiny("llama"), prompts_of(7, 10)
    cap = one.lm.capture([first, second], layers=[0, 1], max_tokens=4, **PLAIN)
    rows = cap.sample(1)
    for source, places in (("prompt[-2:]", [8, 9]), ("prompt[1], generated[0]", [1, 10]), ("sequence[4:6]", [4, 5])):
        spec = ms.patch(cap, source=source, target="prompt[0], prompt[5]", sample=1, layers=[1])
        found = one.lm.capture(first, layers=[0, 1], steering=spec)
        assert torch.equal(found.rows(1)[[0, 5]], rows[1][places]), source
        keep = [1, 2, 3, 4, 6]
        assert tools.worst(found.rows(1)[keep], cap.sample(0)[1][keep]) <= 1
        assert [(line.kind, line.layer, line.computed) for line in found.outputs[0].steering] == [("replace", 1, 2)]


def test_heads_are_patched_alone(tiny: Any, tools: Any) -> None:
    one, (source, target) = tiny("llama"), prompts_of(6, 6)
    cap = one.lm.capture([source, target], site="head_out")
    spec = ms.patch(cap, source="prompt", target="prompt", heads=[1, 3], layers=[0])
    rows = one.lm.capture(target, site="head_out", steering=spec).rows(0).reshape(6, 4, -1)
    of_source, of_target = (cap.sample(place)[0].reshape(6, 4, -1) for place in (0, 1))
    assert torch.equal(rows[:, [1, 3]], of_source[:, [1, 3]])
    assert tools.worst(rows[:, [0, 2]], of_target[:, [0, 2]]) <= 1
    assert not torch.isclose(of_source[:, [0, 2]], of_target[:, [0, 2]]).all()


def test_a_patch_goes_with_other_ops_in_their_order(tiny: Any, tools: Any) -> None:
    one, (source, target), vector = tiny("llama"), prompts_of(6, 6), drawn(64)
    cap = one.lm.capture(source, layers=[1])
    patch, add = ms.patch(cap, source="prompt", target="prompt"), ms.add(vector, layers=[1], strength=2.0)
    push = torch.from_numpy(2 * vector)
    for spec, want in ((patch + add, cap.rows(1) + push), (add + patch, cap.rows(1))):
        assert tools.worst(one.lm.capture(target, layers=[1], steering=spec).rows(1), want) <= 1
        batch = one.lm.capture([source, target, target], layers=[1], steering=[None, spec, add])
        assert tools.worst(batch.sample(0)[1], cap.rows(1)) <= 1
        assert tools.worst(batch.sample(1)[1], want) <= 1


def test_a_saved_capture_is_patched_from_as_well(tiny: Any, tmp_path: Any) -> None:
    one, (source, target) = tiny("llama"), prompts_of(6, 6)
    cap = one.lm.capture(source, layers=[0], steering=ms.add(drawn(64), layers=[0]))
    again = ms.CaptureResult.load(cap.save(tmp_path / "rows.safetensors"))
    left = [
        one.lm.capture(target, layers=[2], steering=ms.patch(of, source="prompt", target="prompt")).rows(2)
        for of in (cap, again)
    ]
    assert torch.equal(*left)
    half = one.lm.capture(source, layers=[0], dtype="bfloat16")
    rows = one.lm.capture(target, layers=[0], steering=ms.patch(half, source="prompt", target="prompt")).rows(0)
    assert torch.equal(rows, half.rows(0).float())


# --- refused


def test_rows_that_do_not_pair_are_refused_before_the_model_runs(tiny: Any, tools: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(6, 9)
    cap = one.lm.capture(prompts[0], layers=[1])
    spec = ms.patch(cap, source="prompt", target="prompt")
    add = ms.add(drawn(64), layers=[0])
    short = ms.patch(cap, source="prompt[0]", target="sequence[8]")
    calls: list[tuple[str, Any]] = [
        ("steering[1].ops[0].target", lambda: one.lm.generate(prompts, max_tokens=2, steering=spec)),
        ("steering[1].ops[1].target", lambda: one.lm.capture(prompts, steering=[spec, add + spec])),
        ("steering[1].ops[0].target", lambda: one.lm.score(prompts, [5, 6], steering=[None, spec])),
        ("steering.ops[0].target", lambda: one.lm.stream(prompts[1], max_tokens=2, steering=spec)),
        ("steering.ops[0].target", lambda: one.lm.capture(prompts[0], steering=short)),
    ]
    for path, call in calls:
        with tools.calls(one.model.model.embed_tokens) as seen, pytest.raises(ms.SpecError) as caught:
            call()
        assert (caught.value.code, caught.value.path) == ("E_SELECTION", path)
        tools.one_line(str(caught.value), "paired in order")
        assert seen == []


def test_what_a_capture_has_not_cannot_be_patched_from(tiny: Any, tools: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(6, 9)
    some = one.lm.capture(prompts, layers=[1], rows="prompt[2:]")
    two = one.lm.capture(prompts, sites=["resid_pre", "attn_out"])
    cases: list[tuple[str, str, Any]] = [
        ("E_SELECTION", "patch.source", lambda: ms.patch(some, source="prompt[0]", target="prompt[0]")),
        ("E_SELECTION", "patch.source", lambda: ms.patch(some, source=None, target="prompt")),
        ("E_SELECTION", "patch.source", lambda: ms.patch(some, source="prompt[40]", target="prompt[0]")),
        ("E_SELECTION", "patch.source", lambda: ms.patch(some, source="promt", target="prompt[0]")),
        ("E_SELECTION", "patch.target", lambda: ms.patch(some, source="prompt[2:]", target="generated")),
        (
            "E_LAYER_RANGE",
            "patch.layers[0]",
            lambda: ms.patch(some, source="prompt[2]", target="prompt[2]", layers=[0]),
        ),
        ("E_SITE", "patch.site", lambda: ms.patch(two, source="prompt", target="prompt")),
        ("E_SITE", "patch.site", lambda: ms.patch(two, source="prompt", target="prompt", site="resid_post")),
    ]
    for code, path, call in cases:
        with pytest.raises(ms.SpecError) as caught:
            call()
        assert (caught.value.code, caught.value.path) == (code, path)
        tools.one_line(str(caught.value))
    with pytest.raises(IndexError):
        ms.patch(some, source="prompt[2]", target="prompt[2]", sample=2)
