"""The body of a completion, understood: prompts as ids, parameters, and what is captured and changed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from midstream.backends.serving import ServedRequest, ServingEngine
from midstream.backends.vllm.routes.wishes import Asked, OwnWishes, asked_of
from midstream.core.capture import CaptureSpec
from midstream.core.errors import PromptError
from midstream.core.generation import GenerationParams, choice_seed
from midstream.core.interventions import InterventionSpec
from midstream.core.prompts import PreparedPrompt, prepare
from midstream.core.sites import layouts_at, site_layers
from midstream.taps.step import in_reach

from .bodies import Body, ChatBody, CompletionBody
from .errors import ApiError
from .settings import Limits

ONE_CHOICE = "Set n to 1: activations and steering vectors are for one choice only."


@dataclass(frozen=True, eq=False)
class Served:
    """One model. name: its full reference, which answers carry. steering: what acts where a request says nothing."""

    name: str
    engine: ServingEngine
    aliases: tuple[str, ...] = ()
    steering: InterventionSpec | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return getattr(torch, self.engine.facts.dtype)


@dataclass(frozen=True, eq=False)
class Ask:
    """One completion that was asked for, and can be answered. requests: one per prompt and choice, in their order.

    row_bytes, rows: what a capture's rows take, and how many there may be.
    """

    served: Served
    body: Body
    requests: Sequence[ServedRequest]
    asked: Asked | None
    row_bytes: int = 0
    rows: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return isinstance(self.body, ChatBody)

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.body.n or 1

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(one.prompt.token_ids) for one in self.requests[:: self.n])

    @property
    def tokens_held(self) -> int:
        """What it may cost: its prompts, and all that its choices may say."""
        return self.prompt_tokens + sum(one.params.max_tokens for one in self.requests)

    @property
    def steers(self) -> bool:
        """Whether it asks for steering of its own."""
        return self.asked is not None and self.asked.steering is not None

    @property
    def captures(self) -> bool:
        """Whether activations are answered."""
        return self.asked is not None and self.asked.capture is not None


def understood(body: Body, served: Served, limits: Limits) -> Ask:
    """What a body asks of a model; SpecError, PromptError or ApiError for what cannot be. Tokenises: for a thread."""
    asked = _asked(body)
    count = 1 if not isinstance(body, CompletionBody) else len(body.prompt)
    if (sequences := count * (body.n or 1)) > limits.sequences:
        message = f"{count} prompts × n {body.n or 1} are {sequences} sequences; one request has at most "
        raise ApiError(400, f"{message}{limits.sequences}: send several", "n" if count == 1 else "prompt")
    if asked is not None and (asked.capture is not None or asked.steering is not None):
        _check_one_choice(body, count)
    prompts = _prompts(body, served)
    steering = served.steering if _says_nothing(body, asked) else None if asked is None else asked.steering
    capture, prompt_len = (None, None) if asked is None else (asked.capture, asked.own.prompt_len)
    params = _params(body)
    requests: list[ServedRequest] = []
    for place, prompt in enumerate(prompts):
        room = _room(served, prompt, body, place)
        for choice in range(body.n or 1):
            seed = None if body.seed is None else choice_seed(body.seed, choice)
            own = params.model_copy(update={"max_tokens": room, "seed": seed})
            requests.append(ServedRequest(prompt, own, capture, steering, prompt_len))
    row_bytes, rows = _check_capture(requests[0], served, asked, limits)
    for one in requests[:: body.n or 1]:
        served.engine.check(one)
    return Ask(served, body, requests, asked, row_bytes, rows)


def _asked(body: Body) -> Asked | None:
    fields = {name: getattr(body, name) for name in type(body).model_fields}
    return asked_of(fields, body.vllm_xargs or {})


def _says_nothing(body: Body, asked: Asked | None) -> bool:
    """Whether a body says nothing of steering, not even `false`: then the server's default acts."""
    off = body.steering is False or (body.vllm_xargs or {}).get("steering") in (False, "false")
    own = asked is not None and asked.own != OwnWishes()  # our client says what it wants
    return not off and not own and (asked is None or asked.steering is None)


def _prompts(body: Body, served: Served) -> list[PreparedPrompt]:
    if isinstance(body, ChatBody):
        param, forms = "messages", [{"messages": [message.plain() for message in body.messages]}]
        special = True
    else:
        assert isinstance(body, CompletionBody)
        param, special = "prompt", body.add_special_tokens
        forms = [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in body.prompt]
    tokenizer = served.engine.tokenizer
    try:
        return [
            prepare({**form, "cache_salt": body.cache_salt}, tokenizer, index=place, add_special_tokens=special)
            for place, form in enumerate(forms)
        ]
    except PromptError as error:
        raise ApiError(400, str(error), param) from error


def _check_one_choice(body: Body, prompts: int) -> None:
    if (body.n or 1) != 1:
        raise ApiError(400, ONE_CHOICE, "n")
    if prompts != 1:
        raise ApiError(400, ONE_CHOICE, "prompt")


