"""The self-test of an engine, in the process that asks it for tokens, and what it found."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from midstream.core.errors import SelfTestError
from midstream.core.sites import Site, SiteLayout

from .liveness import watch
from .requests import PROBE

FACTS: Final = "midstream_facts"
"""The attribute of an `LLMEngine` that has them."""
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

    def call(name: str, *args: Any) -> list[Any]:
        return engine.collective_rpc(f"midstream_{name}", args=args)

    described = [json.loads(one) for one in call("describe")]
    call("arm")
    _run_probe(engine)
    found = [json.loads(one) for one in call("examine")]
    _raise_first(found)
    if found[0]["compiled"] and described[0]["graph"]:
        call("arm", "compiled")
        _run_probe(engine)
        _raise_first([json.loads(one) for one in call("examine", "compiled")])
    if described[0]["recorded"]:
        call("arm", "replayed")
        _run_probe(engine, max_tokens=3)
        _raise_first([json.loads(one) for one in call("examine", "replayed")])
    layouts: dict[Site, dict[int, SiteLayout]] = {
        site: {int(layer): SiteLayout(*one) for layer, one in layers.items()}
        for site, layers in found[0]["layouts"].items()
    }
    folders = [Path(one["folder"]) for one in described]
    return EngineFacts(
        layouts, found[0]["refused"], folders, found[0]["fingerprint"],
        frozenset(described[0]["graph"]),
    )  # fmt: skip


def _run_probe(engine: Any, max_tokens: int = 1) -> None:
    from vllm import SamplingParams

    size = engine.model_config.get_vocab_size()
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, skip_reading_prefix_cache=True
    )
    for places in _PROBE:
        prompt = {"prompt_token_ids": [size * place // 16 for place in places]}
        engine.add_request(f"{PROBE}{uuid4().hex}", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()


def _raise_first(found: Sequence[Mapping[str, Any]]) -> None:
    for one in found:
        if one["error"] is not None:
            raise SelfTestError(one["error"])
