"""EasySteer's `hidden_states`, and vLLM's `load_hidden_states`.

    from midstream.compat.vllm import LLM              # in place of: from vllm import LLM
    import midstream.compat.hidden_states as hs        # in place of: import easysteer.hidden_states as hs
    from midstream import SelectSpec                   # in place of: from vllm.capture import SelectSpec

`llm` is a `vllm.LLM` with our plugin (the one above, or any that was made with
`additional_config={"midstream": {}}`), or an `lm` of `ms.load` on any backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream.core.capture import CaptureSpec
from midstream.core.errors import CaptureError, UnsupportedOperationError, choices, spec_error
from midstream.core.generation import Completion
from midstream.core.prompts import prompt_list
from midstream.core.result import CaptureResult
from midstream.core.sites import OTHER_NAMES, Site, as_site
from midstream.formats import hidden_states_file
from midstream.language_model import LanguageModel, load

STREAMS: Final[dict[str, Site]] = {
    name: as_site(OTHER_NAMES.get(name, name)) for name in ("hidden_states", "router_logits", "attention_heads")
}
"""The names that EasySteer has for what it captures."""
_MINE: Final = "_midstream"


@dataclass(frozen=True)
class RowLabels:
    """What the rows of a layer are, `[rows]` each. req_ids: texts, vLLM's `RequestOutput.request_id` if it has one."""

    req_ids: Sequence[str]
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class Captured:
    """Rows of one stream by true layer id and by sample. outputs: vLLM's RequestOutputs; in process, Completions.

    result: the whole CaptureResult, which has more.
    """

    result: CaptureResult
    outputs: Sequence[Any]

    labelled = True

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def layer_ids(self) -> list[int]:
        """True layer ids, ascending."""
        return list(self.result.layer_ids)

    @property
    def layers(self) -> dict[int, Tensor]:
        """Layer → `[rows, width]`, all samples."""
        return {layer: self.rows(layer) for layer in self.layer_ids}

    @property
    def layouts(self) -> dict[int, dict[str, int]]:
        """Layer → width, and of heads num_heads and head_size."""
        (of,) = self.result.layouts.values()
        found: dict[int, dict[str, int]] = {}
        for layer in self.layer_ids:
            found[layer] = {"width": of[layer].width}
            heads, size = of[layer].heads, of[layer].head_size
            if heads and size:
                found[layer] |= {"num_heads": heads, "head_size": size}
        return found

    def rows(self, layer: int) -> Tensor:
        """All rows of a layer, `[rows, width]`."""
        return self.result.rows(layer)

    def meta(self, layer: int) -> RowLabels:
        """Of which request each row is, its position, and the token consumed there."""
        of = self.result.meta(layer)
        names = [getattr(one, "request_id", str(index)) for index, one in enumerate(self.outputs)]
        return RowLabels([names[sample] for sample in of["req_ids"].tolist()], of["positions"], of["token_ids"])

    def sample(self, index: int) -> dict[int, Tensor]:
        """Layer → one sample's rows, `[its rows, width]`."""
        return self.result.sample(index)

    def sample_rows(self, index: int, layer: int) -> Tensor:
        """One sample's rows at one layer."""
        return self.sample(index)[layer]

    def token(self, index: int, layer: int, position: int = -1) -> Tensor:
        """One captured row of a sample by its place among them (not its position in the sequence), `[width]`."""
        return self.sample_rows(index, layer)[position]

    def sample_positions(self, index: int) -> list[int]:
        """The positions of a sample's rows."""
        return [int(one) for one in self.result.sample_positions(index)]

    def sample_token_ids(self, index: int) -> list[int]:
        """The tokens consumed at a sample's rows."""
        return [int(one) for one in self.result.sample_token_ids(index)]

    def to_nested(self) -> list[list[Tensor]]:
        """`[sample][place of the layer]` → `[its rows, width]`."""
        return self.result.to_nested()


# --- one call


