"""Faults that users of other tools reported of steering: the wrong row, the wrong entry, and strengths that lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import midstream as ms
from midstream.core.prompts import PreparedPrompt
from midstream.formats.vectors import write_vectors
from midstream.taps.reference import reference

PLAIN: dict[str, Any] = {"ignore_eos": True}


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prompts_of(*lengths: int, seed: int = 91) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def rows_of(one: Any, ids: list[int], prompt_len: int, spec: Any, site: str, layer: int) -> Tensor:
    taps = one.lm.session.taps
    return reference(taps, ids, {site: [layer]}, steering=spec, prompt_len=prompt_len)[site, layer]


def moved(rows: Tensor, plain: Tensor) -> list[int]:
    """The places of rows that are not those of the plain model."""
    return torch.nonzero((rows - plain).norm(dim=1) > 1e-3).flatten().tolist()


# --- 12, 13, 27: which token


@pytest.mark.parametrize("position", [0, 3, 4, 5, 7, 9])
def test_12_an_absolute_position_is_steered_when_it_comes_and_only_then(position: int, tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(5, 9, 2)
    spec = ms.add(drawn(64), layers=[0], rows=f"sequence[{position}]")
    once = ms.replace(drawn(1, 64), layers=[0], positions=[position])
    cap = one.lm.capture(prompts, layers=[0], max_tokens=6, steering=[spec, once, None], **PLAIN)
    for sample, where in enumerate(([position], [position], [])):
        ids = [*prompts[sample], *cap.outputs[sample].token_ids[:-1]]
        plain = rows_of(one, ids, len(prompts[sample]), None, "resid_post", 0)
        assert moved(cap.sample(sample)[0], plain) == where
        assert [line.computed for line in cap.outputs[sample].steering] == [len(where)] * len(where)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_13_generated_leaves_the_first_token_and_the_last_prompt_row_does_not(name: str, tiny: Any) -> None:
    one, prompts, vector = tiny(name), prompts_of(5, 9, 2, 14), drawn(64, seed=4)

    def tokens(rows: str | None) -> list[tuple[int, ...]]:
        steering = None if rows is None else ms.add(vector, layers=[1], strength=30.0, rows=rows)
        return [done.token_ids for done in one.lm.generate(prompts, max_tokens=3, steering=steering, **PLAIN)]

    plain, generated, both = tokens(None), tokens("generated"), tokens("prompt[-1], generated")
    for before, after, last in zip(plain, generated, both, strict=True):
        assert after[0] == before[0]
        assert after[1:] != before[1:]
        assert last[0] != before[0]


def test_27_the_end_of_a_prompt_is_plain_in_a_longer_one(tiny: Any, tools: Any) -> None:
    one = tiny("llama")
    (longer,) = prompts_of(52)
    short, spec = longer[:32], ms.add(drawn(64), layers=[0, 1], strength=5.0, rows="prompt[-1]")
    want = {len(ids): rows_of(one, ids, len(ids), spec, "resid_post", 1) for ids in (short, longer)}
    plain = rows_of(one, longer, 52, None, "resid_post", 1)
    for batch in ([short], [longer], [short, longer], [longer, short, longer]):
        cap = one.lm.capture(batch, layers=[1], steering=spec)
        for sample, ids in enumerate(batch):
            assert tools.worst(cap.sample(sample)[1], want[len(ids)]) <= 1
            assert moved(cap.sample(sample)[1], plain[: len(ids)]) == [len(ids) - 1]


# --- 17: whose vector


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_17_two_vectors_in_one_batch(name: str, tiny: Any, tools: Any) -> None:
    one, prompts = tiny(name), prompts_of(9, 9, 9)
    prompts = [prompts[0]] * 3
    specs = [ms.add(drawn(64, seed=seed), layers=[1], strength=4.0) for seed in (1, 2)]
    cap = one.lm.capture(prompts, sites=one.sites, max_tokens=4, steering=[specs[0], None, specs[1]], **PLAIN)
    for sample, spec in enumerate((specs[0], None, specs[1])):
        alone = one.lm.capture(prompts[0], sites=one.sites, max_tokens=4, steering=spec, **PLAIN)
        assert cap.outputs[sample].token_ids == alone.outputs[0].token_ids
        for site in one.sites:
            for layer, rows in alone.sample(0, site).items():
                assert tools.worst(cap.sample(sample, site)[layer], rows) <= 1
    assert len({done.token_ids for done in cap.outputs}) == 3


def test_17_the_same_name_with_new_values_is_the_new_values(tiny: Any, tmp_path: Any) -> None:
    one, (ids,), path = tiny("llama"), prompts_of(6), tmp_path / "vector.safetensors"

    def left(steering: Any) -> Tensor:
        return one.lm.capture(ids, layers=[1], steering=steering).rows(1)

    array, specs = drawn(64, seed=1), []
    for seed in (1, 2):
        write_vectors(path, {1: drawn(64, seed=seed)})
        specs.append(ms.add(path, strength=3.0))
        assert torch.equal(left(specs[-1]), left(ms.add(drawn(64, seed=seed), layers=[1], strength=3.0)))
    assert torch.equal(left(specs[0]), left(ms.add(array, layers=[1], strength=3.0)))
    mine = ms.add(array, layers=[1], strength=3.0)
    array[:] = drawn(64, seed=2)  # a spec is what it was when it was made
    assert torch.equal(left(mine), left(specs[0]))
    assert torch.equal(left(ms.add(array, layers=[1], strength=3.0)), left(specs[1]))


# --- 18: every entry


def test_18_no_entry_is_silently_plain(tiny: Any, tools: Any) -> None:
    one, (ids,), strength = tiny("llama"), prompts_of(7), 8.0
    vector = drawn(64, seed=5)
    spec, model, session = ms.add(vector, layers=[1], strength=strength), one.model, one.lm.session
    item = ms.GenerationItem(PreparedPrompt(tuple(ids)), (ms.InterventionEntry(spec),))
    bare = ms.GenerationItem(PreparedPrompt(tuple(ids)))
    params, sampled = ms.GenerationParams(max_tokens=4, **PLAIN), ms.GenerationParams(max_tokens=4, seed=2, **PLAIN)
    four = {"max_tokens": 4, **PLAIN}
    default = ms.load(model, steering=spec)

    def score(entries: Any) -> list[float]:
        return session.score([ms.ScoringItem(PreparedPrompt(tuple(ids)), (5, 6, 7), entries)]).tolist()

    def last(chunks: Any) -> Any:
        return list(chunks)[-1]

    pairs = {
        "generate": [one.lm.generate(ids, steering=of, **four)[0].token_ids for of in (None, spec)],
        "default": [default.generate(ids, steering=of, **four)[0].token_ids for of in (False, None)],
        "sampled": [one.lm.generate(ids, steering=of, seed=2, n=2, **four)[0].choices for of in (None, spec)],
        "stream": [last(one.lm.stream(ids, steering=of, **four)).completion.token_ids for of in (None, spec)],
        "stream rows": [last(one.lm.stream(ids, layers=[1], steering=of, **four)).capture for of in (None, spec)],
        "default stream": [last(default.stream(ids, steering=of, **four)).completion.token_ids for of in (False, None)],
        "score": [one.lm.score([ids], [[5, 6, 7]], steering=of).tolist() for of in (None, spec)],
        "default score": [default.score([ids], [[5, 6, 7]], steering=of).tolist() for of in (False, None)],
        "capture": [one.lm.capture(ids, layers=[1], steering=of) for of in (None, spec)],
        "default capture": [default.capture(ids, layers=[1], steering=of) for of in (False, None)],
        "capture of decoding": [one.lm.capture(ids, layers=[1], steering=of, **four) for of in (None, spec)],
        "session generate": [session.generate([of], params)[0].token_ids for of in (bare, item)],
        "session sampled": [session.generate([of], sampled, call=0)[0].token_ids for of in (bare, item)],
        "session stream": [last(session.stream(of, params)).completion.token_ids for of in (bare, item)],
        "session score": [score(of) for of in ((), item.state_entries)],
        "session capture": [session.capture([bare.prompt], layers=[1], steering=[of]) for of in (None, spec)],
        "extra": [
            one.lm.generate(ids, steering=of, extra={"num_beams": 1}, **four)[0].token_ids for of in (None, spec)
        ],
        "beams": [
            one.lm.generate(ids, steering=of, extra={"num_beams": 3}, **four)[0].token_ids for of in (None, spec)
        ],
        "extra sampled": [
            one.lm.generate(ids, steering=of, seed=3, extra={"num_beams": 1}, **four)[0].token_ids
            for of in (None, spec)
        ],
    }
    for name, (plain, steered) in pairs.items():
        if isinstance(plain, ms.CaptureResult):
            assert not torch.isclose(plain.rows(1)[-1], steered.rows(1)[-1]).all(), name
        else:
            assert plain != steered, name
    texts = [pairs[name] for name in ("generate", "default", "stream", "default stream", "session generate", "extra")]
    assert all(text == texts[0] for text in texts)
    with session.entries_applied([ms.InterventionEntry(spec)]), torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    assert logits.argmax().item() == pairs["generate"][1][0] != pairs["generate"][0][0]
    # a hook of the plainest kind says what beams are due
    handle = model.model.layers[1].register_forward_hook(lambda *args: args[2] + torch.from_numpy(strength * vector))
    given = torch.tensor([ids])
    settings = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(given, attention_mask=torch.ones_like(given), **settings)[0, len(ids) :].tolist()
    handle.remove()
    assert list(pairs["beams"][1]) == want


#: What `model.generate` may be told that changes its passes: they are steered as any, or refused in words.
PASSES: list[Any] = [
    {"num_beams": 1},
    {"prompt_lookup_num_tokens": 3},
    {"cache_implementation": "static"},
    {"use_cache": False},
    {"prefill_chunk_size": 4},
]


@pytest.mark.parametrize("extra", PASSES, ids=str)
def test_18_passes_of_another_shape_are_steered_or_refused(extra: dict[str, Any], tiny: Any, tools: Any) -> None:
    """Which rows are prompt and which are generated does not depend on how they come."""
    one, (ids,), refusals = tiny("llama"), prompts_of(9), set()
    for rows in (None, "prompt", "generated", "prompt[-1], generated", "sequence[3:11]"):
        spec = ms.add(drawn(64), layers=[1], strength=8.0, rows=rows)
        (want,) = one.lm.generate(ids, max_tokens=5, steering=spec, **PLAIN)
        try:
            (got,) = one.lm.generate(ids, max_tokens=5, steering=spec, extra=extra, **PLAIN)
        except ms.MidstreamError as error:
            tools.one_line(str(error))
            refusals.add(str(error))
        else:
            assert got.token_ids == want.token_ids, rows
    assert len(refusals) <= 1
    (got,), (want,) = (one.lm.generate(ids, max_tokens=5, extra=of, **PLAIN) for of in (extra, {}))
    assert got.token_ids == want.token_ids


def test_18_what_would_be_dropped_is_refused(tiny: Any, tools: Any) -> None:
    """An entry in the wrong list, or of no known kind, is no entry that may be passed over."""
    one, spec = tiny("llama"), ms.add(drawn(64), layers=[1])
    prompt, params = PreparedPrompt((1, 5, 9)), ms.GenerationParams(max_tokens=2)
    wrong: list[Any] = [spec, ms.ConstraintEntry({"regex": "a"}), object()]
    for entry in wrong:
        with tools.calls(one.model.model.embed_tokens) as seen, pytest.raises(ms.SpecError):
            one.lm.session.generate([ms.GenerationItem(prompt, state_entries=[entry])], params)
        assert seen == []


@pytest.mark.parametrize("entry", [ms.InterventionEntry(ms.add(drawn(64), layers=[1])), object()])
def test_18_output_entries_that_are_none_are_refused(entry: Any, tiny: Any, tools: Any) -> None:
    one, prompt = tiny("llama"), PreparedPrompt((1, 5, 9))
    with pytest.raises(ms.SpecError):
        one.lm.session.generate([ms.GenerationItem(prompt, (), [entry])], ms.GenerationParams(max_tokens=2))
    with pytest.raises(ms.SpecError):
        one.lm.session.score([ms.ScoringItem(prompt, (5,), (), [entry])])


# --- 25: strengths


def silent(name: str) -> list[ms.InterventionSpec]:
    """Every kind that has a strength, at 0."""
    v = drawn(64)
    found = [
        ms.add(v, layers=[0, 1], strength=0.0),
        ms.add(drawn(2, 64), layers=[0], positions=[0, 8], strength=0.0, norm_match=True, cap_norm=True),
        ms.ablate(v, layers=[1], strength=0.0),
        ms.replace(v, layers=[0], site="resid_pre", strength=0.0),
        ms.affine(drawn(64, 64), v, layers=[2], strength=0.0),
        ms.low_rank(drawn(2, 64), drawn(64, 2), layers=[2], strength=0.0),
        ms.add(drawn(32), layers=[0], site="head_out", heads=[0, 1], strength=0.0) if name == "llama" else None,
    ]
    if name == "mixtral":
        found.append(ms.router(layers=[1], shift={0: 0.0}))
    return [spec for spec in found if spec is not None]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_25_strength_0_is_bit_equal(name: str, tiny: Any) -> None:
    one, prompts = tiny(name), prompts_of(7, 12, 1)
    for spec in silent(name):
        for settings in ({}, {"max_tokens": 4, "logprobs": 3, **PLAIN}):
            plain, zero = (one.lm.capture(prompts, sites=one.sites, steering=of, **settings) for of in (False, spec))
            assert all(bits(rows) == bits(plain.tensors[key]) for key, rows in zero.tensors.items())
            assert [done.logprobs for done in zero.outputs] == [done.logprobs for done in plain.outputs]
            assert {line.skipped for done in zero.outputs for line in done.steering} == {"strength 0"}
            assert {line.selected for done in zero.outputs for line in done.steering} == {0}
        scores = [one.lm.score(prompts, [5, 6, 7], steering=of) for of in (None, spec)]
        assert bits(scores[0]) == bits(scores[1])


GATE = {"layers": [0], "readout": {"kind": "affine", "w": np.ones(64)}, "rule": {"kind": "sum"}}


def test_25_strength_0_is_bit_equal_where_prompts_share_a_prefix(tiny: Any) -> None:
    one, (prefix,) = tiny("llama"), prompts_of(130)
    prompts = [[*prefix, *tail] for tail in prompts_of(*range(1, 20))]
    plain, zero = (
        one.lm.capture(prompts, sites=one.sites, steering=of)
        for of in (None, ms.add(drawn(64), layers=[1], strength=0))
    )
    assert all(bits(rows) == bits(plain.tensors[key]) for key, rows in zero.tensors.items())


def test_25_strength_0_is_bit_equal_where_it_has_a_gate(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(40, 12, 1, 33)
    spec = ms.add(drawn(64), layers=[1], strength=0.0, gate=GATE)
    scores = [one.lm.score(prompts, prompts_of(*[24] * 4), steering=of) for of in (None, spec)]
    assert bits(scores[0]) == bits(scores[1])


@pytest.mark.parametrize("site", ["resid_pre", "resid_post", "attn_out", "mlp_out"])
def test_25_what_is_added_and_taken_away_returns(site: str, tiny: Any, tools: Any) -> None:
    one, prompts, vector = tiny("llama"), prompts_of(7, 12, 1), drawn(64)
    there_and_back = ms.add(vector, layers=[0, 1], site=site) + ms.add(-vector, layers=[0, 1], site=site)
    plain, back = (
        one.lm.capture(prompts, sites=one.sites, max_tokens=4, steering=of, **PLAIN) for of in (None, there_and_back)
    )
    assert [done.token_ids for done in back.outputs] == [done.token_ids for done in plain.outputs]
    assert all(tools.worst(rows, plain.tensors[key]) <= 1 for key, rows in back.tensors.items())
    assert all(line.computed for done in back.outputs for line in done.steering)


def test_25_the_report_is_strength_times_the_ratio_of_norms(tiny: Any) -> None:
    one, prompts, vector = tiny("llama"), prompts_of(7, 12), drawn(64)
    for strength, rows in ((-3.0, "prompt[1:4]"), (0.5, None), (2.0, "generated")):
        spec = ms.add(vector, layers=[1], strength=strength, rows=rows)
        made = one.lm.generate(prompts, max_tokens=4, steering=spec, **PLAIN)
        for ids, done in zip(prompts, made, strict=True):
            # what block 1 leaves is plain before it is steered: nothing came before it
            plain = rows_of(one, [*ids, *done.token_ids[:-1]], len(ids), None, "resid_post", 1)
            mine = {"prompt[1:4]": slice(1, 4), None: slice(None), "generated": slice(len(ids), None)}[rows]
            ratios = abs(strength) * np.linalg.norm(vector) / plain[mine].norm(dim=1)
            (line,) = done.steering
            assert (line.op, line.kind, line.site, line.layer) == (0, "add", "resid_post", 1)
            assert line.computed == line.selected == len(ratios)
            assert line.relative == pytest.approx(ratios.mean().item(), rel=1e-4)


# --- 26, and numbers


def test_26_steered_rows_train_a_probe(tiny: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(7, 12)
    steering = [ms.add(drawn(64), layers=[0], strength=2.0), None]
    for settings in ({}, {"max_tokens": 4, **PLAIN}):
        rows = one.lm.capture(prompts, layers=[0, 2], steering=steering, **settings).rows(2)
        assert not rows.is_inference()
        assert rows.device.type == "cpu"
        probe = torch.nn.Linear(64, 1)
        probe(rows).pow(2).mean().backward()
        assert probe.weight.grad.abs().sum() > 0
        rows.requires_grad_()
        (rows * 2).sum().backward()
        assert (rows.grad == 2).all()
    scores = one.lm.score(prompts, [5, 6], steering=steering)
    assert not scores.is_inference()
    scores.requires_grad_()


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "granite"])
def test_bfloat16_is_near_and_keeps_its_type(name: str, fresh: Any) -> None:
    exact, model = fresh(name), fresh(name).model.bfloat16()
    lm, prompts = ms.load(model), prompts_of(7, 12, 3)
    specs = [ms.add(drawn(64), layers=[0, 1], strength=3.0), None, ms.ablate(drawn(2, 64), layers=[1])]
    specs[2] += ms.add(drawn(64, seed=3), layers=[2], site="attn_out", strength=2.0)
    cap = lm.capture(prompts, max_tokens=3, steering=specs, **PLAIN)
    assert {rows.dtype for rows in cap.tensors.values()} == {torch.bfloat16}
    ids = [[*prompts[sample], *cap.outputs[sample].token_ids[:-1]] for sample in range(3)]
    for sample, spec in enumerate(specs):
        for layer, rows in cap.sample(sample).items():
            want = rows_of(exact, ids[sample], len(prompts[sample]), spec, "resid_post", layer)
            apart = (rows.float() - want).norm(dim=1) / want.norm(dim=1)
            assert apart.median() < 0.05, (sample, layer)
    zero = lm.capture(prompts, max_tokens=3, steering=ms.add(drawn(64), layers=[0], strength=0.0), **PLAIN)
    plain = lm.capture(prompts, max_tokens=3, **PLAIN)
    assert all(bits(rows) == bits(plain.tensors[key]) for key, rows in zero.tensors.items())
    assert lm.score(prompts, [5, 6, 7], steering=specs).dtype == torch.float32


def test_a_cache_of_the_callers_goes_on_unsteered(tiny: Any) -> None:
    """Nothing of a steered call stays in the model: the next plain forward is the plain one, bit for bit."""
    one, (ids,) = tiny("mixtral"), prompts_of(9)
    given = torch.tensor([ids])
    with torch.no_grad():
        before = one.model(given, cache=DynamicCache(config=one.model.config)).logits
        spec = ms.add(drawn(64), layers=[1], strength=5.0) + ms.router(layers=[0], off=[1])
        one.lm.generate(ids, max_tokens=3, steering=spec)
        list(one.lm.stream(ids, max_tokens=3, steering=spec))
        one.lm.score([ids], [[5, 6]], steering=spec)
        assert torch.equal(one.model(given, cache=DynamicCache(config=one.model.config)).logits, before)
