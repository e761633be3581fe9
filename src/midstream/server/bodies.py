"""The bodies of completions, as OpenAI and vLLM name their fields; what would change an answer unheard is refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StrictBool, model_validator

from midstream.core.errors import spec_error
from midstream.core.narrow import is_int, is_list
from midstream.core.wire import Int, Number, Wire


def _encodable(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no text") from None
    return value


Text = Annotated[str, AfterValidator(_encodable)]
"""A text that UTF-8 can hold."""


def check_name(value: str, param: str) -> str:
    """A name that a database can hold, of at most 255 characters; E_BAD_PARAM for another."""
    try:
        _encodable(value)
    except ValueError as error:
        raise spec_error("E_BAD_PARAM", param, str(error)) from None
    if "\0" in value or len(value) > 255:
        raise spec_error("E_BAD_PARAM", param, "a name has at most 255 characters, and none of them is NUL")
    return value


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """Each prompt of a body: a text, or ids."""
    given = [value] if isinstance(value, str) or (is_list(value) and value and all(map(is_int, value))) else value
    if not is_list(given) or not given:
        raise spec_error("E_BAD_PARAM", "", f"is a text, token ids, or a list of them, got {value!r:.60}")
    for place, one in enumerate(given):
        if isinstance(one, str):
            try:
                _encodable(one)
            except ValueError as error:
                raise spec_error("E_BAD_PARAM", f"[{place}]", str(error)) from None
        elif not (is_list(one) and one and all(map(is_int, one))):
            raise spec_error("E_BAD_PARAM", f"[{place}]", f"is a text or token ids, got {one!r:.60}")
    return list(given)


_NEUTRAL: Final = {"presence_penalty": 0, "frequency_penalty": 0, "min_p": 0, "length_penalty": 1, "best_of": 1}
"""Fields that are taken only where they change nothing."""


class StreamOptions(Wire):
    """How a stream is sent."""

    root: ClassVar[str] = "stream_options"

    include_usage: StrictBool = False
    continuous_usage_stats: Literal[False] = False


class JsonSchema(Wire):
    """A schema that the answer obeys; `name`, `description` and `strict` are for people."""

    root: ClassVar[str] = "response_format.json_schema"

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Wire):
    """OpenAI's name of a constraint."""

    root: ClassVar[str] = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Wire):
    """vLLM's names of constraints, of which one is given."""

    root: ClassVar[str] = "structured_outputs"

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Body(Wire):
    """What both kinds of completion have. capture, steering, output_residual_stream and the rest: docs/server.md."""

    model: Text | None = None
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    n: Annotated[Int, Field(ge=1, le=128)] | None = None
    seed: Annotated[Int, Field(ge=0)] | None = None
    stop: Annotated[
        list[Annotated[Text, Field(min_length=1)]],
        BeforeValidator(_listed, json_schema_input_type=str | list[str] | None),
    ] = Field(default_factory=list[str])
    stop_token_ids: list[Annotated[Int, Field(ge=0)]] | None = None
    ignore_eos: StrictBool = False
    skip_special_tokens: Literal[True] = True
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    cache_salt: Text | None = None
    vllm_xargs: dict[str, Any] | None = None
    capture: dict[str, Any] | None = None
    steering: Any = None
    output_residual_stream: Any = None
    output_qk: Any = None
    apply_steering_vectors: Any = None
    apply_hooks: Any = None
    activations_transport: Any = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    min_p: Number | None = None
    length_penalty: Number | None = None
    best_of: Int | None = None

    @model_validator(mode="after")
    def _neutral(self) -> Body:
        for name, value in _NEUTRAL.items():
            if getattr(self, name) not in (None, value):
                message = f"is not applied here: leave it out, or give {value}"
                raise spec_error("E_UNKNOWN_KIND", name, message)
        return self


class CompletionBody(Body):
    """`POST /v1/completions`."""

    root: ClassVar[str] = ""

    prompt: Annotated[
        list[Any],
        PlainValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    ]
    logprobs: Annotated[Int, Field(ge=0, le=64)] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=64)] | None = None
    echo: StrictBool = False
    suffix: None = None
    add_special_tokens: StrictBool = True


class TextPart(Wire):
    """A part of a message; only texts are taken."""

    root: ClassVar[str] = "content"

    type: Literal["text"]
    text: Text


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Wire):
    """One message. Other fields than these two are for tools, which there are none of."""

    root: ClassVar[str] = "messages"

    role: Text
    content: Annotated[list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """As a chat template reads it."""
        text = "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    root: ClassVar[str] = ""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=64)] | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=64)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise spec_error("E_BAD_PARAM", "max_completion_tokens", "is max_tokens under another name: give one")
        if self.top_logprobs and not self.logprobs:
            raise spec_error("E_BAD_PARAM", "top_logprobs", "goes with logprobs: give that too")
        return self
