"""midstream reads the residual stream of language models, with every number labelled.

>>> import midstream as ms
>>> str(ms.SelectSpec.parse("prompt[-1]"))
'prompt[-1]'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; `_HOMES` below is what runs
    from .core.capture import CaptureReceipt as CaptureReceipt
    from .core.capture import CaptureSpec as CaptureSpec
    from .core.capture import Labels as Labels
    from .core.errors import BusyError as BusyError
    from .core.errors import CaptureError as CaptureError
    from .core.errors import FileFormatError as FileFormatError
    from .core.errors import MidstreamError as MidstreamError
    from .core.errors import ModelLoadError as ModelLoadError
    from .core.errors import PromptError as PromptError
    from .core.errors import SelfTestError as SelfTestError
    from .core.errors import SessionClosedError as SessionClosedError
    from .core.errors import SpecError as SpecError
    from .core.errors import UnsupportedOperationError as UnsupportedOperationError
    from .core.generation import Completion as Completion
    from .core.generation import GenerationParams as GenerationParams
    from .core.result import CaptureResult as CaptureResult
    from .core.select import SelectSpec as SelectSpec
    from .language_model import LanguageModel as LanguageModel
    from .language_model import load as load

__version__ = "0.1.0"

_HOMES = {
    "core.capture": ("CaptureReceipt", "CaptureSpec", "Labels"),
    "core.errors": (
        "BusyError",
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
