"""How to generate: GenerationParams, seeds, and what comes back for one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from .capture import CaptureReceipt
from .errors import MidstreamError, SpecError, spec_error
from .interventions import OpReceipt
from .wire import Int, Number, Wire

FinishReason = Literal["stop", "eos", "length"]
CONSTRAINT_KINDS: Final = ("json_schema", "regex", "grammar", "choice")


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class GenerationParams(Wire):
    """Every knob of generation; what is unset is neutral, never taken from the model's generation_config.

    Greedy unless temperature, top_p, top_k or seed is given. Raises E_BAD_PARAM for a value out of its range
    and for `greedy=True` with a temperature above zero.

    >>> GenerationParams(max_tokens=8).is_greedy, GenerationParams(max_tokens=8, top_p=0.9).is_greedy
    (True, False)
    """

    root: ClassVar[str] = "generation"

    max_tokens: Annotated[Int, Field(ge=1)] = 1
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    greedy: StrictBool | None = None
    n: Annotated[Int, Field(ge=1)] = 1
    seed: Annotated[Int, Field(ge=0)] | None = None
    seed_scope: Literal["item", "dispatch"] = "item"
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_texts)] = ()
    stop_token_ids: tuple[Annotated[Int, Field(ge=0)], ...] = ()
    ignore_eos: StrictBool = False
    logprobs: Annotated[Int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0)] | None = None
    constraint: dict[str, Any] | None = None
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.greedy and self.temperature:
            raise SpecError("E_BAD_PARAM", "temperature", f"greedy with temperature {self.temperature}: drop one")
        if self.min_tokens > self.max_tokens:
            message = f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}"
            raise SpecError("E_BAD_PARAM", "min_tokens", message)
        if self.constraint is not None and (
            len(self.constraint) != 1 or next(iter(self.constraint)) not in CONSTRAINT_KINDS
        ):
            message = f"is one of {', '.join(CONSTRAINT_KINDS)}, got {sorted(self.constraint)}"
            raise spec_error("E_CONSTRAINT", "constraint", message)
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at each step."""
        if self.greedy is not None:
            return self.greedy
        if self.temperature is not None:
            return self.temperature == 0
        return self.top_p is None and self.top_k is None and self.seed is None


def eos_ids(*holders: Any) -> frozenset[int]:
    """Every EOS id of the first of some configs that names one.

    >>> from types import SimpleNamespace
    >>> sorted(eos_ids(None, SimpleNamespace(eos_token_id=[2, 5]), SimpleNamespace(eos_token_id=9)))
    [2, 5]
    """
    for holder in holders:
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def derive_seed(seed: int | None, call: int, index: int, choice: int = 0) -> int | None:
    """The seed of one item's choice; `call` counts a session's calls, `index` the items of the call.

    `int.from_bytes(sha256("{seed}:generate-{call}:{index}")[:8], "big") & (2**63 - 1)`, with `:{choice}`
    appended for choices after the first; unseeded stays None.

    >>> derive_seed(None, 0, 0) is None, derive_seed(7, 0, 0) == derive_seed(7, 0, 0, 1)
    (True, False)
    """
    if seed is None:
        return None
    text = f"{seed}:generate-{call}:{index}" + (f":{choice}" if choice else "")
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") & (2**63 - 1)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice of an item that has its own seed: the seed itself for the first.

    >>> choice_seed(7, 0), choice_seed(7, 1) == choice_seed(7, 2)
    (7, False)
    """
    if choice == 0:
        return seed
    return int.from_bytes(sha256(f"{seed}:{choice}".encode()).digest()[:8], "big") & (2**63 - 1)


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token, from the model's own logits, and of the likeliest ones in its place.

    top: (token id, log-probability) pairs, likeliest first, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """What one prompt gave: `token_ids` keeps every sampled token, EOS and stop tokens too.

    `text` ends before a stop string and shows no special tokens; it is None without a tokenizer. With n > 1
    the fields are the first choice's and `choices` holds all. `finish_reason` None: aborted, or no token was
    asked for (`lm.capture` with max_tokens=1 samples none). receipt: of the captured rows. steering: what each op did,
    per layer, over all choices. logprobs: one per sampled token; prompt_logprobs: one per prompt token, the first None.
    error: why there is nothing else, for a request that failed. engine_output: what the engine itself said (vLLM: its
    RequestOutput), None in process.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: FinishReason | None = None
    receipt: CaptureReceipt | None = None
    choices: tuple[Completion, ...] = field(default=(), repr=False)
    steering: tuple[OpReceipt, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = field(default=None, repr=False)
    error: MidstreamError | None = None
    engine_output: Any = field(default=None, repr=False, compare=False)
