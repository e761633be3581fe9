"""What comes back: log-probabilities, scores, streams, errors of one item, and a caller's processors in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

import midstream as ms
from midstream.core.prompts import PreparedPrompt
from midstream.taps.reference import reference
from parity.architectures import extra_inputs, prompt

PLAIN: dict[str, Any] = {"ignore_eos": True}
GATE = {"layers": [0, 1], "readout": {"kind": "affine", "w": 0.1 * np.arange(64) - 3}, "rule": {"kind": "sum"}}


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prompts_of(*lengths: int, seed: int = 121) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [[1, *torch.randint(3, 140, (length - 1,), generator=generator).tolist()] for length in lengths]


def steered_ways() -> list[ms.InterventionSpec | None]:
    v = [drawn(64, seed=seed) for seed in range(4)]
    return [
        None,
        ms.add(v[0], layers=[1], strength=4.0, rows="prompt[-1], generated"),
        ms.ablate(v[1], layers=[0, 2]) + ms.add(v[2], layers=[1], strength=3.0, rows="generated"),
        ms.add(v[3], layers=[0, 2], strength=4.0, gate=GATE),
        ms.add(drawn(2, 64), layers=[1], positions=[2, 8], strength=5.0),
    ]


def logits_of(one: Any, ids: Any, prompt_len: int, spec: Any) -> Tensor:
    """The reference's `[tokens, vocabulary]`."""
    logits: list[Tensor] = []
    reference(one.lm.session.taps, list(ids), {}, steering=spec, prompt_len=prompt_len, logits=logits)
    return logits[0]


def item(ids: list[int], spec: ms.InterventionSpec | None, *output: Any) -> ms.GenerationItem:
    return ms.GenerationItem(PreparedPrompt(tuple(ids)), () if spec is None else (ms.InterventionEntry(spec),), output)


# --- log-probabilities


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_logprobs_are_those_of_the_references_logits(name: str, tiny: Any) -> None:
    one, specs = tiny(name), steered_ways()
    prompts = prompts_of(7, 3, 9, 1, 5)
    settings: dict[str, Any] = {"max_tokens": 4, "n": 2, "temperature": 0.7, "seed": 4, "repetition_penalty": 1.3}
    made = one.lm.generate(prompts, steering=specs, logprobs=3, prompt_logprobs=2, **settings, **PLAIN)
    cap = one.lm.capture(prompts, steering=specs, logprobs=3, prompt_logprobs=2, layers=[0], **settings, **PLAIN)
    for ids, spec, done, captured in zip(prompts, specs, made, cap.outputs, strict=True):
        for choice, twin in zip(done.choices, captured.choices, strict=True):
            assert (twin.token_ids, twin.logprobs) == (choice.token_ids, choice.logprobs)
            logits = logits_of(one, [*ids, *choice.token_ids[:-1]], len(ids), spec).log_softmax(-1)
            whole = [*ids, *choice.token_ids]
            found = [*choice.prompt_logprobs, *choice.logprobs]
            assert found[0] is None
            assert len(found) == len(whole)
            for place, (got, token) in enumerate(zip(found[1:], whole[1:], strict=True)):
                row = logits[place]
                assert got.token_id == token
                assert got.logprob == pytest.approx(row[token].item(), abs=2e-4)
                best = row.topk(3 if place >= len(ids) - 1 else 2)
                assert [one for one, _ in got.top] == best.indices.tolist()
                assert [value for _, value in got.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert done.logprobs == done.choices[0].logprobs
        assert done.prompt_logprobs == done.choices[0].prompt_logprobs


def test_none_that_were_not_asked_for(tiny: Any) -> None:
    (done,) = tiny("llama").lm.generate([1, 5, 9], max_tokens=2, **PLAIN)
    assert (done.logprobs, done.prompt_logprobs, done.text, done.choices, done.steering) == (None, None, None, (), ())
    (done,) = tiny("llama").lm.generate([1, 5, 9], max_tokens=2, logprobs=0, **PLAIN)
    assert [one.top for one in done.logprobs] == [(), ()]


# --- scores


def test_scores_count_from_the_references_first_token(tiny: Any, tools: Any) -> None:
    one, specs, prompts = tiny("llama"), steered_ways(), prompts_of(7, 3, 9, 1, 5)
    references = prompts_of(4, 4, 4, 4, 4, seed=122)
    scores = one.lm.score(prompts, references, steering=specs)
    assert (scores.shape, scores.dtype) == ((5, 4), torch.float32)
    for row, ids, after, spec in zip(scores, prompts, references, specs, strict=True):
        logits = logits_of(one, [*ids, *after[:-1]], len(ids), spec)[len(ids) - 1 :]
        want = logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None])[:, 0]
        assert tools.worst(row, want) <= 2
    assert tools.worst(one.lm.score(prompts[::-1], references[::-1], steering=specs[::-1]), scores.flip(0)) <= 2
    # what a generation says of its own tokens is what they score
    made = one.lm.generate(prompts, max_tokens=4, logprobs=0, steering=specs, **PLAIN)
    own = one.lm.score(prompts, [done.token_ids for done in made], steering=specs)
    assert tools.worst(own, torch.tensor([[each.logprob for each in done.logprobs] for done in made])) <= 2
    one_for_all = one.lm.score(prompts, references[0], steering=specs)
    assert tools.worst(one_for_all, one.lm.score(prompts, [references[0]] * 5, steering=specs)) <= 1


