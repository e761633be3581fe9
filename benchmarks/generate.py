"""The speed of generating under steering, and of scoring: against plain generation, `model.generate` and a plain loop.

    python benchmarks/generate.py                   the published run: 32 requests, 9 repetitions, 15 minutes or so
    python benchmarks/generate.py --small

Writes its figures to build/benchmarks/generate.json (with --small, generate-small.json) for publish.py.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capture import RESULTS, begin_pinned, earlier_timings, environment_facts, tell
from measure import Timing, take_turns, timed
from prompts import make_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM

import midstream as ms
from midstream.backends.bundled import smollm2_path


@dataclass(frozen=True)
class Settings:
    """What to run."""

    small: bool
    requests: int
    new_tokens: int
    references: int
    reference_tokens: int
    repetitions: int
    threads: int
    out: str
    more: bool


class Subjects:
    """One model, its requests, and everything that is timed on them."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.lm = ms.load(self.model)
        pieces = make_prompts(folder, settings.requests + settings.references)
        self.prompts = [ids[: 16 + 3 * place] for place, ids in enumerate(pieces[: settings.requests])]
        self.scored = [ids[:48] for ids in pieces[settings.requests :]]
        self.references = [ids[-settings.reference_tokens :] for ids in pieces[settings.requests :]]
        rng = np.random.default_rng(0)
        vectors = rng.normal(size=(settings.requests, self.lm.facts.hidden_size)).astype(np.float32)
        middle = self.lm.facts.num_layers // 2
        self.one = ms.add(vectors[0], layers=[middle], strength=0.5)
        self.each = [ms.add(vector, layers=[middle], strength=0.5) for vector in vectors]

    def midstream(self, steering: Any) -> list[list[int]]:
        """Generate with midstream."""
        given = {"max_tokens": self.settings.new_tokens, "ignore_eos": True, "steering": steering}
        return [list(one.token_ids) for one in self.lm.generate(self.prompts, **given)]

    def own(self) -> list[list[int]]:
        """Generate with `model.generate`, on the same batch, padded on the left."""
        width = max(map(len, self.prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in self.prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in self.prompts])
        count = self.settings.new_tokens
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return out[:, width:].tolist()

    def score(self) -> Tensor:
        """Score all references with midstream, `[references, tokens]`."""
        return self.lm.score(self.scored, self.references)

    def score_one_by_one(self) -> Tensor:
        """Score as is usual: a forward, a log-softmax and a gather for each item."""
        found: list[Tensor] = []
        with torch.inference_mode():
            for prompt, reference in zip(self.scored, self.references, strict=True):
                logits = self.model(torch.tensor([prompt + reference])).logits[0, len(prompt) - 1 : -1]
                logprobs = logits.float().log_softmax(-1)
                found.append(logprobs.gather(1, torch.tensor(reference)[:, None])[:, 0])
        return torch.stack(found)

    def all(self) -> dict[str, Callable[[], Timing]]:
        """Return what is timed, by name; rows are generated or scored tokens."""
        generated = {
            "plain": functools.partial(self.midstream, None),
            "one spec": functools.partial(self.midstream, self.one),
            "a spec each": functools.partial(self.midstream, self.each),
            "model.generate": self.own,
        }
        subjects = {
            name: functools.partial(timed, lambda run=run: sum(map(len, run()))) for name, run in generated.items()
        }
        scores = {"score": self.score, "score one by one": self.score_one_by_one}
        return subjects | {
            name: functools.partial(timed, lambda run=run: run().numel()) for name, run in scores.items()
        }


def main() -> None:
    settings = _read_arguments()
    begin_pinned(settings.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    subjects = Subjects(smollm2_path(), settings)
    figures = {"settings": asdict(settings), "versions": environment_facts(), "checks": checks(subjects)}
    runs = subjects.all()
    out = Path(settings.out)
    timings = earlier_timings(out, figures["settings"], figures["versions"]) if settings.more else {}
    done = min((len(of) for of in timings.values()), default=0)
    figures["settings"]["repetitions"] = done + settings.repetitions
    for turn in range(done, done + settings.repetitions):
        for name, timing in take_turns(runs, turn):
            timings.setdefault(name, []).append(timing)
            tell(f"repetition {turn + 1} of {done + settings.repetitions}: {name}: {timing.wall:.2f} s")
        given = {name: [asdict(one) for one in of] for name, of in timings.items()}
        out.write_text(json.dumps(figures | {"timings": given}, indent=1) + "\n")
    tell(f"figures are in {settings.out}")


def checks(subjects: Subjects) -> dict[str, float]:
    """Return what shows that the subjects compute the same; this pass also warms them up.

    same_tokens: the share of requests whose tokens equal model.generate's. steered: the share that a spec changes.
    score_difference: the largest between the batched scores and the loop's, in bfloat16.
    """
    plain, own = subjects.midstream(None), subjects.own()
    each, one = subjects.midstream(subjects.each), subjects.midstream(subjects.one)
    batched, alone = subjects.score(), subjects.score_one_by_one()
    count = len(plain)
    return {
        "same_tokens": sum(a == b for a, b in zip(plain, own, strict=True)) / count,
        "steered": sum(a != b for a, b in zip(plain, each, strict=True)) / count,
        "steered_by_one": sum(a != b for a, b in zip(plain, one, strict=True)) / count,
        "score_difference": float((batched - alone).abs().max()),
        "score_mean_difference": float((batched - alone).mean()),
    }


def _read_arguments() -> Settings:
    parser = argparse.ArgumentParser(description="Measure the speed of steering and of scoring.")
    parser.add_argument("--small", action="store_true", help="4 requests and 2 repetitions: does it run?")
    parser.add_argument("--repetitions", type=int, help="turns that every subject takes (9; small: 2)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of this process")
    parser.add_argument("--out", help="file for the figures")
    parser.add_argument("--more", action="store_true", help="add repetitions to the figures that are there")
    given = parser.parse_args()
    return Settings(
        small=given.small,
        requests=4 if given.small else 32,
        new_tokens=4 if given.small else 32,
        references=8 if given.small else 256,
        reference_tokens=8,
        repetitions=given.repetitions or (2 if given.small else 9),
        threads=given.threads,
        out=given.out or str(RESULTS / ("generate-small.json" if given.small else "generate.json")),
        more=given.more,
    )


if __name__ == "__main__":
    main()
