"""Taps in one worker: its passes, and the calls that a client makes of it between them (`collective_rpc`)."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from midstream.core.errors import MidstreamError, SelfTestError
from midstream.core.sites import Site
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.fingerprint import fingerprint_of

from ..requests import KEY, EngineSettings
from . import cpu_seeds, rows_v1
from .activation import settings_of
from .examine import Examination, Probe, check_final
from .extraction import Extraction
from .file_settings import FileSettings
from .files import Files, news_of
from .places import check_supported, wrap
from .runner_v2 import RunnerV2
from .running import RunningRequests
from .tap_op import at_work, without_graph

PREFIX: Final = "midstream-rows-"
CALLS: Final = (
    "describe", "arm", "examine", "stage", "unstage", "collect", "exchange", "standing", "release", "close",
)  # fmt: skip
"""What a client may ask of a worker: methods `midstream_<name>`."""


_HERE: Final = weakref.WeakSet["WorkerTaps"]()
"""The taps of this process."""


def attach(worker: Any) -> None:
    """Give a worker taps; called once its model is loaded, and before anything of it is traced."""
    check_supported(worker.vllm_config)
    taps = WorkerTaps(worker)
    _HERE.add(taps)
    for name in CALLS:
        setattr(worker, f"midstream_{name}", getattr(taps, name))
    taps.follow(worker)
    cpu_seeds.attach(worker.model_runner)


def files_here(vllm_config: Any) -> Files | None:
    """Who writes an engine's files, where its worker is in this very process."""
    return next((taps.files for taps in _HERE if taps.vllm_config is vllm_config), None)


def is_here(vllm_config: Any) -> bool:
    """Whether an engine's worker is in this very process."""
    return any(taps.vllm_config is vllm_config for taps in _HERE)