def test_nothing_to_score_or_to_generate(tiny: Any, tools: Any) -> None:
    one, spec = tiny("llama"), ms.add(drawn(64), layers=[1])
    with tools.calls(one.model.model.embed_tokens) as seen:
        assert one.lm.score([], []).shape == (0, 0)
        assert one.lm.score([[1, 5], [1, 6], [7]], [[], [], []], steering=spec).shape == (3, 0)
        assert one.lm.session.score([]).shape == (0, 0)
        assert one.lm.generate([], max_tokens=3) == []
        assert one.lm.generate([], max_tokens=3, steering=spec, extra={"num_beams": 2}) == []
        with pytest.raises(ms.SpecError):
            one.lm.capture([], steering=spec)
    assert seen == []


def test_texts_are_scored_as_their_ids(fresh: Any, words: Any, tools: Any) -> None:
    one, spec = fresh("llama", tokenizer=words), ms.add(drawn(64), layers=[1], rows="generated")
    got = one.lm.score(["w010 w011", "w012"], ["w020 w021", "w022 w023"], steering=spec)
    want = one.lm.score([[1, 10, 11], [1, 12]], [[20, 21], [22, 23]], steering=spec)
    assert tools.worst(got, want) <= 1
    assert one.lm.score("w010", "w020 w021").shape == (1, 2)


class Alternating:
    """Forbids what is likeliest after an even number of tokens, and notes what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.dtype == torch.long
        assert scores.shape == (1, 160)
        self.seen.append(tuple(ids[0].tolist()))
        scores = scores.clone()
        if ids.shape[1] % 2 == 0:
            scores[0, scores[0].argmax()] = -torch.inf
        return scores


def test_processors_replay_in_scores_with_the_prefix_that_they_would_see(tiny: Any, tools: Any) -> None:
    one, prompts, references = tiny("llama"), prompts_of(6, 3, 5), prompts_of(4, 4, 4, seed=123)
    specs = steered_ways()[:3]
    alternating = Alternating()
    stacks = [
        ms.StackEntry(logits_processors=[RepetitionPenaltyLogitsProcessor(1.5), alternating]),
        ms.StackEntry(stopping_criteria=[lambda *_: True]),  # never applies
    ]
    outputs: list[Any] = [[stacks[0]], [stacks[1]], []]
    items = [
        ms.ScoringItem(PreparedPrompt(tuple(ids)), tuple(after), item(ids, spec).state_entries, output)
        for ids, after, spec, output in zip(prompts, references, specs, outputs, strict=True)
    ]
    scores = one.lm.session.score(items)
    assert alternating.seen == [tuple([*prompts[0], *references[0]][: 6 + place]) for place in range(4)]
    penalty, again = RepetitionPenaltyLogitsProcessor(1.5), Alternating()
    for place, (ids, after, spec) in enumerate(zip(prompts, references, specs, strict=True)):
        logits = logits_of(one, [*ids, *after[:-1]], len(ids), spec)[len(ids) - 1 :]
        for step, token in enumerate(after):
            row = logits[step][None]
            if place == 0:
                prefix = torch.tensor([[*ids, *after[:step]]])
                row = again(prefix, penalty(prefix, row))
            assert scores[place, step].item() == pytest.approx(row.log_softmax(-1)[0, token].item(), abs=2e-4)


# --- a caller's processors and criteria


def test_processors_and_criteria_in_a_mixed_batch_are_as_alone(tiny: Any) -> None:
    one, specs, prompts = tiny("llama"), steered_ways(), prompts_of(7, 4, 9, 2, 6)
    session, params = one.lm.session, ms.GenerationParams(max_tokens=6, logprobs=1, **PLAIN)

    def stacks() -> list[list[Any]]:
        return [
            [ms.StackEntry(logits_processors=[RepetitionPenaltyLogitsProcessor(1.4)])],
            [ms.StackEntry([Alternating()], [lambda ids, scores: torch.tensor([ids.shape[1] >= 7])])],
            [],
            [ms.StackEntry(stopping_criteria=[lambda ids, scores: ids.shape[1] % 3 == 1])],
            [ms.StackEntry([Alternating()]), ms.StackEntry([RepetitionPenaltyLogitsProcessor(1.2)])],
        ]

    together = session.generate(
        [item(*of, *stack) for *of, stack in zip(prompts, specs, stacks(), strict=True)], params
    )
    for ids, spec, stack, done in zip(prompts, specs, stacks(), together, strict=True):
        (alone,) = session.generate([item(ids, spec, *stack)], params)
        assert (done.token_ids, done.finish_reason) == (alone.token_ids, alone.finish_reason)
        *_, last = session.stream(item(ids, spec, *stack), params)
        assert last.completion.token_ids == done.token_ids
    assert [done.finish_reason for done in together] == ["length", "stop", "length", "stop", "length"]
    assert len(together[1].token_ids) == 3
    assert (len(together[3].token_ids) + 2) % 3 == 1
    # each step by hand, from the reference's logits
    for place in (0, 1, 4):
        ids, spec = prompts[place], specs[place]
        processors = [one for entry in stacks()[place] for one in entry.logits_processors]
        tokens: list[int] = []
        while len(tokens) < len(together[place].token_ids):
            row, prefix = logits_of(one, [*ids, *tokens], len(ids), spec)[-1:], torch.tensor([[*ids, *tokens]])
            for processor in processors:
                row = processor(prefix, row)
            tokens.append(int(row.argmax()))
        assert tuple(tokens) == together[place].token_ids
    plain = one.lm.generate(prompts, max_tokens=6, steering=specs, **PLAIN)
    assert plain[2].token_ids == together[2].token_ids
    assert plain[0].token_ids != together[0].token_ids


def test_processors_and_criteria_beside_extra_are_called_in_the_same_way(tiny: Any) -> None:
    """With the model's own generate as well, once for each token; but that shows its criteria no scores."""
    one, (ids,), calls = tiny("llama"), prompts_of(5), dict[str, list[Any]]()

    def noted(kind: str, ids: Tensor, scores: Any) -> None:
        shown = tuple(scores.shape) if kind == "processor" else None
        calls.setdefault(kind, []).append((tuple(ids.shape), shown))

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        noted("processor", ids, scores)
        return scores

    def stops(ids: Tensor, scores: Tensor) -> bool:
        noted("criterion", ids, scores)
        return False

    found = []
    for extra in ({}, {"num_beams": 1}):
        calls.clear()
        params = ms.GenerationParams(max_tokens=3, extra=extra, **PLAIN)
        one.lm.session.generate([item(ids, None, ms.StackEntry([process], [stops]))], params)
        found.append(dict(calls))
    assert found[0] == found[1]


