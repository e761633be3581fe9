"""Tiny models built once, the oracle's account of them, and what docs/semantics.md calls equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import midstream as ms
from parity.architectures import ARCHITECTURES
from parity.oracle import expected

Ids = Sequence[int]

#: Architectures whose own float32 forward is further from float64 than the bound (linear attention's recurrence,
#: sharp attention). Their captures are held to captures of one prompt alone, and those to the oracle at a multiple of
#: the bound: a wrong tensor is off by thousands of times the bound.
ROUNDING = {"qwen3_next": 10.0, "gemma4_moe": 10.0}


def worst(got: Tensor, want: Tensor) -> float:
    """The largest error in units of docs/semantics.md's bound for float32: 1e-5 × max(1, the row's largest value)."""
    assert got.shape == want.shape, f"{tuple(got.shape)} where {tuple(want.shape)} was due"
    if not want.numel():
        return 0.0
    bound = 1e-5 * want.double().abs().amax(dim=-1, keepdim=True).clamp(min=1)
    error = ((got.double() - want.double()).abs() / bound).max().item()
    return float("inf") if error != error else error


@dataclass(frozen=True, eq=False)
class Tiny:
    """One tiny model, a LanguageModel on it, and the true rows of any ids."""

    name: str
    model: PreTrainedModel
    lm: ms.LanguageModel
    _known: dict[Any, dict[tuple[str, int], Tensor]] = field(default_factory=dict)

    def oracle(self, ids: Ids, inputs: Mapping[str, Any] | None = None) -> dict[tuple[str, int], Tensor]:
        """`(site, layer)` → `[tokens, width]` from the hand-written arithmetic."""
        key = (tuple(ids), tuple((name, value.numpy().tobytes()) for name, value in (inputs or {}).items()))
        if key not in self._known:
            self._known[key] = expected(self.name, self.model, list(ids), **(inputs or {}))
        return self._known[key]

    @property
    def sites(self) -> list[str]:
        """The sites that are offered."""
        return list(self.lm.capabilities.capture.sites)

    def assert_rows(self, cap: ms.CaptureResult, inputs: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Each captured row is the oracle's, and carries the label of the token that it consumed."""
        labels, errors = cap.labels, {}
        for sample, output in enumerate(cap.outputs):
            prompt = output.prompt_token_ids
            for choice, one in enumerate(output.choices or (output,)):
                ids = [*prompt, *one.token_ids[:-1]]
                mine = (labels.sample == sample) & ((labels.choice == choice) | ((labels.choice == -1) & (choice == 0)))
                where = labels.position[mine]
                assert labels.token_id[mine].tolist() == [ids[position] for position in where]
                assert labels.generated[mine].tolist() == [position >= len(prompt) for position in where]
                assert ((labels.choice[mine] == -1) == (where < len(prompt))).all()
                want = self.oracle(ids, (inputs or {}).get(sample))
                if self.name in ROUNDING and not inputs:
                    want = self._alone(ids, want)
                for (site, layer), rows in cap.tensors.items():
                    error = worst(rows[torch.from_numpy(mine)], want[site, layer][torch.from_numpy(where)])
                    errors[f"{site}.{layer} of sample {sample}, choice {choice}"] = error
        wrong = {what: f"{error:.3g}" for what, error in errors.items() if error > 1}
        assert not wrong, f"{self.name}: times the bound: {wrong}"

    def _alone(self, ids: Ids, want: dict[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
        """The rows of one prompt captured alone, once they are shown to be near the oracle's."""
        alone = dict(self.lm.capture([list(ids)], sites=self.sites).tensors)
        for key, rows in alone.items():
            assert worst(rows, want[key]) < ROUNDING[self.name], f"{key} is another tensor"
        return alone  # pyright: ignore[reportReturnType]


def every_row(outputs: Sequence[ms.Completion]) -> list[tuple[int, int, int, int, str]]:
    """The label table of a capture that selects all: prompt rows once, then each choice's."""
    table = []
    for sample, output in enumerate(outputs):
        prompt = output.prompt_token_ids
        table += [(sample, -1, position, token, "prompt") for position, token in enumerate(prompt)]
        for choice, one in enumerate(output.choices or (output,)):
            tail = enumerate(one.token_ids[:-1], start=len(prompt))
            table += [(sample, choice, position, token, "generation") for position, token in tail]
    return table


def table_of(labels: ms.Labels) -> list[tuple[int, int, int, int, str]]:
    """Labels as tuples, in their order."""
    columns = (labels.sample, labels.choice, labels.position, labels.token_id, labels.phase)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@contextmanager
def calls(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """The shape of what `module` is called with, call by call."""
    seen: list[tuple[int, ...]] = []

    def before(_: Any, args: Any, kwargs: Any) -> None:
        seen.append(tuple((args[0] if args else next(iter(kwargs.values()))).shape))

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def hook_count(model: nn.Module) -> int:
    """How many hooks of every kind hang on a model's modules."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def one_line(message: str, *parts: str) -> None:
    """`message` is one line that holds each of `parts`."""
    assert message.strip(), "an empty message"
    assert "\n" not in message, message
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """The helpers above: pytest imports tests by path, so they cannot import this file."""
    return SimpleNamespace(
        worst=worst, every_row=every_row, table_of=table_of, calls=calls, hook_count=hook_count, one_line=one_line
    )


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Tiny]:
    """Name → the architecture, made once for all tests: none may leave it changed."""
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            model = ARCHITECTURES[name]()
            made[name] = Tiny(name, model, ms.load(model))
        return made[name]

    return get


@pytest.fixture
def fresh() -> Callable[..., Tiny]:
    """Name → the architecture made anew, for tests that change it."""

    def get(name: str, tokenizer: Any = None) -> Tiny:
        model = ARCHITECTURES[name]()
        return Tiny(name, model, ms.load(model, tokenizer=tokenizer))

    return get


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny models' 160 ids: w003 … w159, BOS put first, a chat template that brings BOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    table = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{token:03}": token for token in range(3, 160)}}
    made = Tokenizer(models.WordLevel(table, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = "<s> {% for m in messages %}w100 {{ m['content'] }} w101 {% endfor %}"
    return tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Iterator[ms.LanguageModel]:
    """The small real model in its own bfloat16."""
    with ms.load("smollm2") as lm:
        yield lm


@pytest.fixture(scope="session")
def smollm2_float32() -> Iterator[ms.LanguageModel]:
    """The small real model in float32."""
    with ms.load("smollm2", dtype="float32") as lm:
        yield lm
