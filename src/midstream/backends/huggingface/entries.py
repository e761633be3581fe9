"""State entries of an item: plain PyTorch hooks, and interventions on passes that somebody else runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from midstream.core.binding import BoundOp
from midstream.core.errors import CaptureError, choices, spec_error
from midstream.core.interventions import OpReceipt, receipts_together
from midstream.core.items import HookEntry
from midstream.core.narrow import is_mapping
from midstream.core.sites import Site
from midstream.taps.locate import TapMap
from midstream.taps.steerer import Steerer
from midstream.taps.step import Ints, StepBatch

from .forward import input_device
from .hooks import steered

_REGISTER: Final[dict[str, Callable[[nn.Module, Any], Any]]] = {
    "pre": lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True),
    "forward": lambda module, hook: module.register_forward_hook(hook, with_kwargs=True, prepend=True),
    "backward": lambda module, hook: module.register_full_backward_hook(hook, prepend=True),
}


@contextmanager
def hooked(model: nn.Module, entries: Sequence[HookEntry]) -> Generator[None]:
    """With a caller's hooks in place, in their order and before ours; none stays behind, also when one fails."""
    with ExitStack() as stack:
        for kind, module, hook in reversed(checked_hooks(model, entries)):  # each goes before those that are there
            stack.callback(_REGISTER[kind](module, hook).remove)
        yield


def checked_hooks(model: nn.Module, entries: Sequence[HookEntry]) -> list[tuple[str, nn.Module, Callable[..., Any]]]:
    """Kind, module and function of every hook.

    Raises E_BAD_PARAM for a module that the model has not, and for a kind that is none of pre, forward, backward.
    """
    found: list[tuple[str, nn.Module, Callable[..., Any]]] = []
    for place, entry in enumerate(entries):
        for kind, hooks in entry.hooks.items():
            path = f"state_entries[{place}].hooks.{kind}"
            if kind not in _REGISTER:
                raise spec_error("E_BAD_PARAM", path, f"no kind {kind!r}; there are: {choices(tuple(_REGISTER))}")
            found += [(kind, *_module_and_hook(model, hook, f"{path}[{n}]")) for n, hook in enumerate(hooks)]
    return found


def _module_and_hook(model: nn.Module, hook: Any, path: str) -> tuple[nn.Module, Callable[..., Any]]:
    if not is_mapping(hook) or set(hook) != {"module", "hook_func"} or not callable(hook["hook_func"]):
        raise spec_error("E_BAD_PARAM", path, "a hook is {'module': a name or a module, 'hook_func': a function}")
    module = hook["module"]
    if isinstance(module, str):
        names = dict(model.named_modules())
        if module not in names:
            raise spec_error("E_BAD_PARAM", f"{path}.module", f"no module {module!r:.80}: see model.named_modules()")
        module = names[module]
    if not any(module is one for one in model.modules()):
        raise spec_error("E_BAD_PARAM", f"{path}.module", f"{type(module).__name__} is no module of this model")
    return module, hook["hook_func"]


_CACHES: Final = ("cache", "past_key_values", "cache_params")
"""Names of a forward's cache: transformers takes the older ones too."""