class WorkerTaps:
    """One worker's taps. in_graph: the sites whose taps stand in its compiled graph. files: who writes them."""

    def __init__(self, worker: Any) -> None:
        self.vllm_config = worker.vllm_config
        self.files: Files | None = None
        self._v2: RunnerV2 | None = None
        self._settings = settings_of(worker.vllm_config) or EngineSettings()
        self.runner = worker.model_runner
        self._config = worker.vllm_config.model_config.hf_text_config
        self.compiled = int(worker.vllm_config.compilation_config.mode or 0) > 0
        self.in_graph = frozenset(self._settings.graph) if self.compiled else frozenset[Site]()
        self.model = self.runner.get_model()
        self.wrapped = wrap(self.model, self._config, self.in_graph)
        # the compile cache is keyed by it: another graph is another key
        own = self._settings.model_dump(mode="json") | {"version": f"{version('midstream')}:{len(self.wrapped.places)}"}
        self.vllm_config.additional_config[KEY] = own
        self._rank, self._ranks = worker.rank, worker.vllm_config.parallel_config.tensor_parallel_size
        self._folder = make_folder()
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        self._registry = ArtifactRegistry(self._folder / "artifacts")
        self.running: RunningRequests | None = None
        self.probe: Probe | None = None
        self.armed: str | None = None

    # --- passes

    def follow(self, worker: Any) -> None:
        """See every step that the worker runs, and every pass of its model."""
        execute = worker.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self.running is not None:
                self.running.scheduled(scheduler_output)
            if self.files is not None and (news := news_of(scheduler_output)) is not None:
                self.files.follow(news)
            return execute(scheduler_output, *args, **kwargs)

        worker.execute_model = execute_model
        if hasattr(self.runner, "_model_forward"):
            self.runner._model_forward = self._with_taps(self.runner._model_forward)
        else:
            self._v2 = RunnerV2(self, self._settings.graph_rows)

    def _with_taps(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            if self.armed is not None:
                return self._probed(forward, args, kwargs)
            if self.running is None or not self.running.number_of:
                return forward(*args, **kwargs)
            running = self.running
            step = rows_v1.step_batch(self.runner, _rows_of(args, kwargs), running.number_of, running.prompt_len)
            if not len(step):
                return forward(*args, **kwargs)
            with running.passing(step, self.runner.device):
                if self.compiled and not running.active_sites <= self.in_graph:
                    without_graph()
                return forward(*args, **kwargs)

        return model_forward

    # --- the self-test

    def arm(self, how: str = "eager") -> None:
        """Look at the next pass: "eager", at everything; "compiled", at the taps that stand in the graph.

        "replayed": at the first step that replays a recorded graph.
        """
        self.armed = how
        if how == "replayed" and self._v2 is not None and self._v2.fixed is not None:
            self._v2.fixed.forget()

    def _probed(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        armed, self.armed = self.armed, None
        starts = self.runner.query_start_loc.np
        self.probe = Probe(self.wrapped.places, int(starts[self.runner.input_batch.num_reqs]))
        if self.compiled and armed == "eager":
            without_graph()
        with at_work(self.probe):
            output = forward(*args, **kwargs)
        arrived = output[0] if isinstance(output, tuple) else output
        self.probe.arrived = arrived[: self.probe.rows].clone()
        return output

    def examine(self, how: str = "eager") -> str:
        """What the armed pass showed, as JSON: what holds, or `error`."""
        name = type(self.model).__name__
        try:
            if how == "replayed":
                if self._v2 is not None:
                    self._v2.check_replayed(name)
                return json.dumps({"error": None})
            probe, self.probe = self.probe, None
            if probe is None:
                raise SelfTestError(f"{name}: no pass of the model was seen: this runner is not known")
            if how == "compiled":
                self._check_graph(name, probe)
                return json.dumps({"error": None})
            with torch.inference_mode():
                examination = Examination(name, self.wrapped, probe, self._config, self._rank, self._ranks)
                examined = examination.result()
        except MidstreamError as error:
            return json.dumps({"error": str(error)})
        self.running = RunningRequests(examined, self._folder, self._settings.row_bytes, self._registry)
        print_ = fingerprint_of(self._config, self.model.named_parameters()) if self._rank == 0 else ""
        if self._rank == 0 and (settings := FileSettings.read(self.vllm_config)) is not None:
            about = {"model": str(self.vllm_config.model_config.model), "fingerprint": print_}
            self.files = Files(self.running, settings, about, Extraction.of(self.vllm_config))
        return json.dumps({"error": None, "compiled": self.compiled, "fingerprint": print_} | examined.plain())

    def _check_graph(self, name: str, probe: Probe) -> None:
        """Every tap that stands in the graph fires once, and the stream that it shows is the model's."""
        assert self.running is not None
        chosen = [place for (site, _), place in self.running.examined.chosen.items() if site in self.in_graph]
        for place in chosen:
            if probe.of(place) is None:
                count = len(probe.seen.get(place.number, ()))
                message = f"{place.site} at layer {place.layer} fired {count} times in the compiled graph"
                raise SelfTestError(f"{name}: {message}: load it with graph_sites=[], or with enforce_eager=True")
        last = self.running.examined.chosen["resid_post", len(self.wrapped.blocks) - 1]
        if "resid_post" in self.in_graph and (rows := probe.of(last)) is not None:
            rows = rows if probe.sampled is None else rows[probe.sampled]
            with torch.inference_mode():
                check_final(name, rows, self.wrapped.final, probe.arrived)

    # --- calls

    def describe(self) -> str:
        """Where this rank's rows are, which taps stand in its graph, and whether it records any, as JSON."""
        recorded = self._v2 is not None and self._v2.fixed is not None
        return json.dumps({"folder": str(self._folder), "graph": sorted(self.in_graph), "recorded": recorded})

    def stage(self, artifact_id: str, data: bytes) -> None:
        """Keep an artifact where specs that name it find it; hashed again."""
        self._registry.put_bytes(artifact_id, bytes(data))

    def unstage(self, ids: Sequence[str] | None = None) -> None:
        """Forget some artifacts; None: all."""
        for artifact_id in self._registry.ids() if ids is None else ids:
            self._registry.delete(artifact_id)

    def collect(self, ids: Sequence[str], keep: bool = False) -> bytes:
        """See RunningRequests."""
        assert self.running is not None, "the engine is examined at load"
        return self.running.collect(list(ids), keep)

    def exchange(self, ids: Sequence[str], read: Sequence[str]) -> bytes:
        """`release(read)` and `collect(ids)` in one call."""
        self.release(read)
        return self.collect(ids)

    def standing(self) -> list[str]:
        """See RunningRequests."""
        return [] if self.running is None else self.running.standing()

    def release(self, ids: Sequence[str]) -> None:
        """See RunningRequests."""
        if self.running is not None:
            self.running.release(list(ids))

    def close(self) -> None:
        """The engine is about to end: finish its files, and remove what lies in its folder."""
        if self.files is not None:
            self.files.close()
            self.files = None
        if self._v2 is not None:
            self._v2.close()
        if self.running is not None:
            self.running.close()
            self.running = None
        shutil.rmtree(self._folder, ignore_errors=True)


def make_folder() -> Path:
    """A new folder for rows, in memory where the system has such; those of processes that died are removed."""
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    for old in root.glob(f"{PREFIX}*"):
        pid = old.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))


def _rows_of(args: Any, kwargs: dict[str, Any]) -> int:
    """How many flat rows a pass has, padding included."""
    for name in ("input_ids", "inputs_embeds", "positions"):
        if kwargs.get(name) is not None:
            return int(kwargs[name].shape[0])
    return int(args[0].shape[0])