# --- one item's failure is one item's


def test_an_item_that_fails_leaves_the_others_whole(tiny: Any, tools: Any) -> None:
    one, prompts = tiny("llama"), prompts_of(5, 3, 6)
    session, params = one.lm.session, ms.GenerationParams(max_tokens=4, **PLAIN)
    spec = ms.add(drawn(64), layers=[1], strength=4.0)

    def spoil(ids: Tensor, scores: Tensor) -> Tensor:
        return scores if ids.shape[1] < 5 else scores[:, :7]

    items = [item(prompts[0], spec), item(prompts[1], spec, ms.StackEntry([spoil])), item(prompts[2], None)]
    made = session.generate(items, params)
    want = one.lm.generate(prompts, max_tokens=4, steering=[spec, spec, None], **PLAIN)
    assert isinstance(made[1].error, ms.SpecError)
    tools.one_line(str(made[1].error), "output_entries", "160")
    for place in (0, 2):
        assert made[place].error is None
        assert made[place].token_ids == want[place].token_ids
        assert [line.computed for line in made[place].steering] == [line.computed for line in want[place].steering]
    with pytest.raises(ms.SpecError):
        list(session.stream(items[1], params))
    assert tools.hook_count(one.model) == 0


def test_a_partial_batch_has_the_others_and_why(tiny: Any, tools: Any) -> None:
    one, image = tiny("llava"), extra_inputs("llava")
    spec, texts = ms.add(drawn(64), layers=[1], strength=4.0), prompts_of(5, 6)
    good = {"prompt_token_ids": prompt("llava"), "multi_modal_data": image}
    bad = {"prompt_token_ids": [1, 150, 6], "multi_modal_data": image}
    with pytest.raises(ms.PartialBatchError) as caught:
        one.lm.generate([texts[0], bad, good, texts[1]], max_tokens=3, steering=[spec, spec, spec, None], **PLAIN)
    tools.one_line(str(caught.value), "1 of 4", "item 1", "prompt 1")
    assert sorted(caught.value.completions) == [0, 2, 3]
    assert sorted(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1], ms.PromptError)
    want = one.lm.generate([texts[0], good, texts[1]], max_tokens=3, steering=[spec, spec, None], **PLAIN)
    got = [caught.value.completions[place] for place in (0, 2, 3)]
    assert [done.token_ids for done in got] == [done.token_ids for done in want]
    assert [done.steering for done in got] == [done.steering for done in want]
    cap = one.lm.capture([texts[0], bad, good], layers=[1, 2], steering=spec)
    assert sorted(cap.errors) == [1]
    assert tools.worst(cap.sample(2)[2], one.lm.capture(good, layers=[2], steering=spec).rows(2)) <= 1