def capture(
    llm: Any,
    prompts: Any,
    max_tokens: int = 1,
    layers: Sequence[int] | None = None,
    dtype: str | None = None,
    select: Any = None,
    per_prompt_selects: Sequence[Any] | None = None,
    stream: str = "hidden_states",
    steering: Any = None,
    budget_bytes: int | None = None,
    **kwargs: Any,
) -> Captured:
    """EasySteer's `capture`: rows of a batch of prompts, of one stream. kwargs: fields of GenerationParams.

    select: a SelectSpec, its dict, or the row grammar. steering: midstream's specs. budget_bytes: CaptureError for a
    capture that is larger, once it is there. CaptureError, naming the prompt, where one failed: `lm.capture` keeps the
    others readable. Refuses positions= and reduce=, as EasySteer's does.
    """
    _refuse_reductions(kwargs)
    found = _model(llm).capture(
        prompts,
        layers=layers,
        site=_site(stream),
        rows=select,
        per_prompt_rows=per_prompt_selects,
        max_tokens=max_tokens,
        dtype=dtype,
        steering=steering,
        **kwargs,
    )
    for index, error in found.errors.items():
        raise CaptureError(f"prompt {index}: {error}") from error
    size = sum(rows.nbytes for rows in found.tensors.values())
    if budget_bytes is not None and size > budget_bytes:
        raise CaptureError(f"{size:,} bytes of rows, budget_bytes is {budget_bytes:,}: fewer prompts, rows or layers")
    return Captured(found, [_engine_output(one) for one in found.outputs])


def capture_batches(
    llm: Any,
    prompts: Sequence[Any],
    *,
    batch_size: int = 32,
    per_prompt_selects: Sequence[Any] | None = None,
    steering: Any = None,
    budget_bytes: int | None = 256 << 20,
    **kwargs: Any,
) -> Iterator[Captured]:
    """The same in batches of 32, in the prompts' order, of at most 256 MiB each; samples are counted within a batch."""
    if batch_size < 1:
        raise spec_error("E_BAD_PARAM", "batch_size", f"is {batch_size}: must be 1 or more")
    prompts = prompt_list(prompts)
    for name, of in (("per_prompt_selects", per_prompt_selects), ("steering", steering)):
        if isinstance(of, list) and len(of) != len(prompts):
            raise spec_error("E_BAD_PARAM", name, f"{len(of)} for {len(prompts)} prompts: one each")
    for start in range(0, len(prompts), batch_size):
        mine = slice(start, start + batch_size)
        yield capture(
            llm,
            prompts[mine],
            per_prompt_selects=per_prompt_selects and per_prompt_selects[mine],
            steering=steering[mine] if isinstance(steering, list) else steering,
            budget_bytes=budget_bytes,
            **kwargs,
        )


def get_all_hidden_states_generate(
    llm: Any, prompts: Any, max_tokens: int = 1, split_by_samples: bool = True, **kwargs: Any
) -> tuple[list[Any], Sequence[Any]]:
    """`(hidden_states, outputs)`: `[sample][layer place]`, or `[layer place]` of all samples. kwargs: as `capture`."""
    found = capture(llm, prompts, max_tokens=max_tokens, **kwargs)
    return (found.to_nested() if split_by_samples else list(found.layers.values())), found.outputs


def get_moe_router_logits_generate(
    llm: Any, prompts: Any, max_tokens: int = 1, split_by_samples: bool = False, **kwargs: Any
) -> tuple[Any, Sequence[Any]]:
    """`(router_logits, outputs)`: layer → `[rows, experts]`, or a list of these, one per sample."""
    found = capture(llm, prompts, max_tokens=max_tokens, stream="router_logits", **kwargs)
    if split_by_samples:
        return [found.sample(index) for index in range(len(found))], found.outputs
    return found.layers, found.outputs


# --- requests that others submit