class Follower:
    """Interventions on the passes of a loop that is not ours: the rows of each are read off the model's arguments.

    A pass with an empty cache begins new sequences, which are prompts; what follows on that cache is generation. Every
    row of the batch has the spec. ops_of: a prompt's token ids → its ops. prompt: where it is known, the one prompt of
    all rows, which then begins once, however it comes (in pieces, or again and again without a cache).
    """

    def __init__(
        self,
        taps: TapMap,
        sites: Mapping[Site, Sequence[int]],
        ops_of: Callable[[Sequence[int]], Sequence[BoundOp]],
        prompt: Sequence[int] | None = None,
    ) -> None:
        self._model: Any = taps.anatomy.model
        self._taps = taps
        self._ops_of = ops_of
        self.sites: dict[Site, tuple[int, ...]] = {site: tuple(layers) for site, layers in sites.items()}
        self._prompt = prompt
        self._consumed = 0
        self._thread = get_ident()
        self._names = list(inspect.signature(self._model.forward).parameters)
        self._steerer: Steerer | None = None
        self._prompt_lens: list[int] = []
        self._done: list[Steerer] = []

    @contextmanager
    def following(self) -> Generator[None]:
        """While open, every forward of the model by this thread is steered."""
        with ExitStack() as stack:
            before = self._model.register_forward_pre_hook(self._before, with_kwargs=True)
            stack.callback(before.remove)
            stack.enter_context(steered(self._taps, self))
            stack.callback(self._model.register_forward_hook(self._after, always_call=True).remove)
            yield

    def steer(self, site: Site, layer: int, values: Tensor) -> Tensor | None:
        """See Steerer."""
        if self._steerer is None:
            raise CaptureError(f"{site} at layer {layer} fired outside a pass: call the model, not a part of it")
        if layer not in self._steerer.sites.get(site, ()):
            return None
        return self._steerer.steer(site, layer, values)

    def receipts(self) -> tuple[OpReceipt, ...]:
        """What each op did at each layer so far, over all rows of all batches."""
        return receipts_together(steerer.tally() for steerer in self._done)

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() != self._thread:
            return
        given = dict(zip(self._names, args, strict=False)) | kwargs
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        if ids is None and embeds is None:
            raise CaptureError("a forward without input_ids or inputs_embeds: its rows are not known")
        batch, width = (embeds if ids is None else ids).shape[:2]  # pyright: ignore[reportOptionalMemberAccess]
        tokens = ids.cpu().numpy() if ids is not None else np.full((batch, width), -1, dtype=np.int64)
        cache = next((given[name] for name in _CACHES if given.get(name) is not None), None)
        past = 0 if cache is None else self._cached(cache, given.get("attention_mask"), width)
        self._consumed = past + width
        real, positions = _positions(given.get("attention_mask"), batch, width, past)
        if self._steerer is None or (past == 0 and self._prompt is None):
            self._begin(tokens, real)
        device = input_device(self._model)
        assert self._steerer is not None, "a cache has a beginning"
        self._steerer.begin(self._step(tokens, real, positions), device)

    def _cached(self, cache: Any, mask: Any, width: int) -> int:
        """How many tokens a cache holds; CaptureError for one that does not say, where nothing else does."""
        try:
            return int(cache.get_seq_length())
        except (ValueError, AttributeError):  # that of a recurrent model
            if isinstance(mask, Tensor) and mask.dim() == 2:
                return mask.shape[1] - width
            if self._prompt is not None:  # one sequence, which goes on from pass to pass
                return self._consumed
            message = f"a {type(cache).__name__} does not say how many tokens it holds: give attention_mask"
            raise CaptureError(message) from None

    def _begin(self, tokens: Ints, real: Any) -> None:
        """New prompts, one per row of the batch."""
        prompts = [row[kept].tolist() for row, kept in zip(tokens, real, strict=True)]
        if self._prompt is not None:
            prompts = [list(self._prompt)] * len(prompts)
        self._prompt_lens = [len(prompt) for prompt in prompts]
        self._steerer = Steerer([self._ops_of(prompt) for prompt in prompts])
        self._done.append(self._steerer)

    def _step(self, tokens: Ints, real: Any, positions: Ints) -> StepBatch:
        batch, width = tokens.shape
        lengths = self._prompt_lens
        if batch != len(lengths):  # a search over beams, or rows that have ended and left
            if len(set(lengths)) > 1:
                message = f"{batch} rows where {len(lengths)} prompts began: which are they? Keep every row of a batch"
                raise CaptureError(message)
            lengths = [lengths[0]] * batch
        owner = np.minimum(np.arange(batch), len(self._prompt_lens) - 1)
        flat = np.flatnonzero(real.reshape(-1))
        row = flat // width
        return StepBatch(
            batch * width,
            row=flat,
            request=owner[row],
            position=positions.reshape(-1)[flat],
            token_id=tokens.reshape(-1)[flat],
            prompt_len=np.array(lengths, dtype=np.int64)[row],
        )

    def _after(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._steerer is None or get_ident() != self._thread:
            return
        if output is None:  # the forward failed
            self._steerer.fail(())
        else:
            self._steerer.end()


def _positions(mask: Any, batch: int, width: int, past: int) -> tuple[Any, Ints]:
    """Which places of a pass are tokens, `[batch, width]`, and their absolute positions."""
    if mask is None:
        real = np.ones((batch, width), dtype=np.bool_)
        return real, np.broadcast_to(past + np.arange(width), (batch, width)).astype(np.int64)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise CaptureError("a forward whose attention_mask is not [batch, tokens]: its positions are not known")
    kept = mask.cpu().numpy().astype(np.int64)
    if kept.shape[1] < past + width:
        raise CaptureError(f"attention_mask covers {kept.shape[1]} of {past + width} tokens")
    counted = kept[:, : past + width]
    return counted[:, past:] > 0, (counted.cumsum(1) - 1)[:, past:]