# --- streams


@pytest.mark.filterwarnings("ignore:no row was selected")
@pytest.mark.parametrize("stop", [None, "w0", "w1", "zzz"])
def test_a_stream_is_the_completion_in_pieces(stop: str | None, fresh: Any, words: Any, tools: Any) -> None:
    one, text = fresh("llama", tokenizer=words), "w010 w011 w012"
    for spec in steered_ways() if stop == "w1" else steered_ways()[1:3]:
        settings: dict[str, Any] = {"max_tokens": 8, "steering": spec, "logprobs": 1, **PLAIN}
        settings |= {} if stop is None else {"stop": stop}
        (want,) = one.lm.generate(text, **settings)
        *chunks, last = one.lm.stream(text, layers=[1, 2], rows="prompt[-1], generated", **settings)
        assert [chunk.token_ids for chunk in chunks] == [(token,) for token in want.token_ids]
        assert last.token_ids == ()
        assert "".join(chunk.text for chunk in [*chunks, last]) == want.text == last.completion.text
        assert all(chunk.completion is None and chunk.capture is None for chunk in chunks)
        assert (last.completion.finish_reason, last.completion.steering) == (want.finish_reason, want.steering)
        assert last.completion.logprobs == want.logprobs
        cap = one.lm.capture(text, layers=[1, 2], rows="prompt[-1], generated", **settings)
        assert last.capture.labels == cap.labels
        assert all(torch.equal(rows, last.capture.tensors[key]) for key, rows in cap.tensors.items())
        *_, bare = one.lm.stream(text, **settings)
        assert bare.capture is None
        assert bare.completion.token_ids == want.token_ids


def test_a_stream_begins_nothing_until_it_is_read_and_ends_when_it_is_closed(tiny: Any, tools: Any) -> None:
    one, (ids,), spec = tiny("llama"), prompts_of(5), ms.add(drawn(64), layers=[1])
    one.lm.generate(ids, max_tokens=1, steering=spec)
    with tools.calls(one.model.model.embed_tokens) as seen:
        before = tools.hook_count(one.model)
        stream = one.lm.stream(ids, max_tokens=5, steering=spec, **PLAIN)
        assert (seen, tools.hook_count(one.model)) == ([], before)
        next(stream)
        assert seen == [(1, 5)]
        next(stream)
        assert seen == [(1, 5), (1, 1)]
        with pytest.raises(ms.BusyError):
            one.lm.capture(ids)
        stream.close()
        assert tools.hook_count(one.model) == before
    assert one.lm.capture(ids)


# --- warnings of nothing


IDLE = ms.add(drawn(64), layers=[1], rows="sequence[40]")


@pytest.mark.parametrize("entry", ["generate", "capture", "score", "capture of decoding"])
def test_what_selects_no_row_is_warned_of_once(entry: str, tiny: Any) -> None:
    _warned(entry, tiny("llama").lm)


@pytest.mark.parametrize("entry", ["stream", "stream rows", "extra"])
def test_other_entries_warn_too(entry: str, tiny: Any) -> None:
    _warned(entry, tiny("llama").lm)


def _warned(entry: str, lm: ms.LanguageModel) -> None:
    prompts, both = prompts_of(5, 7), IDLE + ms.add(drawn(64), layers=[1])
    calls: dict[str, Any] = {
        "generate": lambda: lm.generate(prompts, max_tokens=3, steering=both),
        "capture": lambda: lm.capture(prompts, steering=both),
        "capture of decoding": lambda: lm.capture(prompts, max_tokens=3, steering=both),
        "score": lambda: lm.score(prompts, [5, 6], steering=both),
        "stream": lambda: list(lm.stream(prompts[0], max_tokens=3, steering=both)),
        "stream rows": lambda: list(lm.stream(prompts[0], max_tokens=3, steering=both, layers=[1])),
        "extra": lambda: lm.generate(prompts, max_tokens=3, steering=both, extra={"num_beams": 1}),
    }
    with pytest.warns(UserWarning, match="no row was selected by op 0") as caught:
        calls[entry]()
    assert len([one for one in caught if "no row was selected" in str(one.message)]) == 1
    assert "op 1" not in str(caught[0].message)
