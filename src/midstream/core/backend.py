"""The seam between what people ask and the engines that answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from .capture import CaptureSpec
from .errors import UnsupportedOperationError, spec_error
from .generation import Completion, GenerationParams
from .interventions import InterventionSpec
from .items import GenerationItem, ScoringItem
from .prompts import PreparedPrompt
from .result import CaptureResult
from .select import SelectSpec
from .sites import Site
from .stream import Chunk

if TYPE_CHECKING:
    from torch import Tensor

BackendKind = Literal["huggingface", "vllm", "vllm-serve"]
SECRETS: Final = ("api_key",)
"""Options that no hash, repr or comparison shows."""
Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) after each forward pass."""


@dataclass(frozen=True)
class BackendSpec:
    """Which engine and which model: frozen, hashable, its options plain data (what JSON can hold).

    Secrets among the options (SECRETS) are kept apart, in `secrets`: two specs that differ in them alone are equal.

    >>> spec = BackendSpec("huggingface", "smollm2", {"dtype": "float32"})
    >>> spec == BackendSpec("huggingface", "smollm2", {"dtype": "float32"}), {spec: 1}[spec]
    (True, 1)
    """

    kind: BackendKind
    model: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    secrets: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        hidden = {name: self.options[name] for name in SECRETS if self.options.get(name) is not None}
        if wrong := [name for name, value in hidden.items() if not isinstance(value, str)]:
            raise spec_error("E_BAD_PARAM", f"options.{wrong[0]}", "is a text")
        object.__setattr__(self, "secrets", MappingProxyType(hidden))
        open_ = {name: value for name, value in self.options.items() if name not in SECRETS}
        object.__setattr__(self, "options", open_)
        try:
            copied = json.loads(self._canonical())
        except (TypeError, ValueError) as error:
            raise spec_error("E_BAD_PARAM", "options", f"options are plain data, as JSON has it: {error}") from None
        object.__setattr__(self, "options", MappingProxyType(copied))

    def _canonical(self) -> str:
        return json.dumps(dict(self.options), sort_keys=True, allow_nan=False, default=_dtype_name)

    def __hash__(self) -> int:
        return hash((self.kind, self.model, self._canonical()))


def _dtype_name(value: Any) -> str:
    """A dtype's name, the one value of other libraries that options may hold."""
    if type(value).__name__ != "dtype":
        raise TypeError(f"{value!r:.60} is not plain data")
    return str(value).removeprefix("torch.")


class Capability(StrEnum):
    """What a backend can do, as atoms that a caller can ask for."""

    IN_PROCESS_TORCH = "in_process_torch"
    """The model is in this process: `session.model`, HookEntry, StackEntry, `ms.function`, `entries_applied`."""
    HIDDEN_CAPTURE = "hidden_capture"
    INTERVENTION_SPECS = "intervention_specs"
    BEAM_PROPOSALS = "beam_proposals"
    """`extra` reaches the model's own `generate`, beams included."""
    PER_STEP_LOGIT_SPECS = "per_step_logit_specs"
    """Log-probabilities of sampled and prompt tokens."""
    GUIDED_DECODING = "guided_decoding"
    SERVE_CHECKPOINT = "serve_checkpoint"
    """`checkpoint`: a folder whose weights replace the model's."""
    SERVE_LORA = "serve_lora"
    """`lora`: an adapter that every request goes through."""


_ON_ENGINES: Final = frozenset({Capability.SERVE_CHECKPOINT, Capability.SERVE_LORA})
_IN_PROCESS: Final = frozenset({Capability.IN_PROCESS_TORCH, Capability.BEAM_PROPOSALS})
EVERYTHING: Final[Mapping[BackendKind, frozenset[Capability]]] = {
    "huggingface": frozenset(Capability) - _ON_ENGINES,
    "vllm": frozenset(Capability) - _IN_PROCESS,
    "vllm-serve": frozenset(Capability) - _IN_PROCESS,
}
"""What each kind of backend can do with a model that allows all of it."""


@dataclass(frozen=True)
class CaptureKinds:
    """Which captures a backend takes."""

    sites: tuple[Site, ...]
    locations: tuple[str, ...] = ("layer_output", "layer_input")
    selections: tuple[str, ...] = ("all_tokens", "last_token", "select")


@dataclass(frozen=True)
class InterventionKinds:
    """Which ops a backend takes, and at which sites: those of the wire, and those that run in process only."""

    kinds: tuple[str, ...] = ()
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True)
class ConstraintKinds:
    """Which constraints a backend takes."""

    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessorKinds:
    """Which of a caller's own processors a backend runs."""

    kinds: tuple[str, ...] = ()