def _params(body: Body) -> GenerationParams:
    """The parameters that all choices share; as OpenAI has it, a request that names no temperature samples at 1."""
    logprobs: int | None
    if isinstance(body, ChatBody):
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        assert isinstance(body, CompletionBody)
        logprobs = body.logprobs
    prompt_logprobs: int | None = getattr(body, "prompt_logprobs", None)
    if getattr(body, "echo", False) and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    return GenerationParams.of(
        {
            "max_tokens": 1 << 30,  # each prompt has its own room
            "min_tokens": body.min_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": None if body.top_p == 1 else body.top_p,
            "top_k": None if body.top_k in (0, -1) else body.top_k,
            "repetition_penalty": body.repetition_penalty,
            "stop": tuple(body.stop),
            "stop_token_ids": tuple(body.stop_token_ids or ()),
            "ignore_eos": body.ignore_eos,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "constraint": _constraint(body),
        },
        "",
    )


def _constraint(body: Body) -> dict[str, Any] | None:
    """The one constraint that a body names, in either form."""
    found: list[dict[str, Any]] = []
    form = body.response_format
    if form is not None and form.type != "text":
        if form.type == "json_schema" and form.json_schema is None:
            raise ApiError(400, "response_format.json_schema is missing: give the schema", "response_format")
        found.append({"json_schema": {"type": "object"} if form.json_schema is None else form.json_schema.schema_})
    if (own := body.structured_outputs) is not None:
        names = {"json_schema": own.json_, "regex": own.regex, "choice": own.choice, "grammar": own.grammar}
        found += [{name: value} for name, value in names.items() if value is not None]
    if len(found) > 1:
        raise ApiError(400, f"{len(found)} constraints on one completion: give one", "structured_outputs")
    return found[0] if found else None


def _room(served: Served, prompt: PreparedPrompt, body: Body, place: int) -> int:
    """How many tokens may come after a prompt: as asked, or what is left of the context."""
    context, length = served.engine.facts.context_length, len(prompt.token_ids)
    name = "messages" if isinstance(body, ChatBody) else "prompt"
    asked = body.max_tokens or getattr(body, "max_completion_tokens", None)
    if context is None:
        return asked or 16
    if length >= context:
        message = f"prompt {place} has {length} tokens, and {served.name} has room for {context}: shorten it"
        raise ApiError(400, message, name)
    if asked is not None and length + asked > context:
        left = context - length
        message = f"max_tokens is {asked}; prompt {place} has {length} tokens of {context}: {left} are left"
        raise ApiError(400, message, "max_tokens")
    if body.min_tokens > (asked or context - length):
        raise ApiError(400, f"min_tokens is {body.min_tokens}, more than may come", "min_tokens")
    return asked or context - length


def _check_capture(request: ServedRequest, served: Served, asked: Asked | None, limits: Limits) -> tuple[int, int]:
    """What a row of the capture takes, in bytes, and how many there may be; ApiError past the cap."""
    capture = request.capture
    if asked is None or capture is None:
        return 0, 0
    engine = served.engine
    if asked.residual:
        _check_layers(capture, served)
    layouts = layouts_at(
        site_layers(capture.sites, capture.layers, engine.layouts, engine.capabilities.refused, "capture.sites"),
        engine.layouts,
    )
    width = sum(one.width for of in layouts.values() for one in of.values())
    ids, most = request.prompt.token_ids, request.params.max_tokens
    # the cap of a whole stream counts every token, as a client that knows no tokenizer can
    rows = len(ids) + most if asked.residual else in_reach(capture.select, ids, request.prompt_len or len(ids), most)
    if rows * width > limits.capture_cap:
        fits = limits.capture_cap // width
        what = f"{width:,} numbers of each of {rows:,} tokens"
        message = (
            f"the capture has up to {rows * width:,} numbers ({what}), and at most {limits.capture_cap:,} are taken"
        )
        fewer = f"{fits:,} tokens fit" if fits else "choose fewer layers"
        raise ApiError(400, f"{message}: {fewer}", "output_residual_stream" if asked.residual else "capture")
    kind = getattr(torch, capture.dtype) if capture.dtype else served.dtype
    return width * kind.itemsize, rows


def _check_layers(capture: CaptureSpec, served: Served) -> None:
    count = served.engine.facts.num_layers
    for layer in capture.layers or ():
        if not 0 <= layer < count:
            message = f"{served.name} has Layers 0 to {count - 1}: it has no Layer {layer}."
            raise ApiError(400, message, "output_residual_stream")


def model_named(models: Mapping[str, Served], name: str | None) -> Served:
    """The model that a request names, by reference or alias; ApiError: there is none, or several and none is named."""
    if name is None:
        if len({id(one) for one in models.values()}) == 1:
            return next(iter(models.values()))
        raise ApiError(400, f"name a model: {', '.join(sorted(models))}", "model")
    if name not in models:
        raise ApiError(404, f"no model {name!r:.120}; there are: {', '.join(sorted(models))}", "model")
    return models[name]