def start_capture(
    llm: Any,
    stream: str = "hidden_states",
    layers: Sequence[int] | None = None,
    dtype: str | None = None,
    select: Any = None,
    **kwargs: Any,
) -> None:
    """Capture every request that comes to a vLLM engine from now on, whoever submits it, until `stop_capture`.

    Calls of an `lm` that steer or capture keep their own rows. One stream at a time: BusyError while another is on.
    Requests that run already are incomplete.
    """
    _refuse_reductions(kwargs)
    if kwargs:
        raise spec_error("E_UNKNOWN_FIELD", next(iter(kwargs)), "start_capture takes stream, layers, dtype and select")
    lm = _model(llm)
    stand = getattr(lm.session, "stand", None)
    if stand is None:
        message = "others submit no requests to a model in this process: use capture, or backend='vllm'"
        raise UnsupportedOperationError("E_UNKNOWN_KIND", "llm", message)
    stand(CaptureSpec.of({"sites": [_site(stream)], "layers": layers, "select": select, "dtype": dtype}, ""))


def fetch_captured(
    llm: Any, stream: str = "hidden_states", *, req_ids: Sequence[str] | None = None, clear: bool = True
) -> Captured:
    """The rows of requests that have ended since; CaptureError for one that is incomplete, unless it is left out.

    req_ids: `RequestOutput.request_id`s; None: all. clear: forget what was fetched.
    """
    result, outputs = _started(llm, stream).fetch(req_ids, clear=clear)
    return Captured(result, outputs)


def clear_captured(llm: Any, stream: str = "hidden_states") -> None:
    """Forget what was captured, rows and errors both; the capture goes on."""
    _started(llm, stream).clear()


def stop_capture(llm: Any, stream: str = "hidden_states") -> None:
    """Capture no further request; what is there can still be fetched."""
    _started(llm, stream).stop()


# --- files


def load_hidden_states(path: str | PathLike[str]) -> dict[str, Tensor]:
    """What vLLM's function of this name returns: `hidden_states` `[tokens, layers, hidden]` and `token_ids`.

    Reads vLLM's files and ours, and sleeps while a writer holds the file's lock. Unlike vLLM's it also reads
    a file whose lock was cleared away or never made, and its tensors own their memory.
    `midstream.formats.hidden_states_file.read` waits with a timeout and gives the layer ids too.
    """
    return hidden_states_file.read_tensors(path)


# --- how


def _model(llm: Any) -> LanguageModel:
    """The model behind `llm`: itself, or one that is made once for a `vllm.LLM` and lives as long as that."""
    if isinstance(llm, LanguageModel):
        return llm
    if not hasattr(llm, "llm_engine"):
        message = f"a {type(llm).__name__} is neither a vllm.LLM nor an lm of ms.load"
        raise spec_error("E_BAD_PARAM", "llm", message)
    if not hasattr(llm, _MINE):
        setattr(llm, _MINE, load(llm, backend="vllm"))
    return getattr(llm, _MINE)


def _started(llm: Any, stream: str) -> Any:
    """The capture that was started on an engine."""
    found = getattr(_model(llm).session, "standing", None)
    if found is None or found.spec.sites != (_site(stream),):
        raise spec_error("E_BAD_PARAM", "stream", f"no capture of {stream} was started: start_capture comes first")
    return found


def _site(stream: str) -> Site:
    if stream not in STREAMS:
        raise spec_error("E_SITE", "stream", f"no stream {stream!r}; there are: {choices(STREAMS)}")
    return STREAMS[stream]


def _refuse_reductions(kwargs: Mapping[str, Any]) -> None:
    for name in ("positions", "reduce"):
        if name in kwargs:
            message = "name rows with select=, e.g. select='prompt[-1]', and reduce the tensors that come back"
            raise spec_error("E_UNKNOWN_FIELD", name, message)


def _engine_output(completion: Completion) -> Any:
    """vLLM's RequestOutput, with all choices; the Completion itself where no engine said anything."""
    if completion.engine_output is None or not completion.choices:
        return completion.engine_output or completion
    whole = copy(completion.engine_output)
    whole.outputs = []
    for index, choice in enumerate(completion.choices):
        one = copy(choice.engine_output.outputs[0])
        one.index = index
        whole.outputs.append(one)
    return whole