@dataclass(frozen=True)
class BackendCapabilities:
    """The atoms and kinds of one backend; `refused` says why a site of the field is not among them."""

    backend: BackendKind
    atoms: frozenset[Capability]
    capture: CaptureKinds
    interventions: InterventionKinds = InterventionKinds()
    constraints: ConstraintKinds = ConstraintKinds()
    processors: ProcessorKinds = ProcessorKinds()
    refused: Mapping[Site, str] = field(default_factory=dict[Site, str])

    def require(self, atoms: Iterable[Capability], path: str = "backend") -> None:
        """Refuse, before any work, what this backend has not; the message names it, and who has it."""
        for atom in sorted(set(atoms) - self.atoms):
            who = [kind for kind, has in EVERYTHING.items() if atom in has and kind != self.backend]
            elsewhere = f"backend={who[0]!r} has it" if who else "no backend has it for this model"
            raise UnsupportedOperationError("E_UNKNOWN_KIND", path, f"{self.backend} has no {atom.value}: {elsewhere}")

    def require_spec(self, spec: InterventionSpec, path: str = "steering") -> None:
        """Refuse ops of kinds and sites that this backend has not, with what it has."""
        self.require([Capability.INTERVENTION_SPECS], path)
        for place, op in enumerate(spec.ops):
            if op.kind not in self.interventions.kinds:
                have = ", ".join(self.interventions.kinds)
                message = f"{self.backend} takes no {op.kind}; it takes: {have}"
                raise UnsupportedOperationError("E_UNKNOWN_KIND", f"{path}.ops[{place}].kind", message)
            if op.site not in self.interventions.sites:
                have, why = ", ".join(self.interventions.sites), self.refused.get(op.site, "the architecture has none")
                message = f"{self.backend} cannot steer {op.site} of this model: {why}; it can: {have}"
                raise UnsupportedOperationError("E_SITE", f"{path}.ops[{place}].site", message)


@dataclass(frozen=True)
class ModelFacts:
    """What is true of the model, from its text config, computed on each access.

    model_fingerprint hashes the config, parameter names, shapes and dtypes, and sampled weight bytes.
    """

    model_ref: str
    model_type: str
    model_fingerprint: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    dtype: str
    context_length: int | None
    vocab_size: int

    @classmethod
    def of(cls, config: Any, text: Any, **others: Any) -> ModelFacts:
        """From a model's config, that of its text decoder, and what neither says."""
        heads = text.num_attention_heads if hasattr(text, "num_attention_heads") else 1
        own: dict[str, Any] = text.__dict__  # a config may refuse per-layer reads
        return cls(
            model_type=config.model_type,
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            num_attention_heads=heads,
            head_dim=own.get("head_dim") or text.hidden_size // heads,
            vocab_size=text.vocab_size,
            **others,
        )


class Tokens:
    """Counts settled tokens for a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        """Count tokens, and tell the callback."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


class Session(Protocol):
    """One exclusive use of a backend's engine; use after `close` raises SessionClosedError."""

    @property
    def layout(self) -> ModelFacts:
        """The model's facts."""
        ...

    @property
    def num_layers(self) -> int:
        """How many decoder blocks the model has."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        ...

    def generate(
        self,
        items: Sequence[GenerationItem],
        params: GenerationParams,
        *,
        call: int | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """One Completion per item, in order."""
        ...

    def stream(
        self,
        item: GenerationItem,
        params: GenerationParams,
        spec: CaptureSpec | None = None,
        *,
        call: int | None = None,
    ) -> Iterator[Chunk]:
        """One item a token at a time; the last chunk has the whole."""
        ...

    def score(
        self, items: Sequence[ScoringItem], params: GenerationParams | None = None, *, progress: Progress | None = None
    ) -> Tensor:
        """Log-probabilities of each item's reference, `[items, reference length]`."""
        ...

    def capture(
        self,
        prompts: Sequence[PreparedPrompt],
        spec: CaptureSpec | None = None,
        *,
        layers: Any = None,
        mode: Literal["all_tokens", "last_token"] = "all_tokens",
        location: Literal["layer_output", "layer_input"] = "layer_output",
        per_prompt_select: Sequence[SelectSpec | None] | None = None,
        steering: Sequence[InterventionSpec | None] | None = None,
        params: GenerationParams | None = None,
        call: int | None = None,
        progress: Progress | None = None,
    ) -> CaptureResult:
        """The rows that `spec` selects of `prompts`, and of what is generated after them."""
        ...

    def close(self) -> None:
        """End the session; idempotent."""
        ...


class Backend(Protocol):
    """One engine: what it can do, and sessions on it."""

    @property
    def spec(self) -> BackendSpec:
        """Which engine and model."""
        ...

    def capabilities_for_spec(self, spec: BackendSpec) -> BackendCapabilities:
        """What a backend of this spec can do; boots nothing."""
        ...

    def negotiated_capabilities(self) -> BackendCapabilities:
        """What this very model can do: sites that do not hold for it are among `refused`."""
        ...

    def stage_artifacts(self, payloads: Mapping[str, bytes]) -> None:
        """Keep artifacts (id → the bytes of its file) where specs that name them find them."""
        ...

    def report_once(self, key: str) -> bool:
        """Whether this is the first report under `key` of this backend: what would repeat is said once."""
        ...

    def open_session(self) -> Session:
        """One exclusive session."""
        ...

    def release(self) -> None:
        """Free the engine; idempotent, also after a failed boot."""
        ...
