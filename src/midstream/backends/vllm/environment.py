"""The environment in which an engine boots: set for the boot alone, and restored."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Final

FORCED: Final[Mapping[str, str]] = {"VLLM_NO_USAGE_STATS": "1"}
"""What an engine of ours is always booted with."""

DEFAULTS: Final[Mapping[str, str]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process; its tensor-parallel workers in others
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # draws other samples for one seed
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""What it is booted with unless the environment says otherwise."""

PLUGIN: Final = "midstream"
_ROUTES: Final = "vllm.endpoint_plugins"


def engine_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment for an engine in this process, on top of `base`.

    >>> made = engine_environment({"VLLM_PLUGINS": "mine", "VLLM_LOGGING_LEVEL": "INFO"})
    >>> made["VLLM_PLUGINS"], made["VLLM_LOGGING_LEVEL"]
    ('mine,midstream', 'INFO')
    """
    made = dict(base)
    for name, value in DEFAULTS.items():
        made.setdefault(name, value)
    made.update(FORCED)
    allowed = made.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):  # unset: every plugin is loaded
        made["VLLM_PLUGINS"] = ",".join([*filter(None, allowed.split(",")), PLUGIN])
    return made


def apart_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment for an engine that this process asks, and that is in a process of its own, on top of `base`.

    >>> apart_environment({})["VLLM_WORKER_MULTIPROCESSING_METHOD"]
    'spawn'
    """
    made = _apart(base)
    made.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # a server has threads, which a fork does not
    return made


def _apart(base: Mapping[str, str]) -> dict[str, str]:
    made = engine_environment(base)
    if "VLLM_ENABLE_V1_MULTIPROCESSING" not in base:
        del made["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server's engine is always in a process of its own
    return made


def serve_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a `vllm serve`, on top of `base` (default: this process's): our routes are loaded too.

    vLLM loads routes by name alone. Where nothing says which plugins are loaded, all are, as without us; of others'
    routes, those that have the name of another plugin.

    >>> serve_environment({"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"]
    'mine,midstream'
    """
    given = dict(os.environ if base is None else base)
    made = _apart(given)
    if made.get("VLLM_PLUGINS") is None:
        groups = [group for group in entry_points().groups if group.startswith("vllm.") and group != _ROUTES]
        names = {one.name for group in groups for one in entry_points(group=group)}
        made["VLLM_PLUGINS"] = ",".join(sorted(names | {PLUGIN}))
    return made


@contextmanager
def boot_environment(
    environment: Callable[[Mapping[str, str]], dict[str, str]] = engine_environment,
) -> Generator[None]:
    """While open, this process has an engine's environment; afterwards the one that it had."""
    before = dict(os.environ)
    try:
        os.environ.update(environment(before))
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
