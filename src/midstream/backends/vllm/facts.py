"""The self-test of an engine, in the process that asks it for tokens, and what it found."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from midstream.core.backend import ModelFacts
from midstream.core.errors import SelfTestError
from midstream.core.sites import Site, SiteLayout

from .liveness import watch
from .requests import PROBE

FACTS: Final = "midstream_facts"
"""The attribute of an `LLMEngine` that has them."""
RUN: Final = "run"
_PROBE: Final = ((1, 3, 5), (2, 4, 6))
"""Places in a vocabulary, in sixteenths, of the two prompts of the self-test."""


@dataclass(frozen=True)
class EngineFacts:
    """What the workers say of themselves: sites as the self-test found them, and the folders of each rank's rows."""

    layouts: Mapping[Site, Mapping[int, SiteLayout]]
    refused: Mapping[Site, str]
    folders: Sequence[Path]
    fingerprint: str
    graph: frozenset[str]


def model_facts(config: Any, model_ref: str, fingerprint: str) -> ModelFacts:
    """What is true of a model. config: vLLM's ModelConfig. model_ref: what it was asked for by."""
    return ModelFacts.of(
        config.hf_config,
        config.hf_text_config,
        model_ref=model_ref,
        model_fingerprint=fingerprint,
        dtype=str(config.dtype).removeprefix("torch."),
        context_length=config.max_model_len,
    )


def attach(engine: Any) -> None:
    """Put a new `LLMEngine` to the self-test, keep what it said, and watch it. SelfTestError: it is shut down again."""
    watch(engine.engine_core)
    with ExitStack() as undo:
        undo.callback(engine.engine_core.shutdown)
        undo.callback(_let_go, engine)
        setattr(engine, FACTS, examined(engine))
        undo.pop_all()


def _let_go(engine: Any) -> None:
    with suppress(Exception):  # what comes of a worker that failed is whatever it failed of, and vLLM's bare Exception
        engine.collective_rpc("midstream_close")


def examined(engine: Any) -> EngineFacts:
    """Run the self-test: one pass over two prompts, seen by every tap; then through compiled and recorded graphs."""
    run, said = examination(), None
    while True:
        try:
            name, args = run.send(said)
        except StopIteration as done:
            return done.value
        said = _run_probe(engine, *args) if name == RUN else engine.collective_rpc(f"midstream_{name}", args=args)


def examination() -> Generator[tuple[str, tuple[Any, ...]], list[Any] | None, EngineFacts]:
    """The steps of the self-test, for whoever can take them: a call of the workers, whose answers are sent back.

    RUN, (max_tokens,): let the engine run the prompts of `probes`; its answer is not looked at.
    """
    described = [json.loads(one) for one in (yield "describe", ()) or ()]
    found = yield from _armed("eager", 1)
    if found[0]["compiled"] and described[0]["graph"]:
        yield from _armed("compiled", 1)
    if described[0]["recorded"]:
        yield from _armed("replayed", 3)
    layouts: dict[Site, dict[int, SiteLayout]] = {
        site: {int(layer): SiteLayout(*one) for layer, one in layers.items()}
        for site, layers in found[0]["layouts"].items()
    }
    folders = [Path(one["folder"]) for one in described]
    return EngineFacts(
        layouts, found[0]["refused"], folders, found[0]["fingerprint"],
        frozenset(described[0]["graph"]),
    )  # fmt: skip


def _armed(how: str, max_tokens: int) -> Generator[tuple[str, tuple[Any, ...]], list[Any] | None, list[Any]]:
    """One look at the passes over the probes; SelfTestError for what did not hold."""
    yield "arm", (how,)
    yield RUN, (max_tokens,)
    found = [json.loads(one) for one in (yield "examine", (how,)) or ()]
    for one in found:
        if one["error"] is not None:
            raise SelfTestError(one["error"])
    return found


def probes(vocabulary: int, max_tokens: int) -> tuple[list[dict[str, Any]], Any]:
    """The prompts of the self-test, and how they are sampled."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=True
    )
    return [{"prompt_token_ids": [vocabulary * place // 16 for place in places]} for places in _PROBE], params


def _run_probe(engine: Any, max_tokens: int) -> None:
    prompts, params = probes(engine.model_config.get_vocab_size(), max_tokens)
    for prompt in prompts:
        engine.add_request(f"{PROBE}{uuid4().hex}", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
