"""The command that starts a `vllm serve` with our plugin; imports without vLLM."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from midstream.backends.tokenizers import has_tokenizer
from midstream.core.cache import cache_dir
from midstream.core.errors import ModelLoadError, spec_error

from .checkpoints import merged_checkpoint
from .environment import serve_environment
from .requests import KEY, EngineSettings

_CONFIG: Final = "--additional-config"
_OURS: Final = {
    "--no-async-scheduling": (),
    "--max-logprobs": ("-1",),
    "--structured-outputs-config": (json.dumps({"disable_any_whitespace": True, "backend": "xgrammar"}),),
}
"""What is added unless the caller gives it: ids that are there when rows are labelled, any log-probability, compact
JSON under a schema."""
_CLASHES: Final = {"--async-scheduling": "rows are labelled by ids that are there"}


@dataclass(frozen=True)
class Launch:
    """A command, and the environment that it runs in. changed: the variables that are not as they were."""

    command: list[str]
    environment: Mapping[str, str]
    changed: Mapping[str, str]

    def shown(self) -> str:
        """The plain line that does the same, but for keys."""
        words = list(self.command[3:])
        for place, word in enumerate(words):
            if word.replace("_", "-").startswith("--api-key="):
                words[place] = "--api-key=…"
            elif word.replace("_", "-") == "--api-key":
                after = place + 1
                while after < len(words) and not words[after].startswith("-"):
                    words[after] = "…"
                    after += 1
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.changed.items())]
        return " ".join([*variables, "vllm", *(word if word == "…" else shlex.quote(word) for word in words)])


def launched(
    model: str, arguments: Sequence[str], settings: Mapping[str, Any], checkpoint: str | None = None
) -> Launch:
    """How to serve a model; ModelLoadError where vLLM is not here. arguments: its own. settings: of EngineSettings."""
    if find_spec("vllm") is None:
        raise ModelLoadError("vLLM is not installed here: install it beside midstream")
    from midstream.backends.bundled import SMOLLM2, smollm2_path

    given = [_dashed(word) for word in arguments]
    for name, why in _CLASHES.items():
        if name in given:
            raise spec_error("E_BAD_PARAM", name, f"{why}: leave it out")
    source = str(smollm2_path()) if model == SMOLLM2 else model
    if (source != model or checkpoint is not None) and not _has(given, "--served-model-name"):
        given += ["--served-model-name", model]
    if checkpoint is not None:
        source = str(merged_checkpoint(source, checkpoint, _folder_of(source, checkpoint)))
    if not has_tokenizer(source) and not _has(given, "--skip-tokenizer-init"):
        given.append("--skip-tokenizer-init")
    additional = _taken(given, _CONFIG)
    own = EngineSettings.of({**settings, "version": version("midstream")}, "settings").model_dump(mode="json")
    given += [_CONFIG, json.dumps({**additional, KEY: own})]
    for name, values in _OURS.items():
        if not _has(given, name):
            given += [name, *values]
    before = dict(os.environ)
    environment = serve_environment(before)
    changed = {name: value for name, value in environment.items() if before.get(name) != value}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", source, *given]
    return Launch(command, environment, changed)


def _dashed(word: str) -> str:
    """An option as vLLM's help writes it: it takes `_` for `-` too."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def _has(given: Sequence[str], name: str) -> bool:
    return any(one == name or one.startswith(f"{name}=") for one in given)


def _taken(given: list[str], name: str) -> dict[str, Any]:
    """The object that an option holds, which is taken from the list; {} where it is not there."""
    for place, one in enumerate(given):
        if one == name and place + 1 < len(given):
            text = given[place + 1]
            del given[place : place + 2]
        elif one.startswith(f"{name}="):
            text = given.pop(place).partition("=")[2]
        else:
            continue
        try:
            found = json.loads(text)
        except ValueError as error:
            raise spec_error("E_BAD_PARAM", name, f"is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise spec_error("E_BAD_PARAM", name, "is an object")
        return found
    return {}


def _folder_of(source: str, checkpoint: str) -> Path:
    """Where the two are put together: the same for the same, so that nothing piles up."""
    name = sha256(f"{Path(source).absolute()}:{Path(checkpoint).absolute()}".encode()).hexdigest()[:24]
    return cache_dir() / "checkpoints" / name
