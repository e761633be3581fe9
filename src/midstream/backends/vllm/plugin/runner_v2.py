"""Passes of runner V2, which prepares its batch in one method and runs the model in another, or replays a graph.

Which form serves a step is known before it: a recorded graph serves captures and plain adds at sites that it has, on so
many rows; between the pieces of a piecewise one taps run as they do without graphs; the rest runs without.
"""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from midstream.core.errors import SelfTestError
from midstream.taps.fixed import FixedTaps

from . import rows_v2
from .examine import Probe, check_final
from .tap_op import CURRENT, OPS, at_work, without_graph

if TYPE_CHECKING:
    from .running import RunningRequests
    from .worker import WorkerTaps

_DONE: Final = "_midstream"
_EAGER: Final = "midstream_eager"


def split_at_taps(compilation_config: Any) -> None:
    """Let pieces of a piecewise graph end at taps; before anything is compiled. Nothing where none are made."""
    splits: list[str] | None = compilation_config.splitting_ops
    if splits:
        splits.extend(op for op in OPS if op not in splits)


def _let_steps_be_eager() -> None:
    """Let a graph manager that is told so run its next step without a recorded graph, once per process."""
    from vllm.v1.worker.gpu import model_runner

    original = model_runner.dispatch_cg_and_sync_dp
    if hasattr(original, _DONE):
        return

    @functools.wraps(original)
    def dispatch(cudagraph_manager: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(cudagraph_manager, _EAGER, False):
            kwargs["need_eager"] = True
        return original(cudagraph_manager, *args, **kwargs)

    setattr(dispatch, _DONE, True)
    model_runner.dispatch_cg_and_sync_dp = dispatch


class RunnerV2:
    """Shows taps the passes of one runner. fixed: the buffers of its recorded graphs, where it makes any."""

    def __init__(self, taps: WorkerTaps, rows: int) -> None:
        self._taps, self._runner = taps, taps.runner
        self.fixed: FixedTaps | None = None
        self._skip = False
        self._replayed = False  # whether the step under way is a replay that the self-test looks at
        self._left: dict[int, Tensor] = {}
        self._open = ExitStack()
        _let_steps_be_eager()
        self._records = bool(taps.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs())
        if taps.compiled:
            split_at_taps(taps.vllm_config.compilation_config)
            if self._records:
                self._make_buffers(rows)
        self._wrap()

    def _make_buffers(self, rows: int) -> None:
        """One set for all graphs; at the sites of the residual, whose width is known before a pass."""
        taps, config = self._taps, self._taps.vllm_config.model_config
        places = [
            place.number
            for place in taps.wrapped.places
            if place.site in taps.in_graph and place.site in ("resid_pre", "resid_post")
        ]
        if places:
            width = int(config.hf_text_config.hidden_size)
            self.fixed = FixedTaps(dict.fromkeys(places, width), rows, config.dtype, self._runner.device)
            CURRENT.fixed = self.fixed

    def _wrap(self) -> None:
        runner, model = self._runner, self._taps.model
        prepare, execute, forward, logits = (
            runner.prepare_inputs, runner.execute_model, model.forward, model.compute_logits,
        )  # fmt: skip

        def prepare_inputs(scheduler_output: Any, state: Any, descriptor: Any, *args: Any, **kwargs: Any) -> Any:
            batch = prepare(scheduler_output, state, descriptor, *args, **kwargs)
            self._begin(batch, replayed=descriptor.cg_mode.name == "FULL")
            return batch

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._choose(scheduler_output.num_scheduled_tokens)
            with self._open:
                output = execute(scheduler_output, *args, **kwargs)
            if self._replayed and self.fixed is not None:
                self._replayed = False
                self._left = {place: self.fixed.left(place).clone() for place in self.fixed.places}
            return output

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            if self._skip:
                without_graph()
            return forward(*args, **kwargs)

        def compute_logits(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            probe = self._taps.probe
            if probe is not None and probe.arrived is None:
                probe.arrived = hidden_states.clone()
            return logits(hidden_states, *args, **kwargs)

        runner.prepare_inputs, runner.execute_model = prepare_inputs, execute_model
        model.forward, model.compute_logits = model_forward, compute_logits

    def _choose(self, scheduled: Mapping[str, int]) -> None:
        """Which form the step that begins may have."""
        armed, running = self._taps.armed, self._taps.running
        eager = skip = False
        if armed is not None:
            eager, skip = armed != "replayed", armed == "eager"
        elif running is not None and running.number_of:
            wanted = running.wanted(scheduled)
            skip = self._taps.compiled and not wanted.sites <= self._taps.in_graph
            eager = bool(wanted.rows) and not self.serves(wanted.sites, wanted.rows, wanted.plain)
        self._skip = skip
        if (manager := self._runner.cudagraph_manager) is not None:
            setattr(manager, _EAGER, eager or skip)

    def serves(self, sites: set[Any], rows: int, plain: bool) -> bool:
        """Whether a recorded graph can do what a step wants; a piecewise one can do what stands in it."""
        if self.fixed is None:
            return not self._records and sites <= self._taps.in_graph
        return sites <= self._taps.in_graph & {"resid_pre", "resid_post"} and plain and rows <= self.fixed.rows

    def _begin(self, batch: Any, replayed: bool) -> None:
        taps = self._taps
        if replayed and self.fixed is not None and not self.fixed.idle:  # of the step before: not this one's
            self.fixed.fill(np.zeros(0, dtype=np.int64), {})
        if taps.armed is not None:
            self._arm(batch, replayed)
        elif taps.running is not None and taps.running.number_of:
            running: RunningRequests = taps.running
            size = batch.num_tokens_after_padding
            step = rows_v2.step_batch(batch, size, running.number_of, running.prompt_len, running.prompt_of)
            if len(step):
                fixed = self.fixed if replayed else None
                self._open.enter_context(running.passing(step, self._runner.device, fixed))

    def _arm(self, batch: Any, replayed: bool) -> None:
        """The pass that begins is looked at: by a probe, or where it is replayed, by what it leaves."""
        taps = self._taps
        if taps.armed != "replayed":
            taps.armed = None
            taps.probe = Probe(taps.wrapped.places, batch.num_tokens, batch.logits_indices)
            self._open.enter_context(at_work(taps.probe))
        elif replayed and self.fixed is not None:
            taps.armed = None
            taps.probe = Probe(taps.wrapped.places, batch.num_tokens, batch.logits_indices)
            self.fixed.fill(np.arange(batch.num_tokens), {})
            self._replayed = True

    def close(self) -> None:
        """The engine ends: no other records on its buffers."""
        if CURRENT.fixed is self.fixed:
            CURRENT.fixed = None

    def check_replayed(self, name: str) -> None:
        """After a step that was replayed: every place of its graph has left rows, and the last are the model's."""
        taps, fixed = self._taps, self.fixed
        probe, taps.probe, taps.armed = taps.probe, None, None
        manager = self._runner.cudagraph_manager
        if manager is None or not manager.cudagraph_mode.has_full_cudagraphs():  # vLLM thought better of it
            return
        if fixed is None or probe is None or not self._left:
            message = "no step of the self-test was replayed, though graphs are recorded"
            raise SelfTestError(f"{name}: {message}: load it with graph_sites=[], or with enforce_eager=True")
        assert taps.running is not None
        chosen = taps.running.examined.chosen
        with torch.inference_mode():
            for (site, layer), place in chosen.items():
                if place.number in fixed.places and not bool(torch.isfinite(self._left[place.number]).all()):
                    message = f"{site} at layer {layer} was left out of a recorded graph"
                    raise SelfTestError(f"{name}: {message}: load it with graph_sites=[], or with enforce_eager")
            last = chosen["resid_post", len(taps.wrapped.blocks) - 1]
            if last.number in fixed.places:
                rows = self._left[last.number]
                rows = rows if probe.sampled is None else rows[probe.sampled]
                check_final(name, rows, taps.wrapped.final, probe.arrived)
