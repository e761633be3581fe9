"""midstream reads the residual stream of language models, with every number labelled.

>>> import midstream as ms
>>> str(ms.SelectSpec.parse("prompt[-1]"))
'prompt[-1]'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.capture import CaptureReceipt, CaptureSpec, Labels
    from .core.errors import (
        CaptureError,
        FileFormatError,
        MidstreamError,
        ModelLoadError,
        PromptError,
        SelfTestError,
        SessionClosedError,
        SpecError,
        UnsupportedOperationError,
    )
    from .core.generation import Completion, GenerationParams
    from .core.result import CaptureResult
    from .core.select import SelectSpec
    from .language_model import LanguageModel, load

__version__ = "0.1.0"

_HOMES = {
    "core.capture": ("CaptureReceipt", "CaptureSpec", "Labels"),
    "core.errors": (
        "CaptureError",
        "FileFormatError",
        "MidstreamError",
        "ModelLoadError",
        "PromptError",
        "SelfTestError",
        "SessionClosedError",
        "SpecError",
        "UnsupportedOperationError",
    ),
    "core.generation": ("Completion", "GenerationParams"),
    "core.result": ("CaptureResult",),
    "core.select": ("SelectSpec",),
    "language_model": ("LanguageModel", "load"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import midstream` costs next to nothing."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'midstream' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
