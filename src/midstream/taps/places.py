"""Changing what stands at a tap, by hooks that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import local
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from midstream.core.errors import CaptureError
from midstream.core.narrow import is_list

from .locate import Tap

Alter = Callable[[Tensor], Tensor | None]
"""What stands at a tap → what shall stand there; None leaves it."""


@contextmanager
def altered(tap: Tap, alter: Alter) -> Generator[None]:
    """While open, `alter` sees the tensor at `tap` at each forward, and what it returns takes its place.

    A router that gives logits together with the experts that it chose of them is entered: `alter` comes between.
    """
    if tap.side == "input":
        handles = [tap.module.register_forward_pre_hook(_before(tap, alter), with_kwargs=True)]
    elif _chooses(tap.module):
        handles = _inside_router(tap, alter)
    else:
        handles = [tap.module.register_forward_hook(_after(tap, alter))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _new(tap: Tap, alter: Alter, value: Tensor) -> Tensor | None:
    """The tensor that shall stand in the module's own place, before the block's multiplier."""
    changed = alter(value if tap.scale == 1.0 else value * tap.scale)
    return changed if changed is None or tap.scale == 1.0 else changed / tap.scale


def _before(tap: Tap, alter: Alter) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = "hidden_states" if "hidden_states" in kwargs or not args else None
        if name is not None and name not in kwargs:
            name = next(iter(kwargs))
        changed = _new(tap, alter, args[0] if name is None else kwargs[name])
        if changed is None:
            return None
        return ((changed, *args[1:]), kwargs) if name is None else (args, kwargs | {name: changed})

    return hook


def _after(tap: Tap, alter: Alter) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        changed = _new(tap, alter, output[0] if is_list(output) else output)
        if changed is None or not is_list(output):
            return changed
        return type(output)([changed, *output[1:]])

    return hook


def _chooses(module: nn.Module) -> bool:
    """Whether a module is a router that picks the experts itself: one product with a weight of its own."""
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own and not isinstance(module, nn.Linear) and hasattr(module, "top_k")


class _OwnProduct(TorchFunctionMode):
    """While a router runs, what its own weight's product gives is altered."""

    def __init__(self, weight: Tensor, alter: Alter) -> None:
        super().__init__()
        self._weight, self._alter = weight, alter
        self.found = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        result = func(*args, **named)
        weight = args[1] if len(args) > 1 else named.get("weight")
        if func is not functional.linear or weight is not self._weight:
            return result
        self.found += 1
        changed = self._alter(result)
        return result if changed is None else changed


class _Open(local):
    """The modes of this thread's calls of one router; what no hook has closed is closed by `remove`."""

    def __init__(self) -> None:
        self.modes: list[_OwnProduct] = []

    def remove(self) -> None:
        """Leave every mode that an interrupt left open."""
        while self.modes:
            self.modes.pop().__exit__(None, None, None)  # pyright: ignore[reportUnknownMemberType]


def _inside_router(tap: Tap, alter: Alter) -> list[Any]:
    opened = _Open()

    def enter(module: nn.Module, _: Any) -> None:
        opened.remove()  # torch calls no hook after a KeyboardInterrupt, `always_call` or not
        mode = _OwnProduct(module.get_parameter("weight"), alter)
        mode.__enter__()
        opened.modes.append(mode)

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        if not opened.modes:
            return  # an earlier hook of this forward failed before ours began
        mode = opened.modes[-1]
        opened.remove()
        if output is not None and mode.found != 1:
            name = type(module).__name__
            raise CaptureError(f"{name} made {mode.found} products with its weight where one was due: not steered")

    return [
        tap.module.register_forward_pre_hook(enter),
        tap.module.register_forward_hook(leave, always_call=True),
        opened,
    ]
