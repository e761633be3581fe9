"""Entry points of other tools under their own names, each a thin translation of what midstream does."""

from .hidden_states import load_hidden_states
from .interlens import CapturedSite, capture_activations

__all__ = ["CapturedSite", "capture_activations", "load_hidden_states"]
