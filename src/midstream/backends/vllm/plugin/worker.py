"""Taps in one worker: its passes, and the calls that a client makes of it between them (`collective_rpc`)."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from midstream.core.errors import MidstreamError, ModelLoadError, SelfTestError
from midstream.core.sites import SITES, Site
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.fingerprint import fingerprint_of

from . import rows_v1, rows_v2
from .activation import settings_of
from .examine import Examination, Probe, check_final
from .places import check_supported, wrap
from .running import RunningRequests
from .tap_op import at_work

ROW_BYTES: Final = 8 << 30
"""What a worker's rows take at most, unless the engine's settings say otherwise."""
PREFIX: Final = "midstream-rows-"
CALLS: Final = ("describe", "arm", "examine", "stage", "unstage", "collect", "release", "close")
"""What a client may ask of a worker: methods `midstream_<name>`."""


def attach(worker: Any) -> None:
    """Give a worker taps; called once its model is loaded, and before anything of it is traced."""
    check_supported(worker.vllm_config)
    taps = WorkerTaps(worker)
    for name in CALLS:
        setattr(worker, f"midstream_{name}", getattr(taps, name))
    taps.follow(worker)


class WorkerTaps:
    """One worker's taps. in_graph: the sites whose taps stand in its compiled graph."""

    def __init__(self, worker: Any) -> None:
        settings = settings_of(worker.vllm_config) or {}
        self._runner = worker.model_runner
        self._config = worker.vllm_config.model_config.hf_text_config
        self._compiled = int(worker.vllm_config.compilation_config.mode or 0) > 0
        in_graph: frozenset[Site] = frozenset(site for site in SITES if site in settings.get("graph", ()))
        self._in_graph = in_graph if self._compiled else frozenset[Site]()
        self._model = self._runner.get_model()
        self._wrapped = wrap(self._model, self._config, self._in_graph)
        self._rank, self._ranks = worker.rank, worker.vllm_config.parallel_config.tensor_parallel_size
        self._row_bytes = int(settings.get("row_bytes", ROW_BYTES))
        self._folder = make_folder()
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        self._registry = ArtifactRegistry(self._folder / "artifacts")
        self._running: RunningRequests | None = None
        self._probe: Probe | None = None
        self._armed: str | None = None

    # --- passes

    def follow(self, worker: Any) -> None:
        """See every step that the worker runs, and every pass of its model."""
        execute = worker.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._running is not None:
                self._running.scheduled(scheduler_output)
            return execute(scheduler_output, *args, **kwargs)

        worker.execute_model = execute_model
        if hasattr(self._runner, "_model_forward"):
            self._runner._model_forward = self._with_taps(self._runner._model_forward)
        else:
            self._follow_v2()

    def _with_taps(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def model_forward(*args: Any, **kwargs: Any) -> Any:
            if self._armed is not None:
                return self._probed(forward, args, kwargs)
            if self._running is None or not self._running.number_of:
                return forward(*args, **kwargs)
            running = self._running
            step = rows_v1.step_batch(self._runner, _rows_of(args, kwargs), running.number_of, running.prompt_len)
            if not len(step):
                return forward(*args, **kwargs)
            with running.passing(step, self._runner.device), self._seen_by_taps(running.active_sites):
                return forward(*args, **kwargs)

        return model_forward

    def _follow_v2(self) -> None:
        """Runner V2 prepares its batch in one method and runs the model in another: taps are at work in between."""
        if self._compiled:
            message = "taps in the graphs of runner V2 have not been shown to be right: load with enforce_eager=True"
            raise ModelLoadError(message)
        prepare, execute = self._runner.prepare_inputs, self._runner.execute_model
        logits = self._model.compute_logits
        open_ = ExitStack()

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            if self._armed is not None:
                self._armed = None
                self._probe = Probe(self._wrapped.places, batch.num_tokens, batch.logits_indices)
                open_.enter_context(at_work(self._probe))
            elif self._running is not None and self._running.number_of:
                running, size = self._running, batch.num_tokens_after_padding
                step = rows_v2.step_batch(batch, size, running.number_of, running.prompt_len, running.prompt_of)
                if len(step):
                    open_.enter_context(running.passing(step, self._runner.device))
            return batch

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            with open_:
                return execute(*args, **kwargs)

        def compute_logits(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            if self._probe is not None and self._probe.arrived is None:
                self._probe.arrived = hidden_states.clone()
            return logits(hidden_states, *args, **kwargs)

        self._runner.prepare_inputs, self._runner.execute_model = prepare_inputs, execute_model
        self._model.compute_logits = compute_logits

    @contextmanager
    def _seen_by_taps(self, sites: set[Site]) -> Generator[None]:
        """Run a pass without the compiled graph, where that does not have all the taps that the pass wants."""
        if self._compiled and not sites <= self._in_graph:
            without_graph()
        yield

    # --- the self-test

    def arm(self, compiled: bool = False) -> None:
        """Look at everything in the next pass; compiled: through the graph, at the taps that stand in it."""
        self._armed = "compiled" if compiled else "eager"

    def _probed(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        armed, self._armed = self._armed, None
        starts = self._runner.query_start_loc.np
        self._probe = Probe(self._wrapped.places, int(starts[self._runner.input_batch.num_reqs]))
        if self._compiled and armed == "eager":
            without_graph()
        with at_work(self._probe):
            output = forward(*args, **kwargs)
        arrived = output[0] if isinstance(output, tuple) else output
        self._probe.arrived = arrived[: self._probe.rows].clone()
        return output

    def examine(self, compiled: bool = False) -> str:
        """What the armed pass showed, as JSON: what holds, or `error`."""
        probe, self._probe = self._probe, None
        name = type(self._model).__name__
        try:
            if probe is None:
                raise SelfTestError(f"{name}: no pass of the model was seen: this runner is not known")
            if compiled:
                self._check_graph(name, probe)
                return json.dumps({"error": None})
            with torch.inference_mode():
                examination = Examination(name, self._wrapped, probe, self._config, self._rank, self._ranks)
                examined = examination.result()
        except MidstreamError as error:
            return json.dumps({"error": str(error)})
        self._running = RunningRequests(examined, self._folder, self._row_bytes, self._registry)
        print_ = fingerprint_of(self._config, self._model.named_parameters()) if self._rank == 0 else ""
        return json.dumps({"error": None, "compiled": self._compiled, "fingerprint": print_} | examined.plain())

    def _check_graph(self, name: str, probe: Probe) -> None:
        """Every tap that stands in the graph fires once, and the stream that it shows is the model's."""
        assert self._running is not None
        chosen = [place for (site, _), place in self._running.examined.chosen.items() if site in self._in_graph]
        for place in chosen:
            if probe.of(place) is None:
                count = len(probe.seen.get(place.number, ()))
                message = f"{place.site} at layer {place.layer} fired {count} times in the compiled graph"
                raise SelfTestError(f"{name}: {message}: load it without midstream's `graph`, or with enforce_eager")
        last = self._running.examined.chosen["resid_post", len(self._wrapped.blocks) - 1]
        if "resid_post" in self._in_graph and (rows := probe.of(last)) is not None:
            with torch.inference_mode():
                check_final(name, rows, self._wrapped.final, probe.arrived)

    # --- calls

    def describe(self) -> str:
        """Where this rank's rows are, and which taps stand in its graph, as JSON."""
        return json.dumps({"folder": str(self._folder), "graph": sorted(self._in_graph)})

    def stage(self, artifact_id: str, data: bytes) -> None:
        """Keep an artifact where specs that name it find it; hashed again."""
        self._registry.put_bytes(artifact_id, bytes(data))

    def unstage(self) -> None:
        """Forget every artifact."""
        for artifact_id in self._registry.ids():
            self._registry.delete(artifact_id)

    def collect(self, ids: Sequence[str]) -> bytes:
        """See RunningRequests."""
        assert self._running is not None, "the engine is examined at load"
        return self._running.collect(list(ids))

    def release(self, ids: Sequence[str]) -> None:
        """See RunningRequests."""
        if self._running is not None:
            self._running.release(list(ids))

    def close(self) -> None:
        """The engine is about to end: remove what lies in its folder."""
        if self._running is not None:
            self._running.close()
            self._running = None
        shutil.rmtree(self._folder, ignore_errors=True)


def without_graph() -> None:
    """Let the pass that begins run the model itself: neither its compiled form nor a recorded one."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    context.skip_compiled = True
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE


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
