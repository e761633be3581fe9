"""midstream reads and steers the residual stream of language models, with every number labelled.

>>> import midstream as ms
>>> str(ms.SelectSpec.parse("prompt[-1]"))
'prompt[-1]'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; `_HOMES` below is what runs
    from . import harvest as harvest
    from .core.artifacts import Artifact as Artifact
    from .core.capture import CaptureReceipt as CaptureReceipt
    from .core.capture import CaptureSpec as CaptureSpec
    from .core.capture import Labels as Labels
    from .core.errors import BusyError as BusyError
    from .core.errors import CaptureError as CaptureError
    from .core.errors import EngineError as EngineError
    from .core.errors import FileFormatError as FileFormatError
    from .core.errors import MidstreamError as MidstreamError
    from .core.errors import ModelLoadError as ModelLoadError
    from .core.errors import PartialBatchError as PartialBatchError
    from .core.errors import PromptError as PromptError
    from .core.errors import SelfTestError as SelfTestError
    from .core.errors import SessionClosedError as SessionClosedError
    from .core.errors import SpecError as SpecError
    from .core.errors import TransportError as TransportError
    from .core.errors import UnsupportedOperationError as UnsupportedOperationError
    from .core.generation import Completion as Completion
    from .core.generation import GenerationParams as GenerationParams
    from .core.generation import TokenLogprob as TokenLogprob
    from .core.interventions import InterventionSpec as InterventionSpec
    from .core.interventions import OpReceipt as OpReceipt
    from .core.items import ConstraintEntry as ConstraintEntry
    from .core.items import GenerationItem as GenerationItem
    from .core.items import HookEntry as HookEntry
    from .core.items import InterventionEntry as InterventionEntry
    from .core.items import ScoringItem as ScoringItem
    from .core.items import StackEntry as StackEntry
    from .core.probe import Probe as Probe
    from .core.result import CaptureResult as CaptureResult
    from .core.select import SelectSpec as SelectSpec
    from .core.stream import Chunk as Chunk
    from .language_model import LanguageModel as LanguageModel
    from .language_model import load as load
    from .steering import ablate as ablate
    from .steering import add as add
    from .steering import affine as affine
    from .steering import clamp as clamp
    from .steering import function as function
    from .steering import low_rank as low_rank
    from .steering import patch as patch
    from .steering import replace as replace
    from .steering import rotate as rotate
    from .steering import router as router

__version__ = "0.1.0"

_HOMES = {
    "core.artifacts": ("Artifact",),
    "core.capture": ("CaptureReceipt", "CaptureSpec", "Labels"),
    "core.errors": (
        "BusyError",
        "CaptureError",
        "EngineError",
        "FileFormatError",
        "MidstreamError",
        "ModelLoadError",
        "PartialBatchError",
        "PromptError",
        "SelfTestError",
        "SessionClosedError",
        "SpecError",
        "TransportError",
        "UnsupportedOperationError",
    ),
    "core.generation": ("Completion", "GenerationParams", "TokenLogprob"),
    "core.interventions": ("InterventionSpec", "OpReceipt"),
    "core.items": ("ConstraintEntry", "GenerationItem", "HookEntry", "InterventionEntry", "ScoringItem", "StackEntry"),
    "core.probe": ("Probe",),
    "core.result": ("CaptureResult",),
    "core.select": ("SelectSpec",),
    "core.stream": ("Chunk",),
    "language_model": ("LanguageModel", "load"),
    "steering": ("ablate", "add", "affine", "clamp", "function", "low_rank", "patch", "replace", "rotate", "router"),
}
_ROOMS = ("harvest",)
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF), *_ROOMS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import midstream` costs next to nothing."""
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'midstream' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
