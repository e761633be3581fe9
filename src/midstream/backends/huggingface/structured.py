"""Structured output: which tokens a JSON Schema, a regex, a grammar or a list of choices lets come next.

xgrammar compiles and matches. What it would read otherwise than it is written (it prints a warning, or nothing, and
goes on without) is refused here instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from midstream.core.errors import choices, spec_error
from midstream.core.generation import CONSTRAINT_KINDS

PATH: Final = "generation.constraint"
CACHE_BYTES: Final = 256 << 20  # of the compiled grammars that one Constrainer keeps
_PROBE: Final = 'A word, {"key": [1, true]}'


@dataclass(frozen=True)
class Compiled:
    """A constraint of one kind, compiled for one Constrainer's vocabulary."""

    kind: str
    grammar: Any


class Constrainer:
    """Compiles constraints for one tokenizer (None: refuses all), logits `[vocab_size]` and the ids of `eos`.

    Ids that show no text (padding beyond the tokenizer, special tokens) are never allowed. xgrammar is imported, and
    the vocabulary read, by the first `compile`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = sorted(token for token in eos if token < vocab_size)  # a config may name ids that are no more
        self._text = torch.zeros(vocab_size, dtype=torch.bool)
        self._compiler: Any = None

    def compile(self, constraint: Mapping[str, Any]) -> Compiled:
        """The one entry of `constraint`, compiled, or found if it was before.

        - json_schema: a JSON Schema as a dict, a bool or JSON text. The text is compact, with `,` and `:` and no
          other space, properties come in the schema's order, and an object that lists its properties has no others
          unless it says additionalProperties. `true` and `{}` are any JSON value, `{"type": "object"}` any object.
        - regex: matches the whole text as `re.fullmatch` would, but \\d and \\w are ASCII and \\s is JavaScript's.
        - grammar: GBNF, from the rule `root`.
        - choice: a list of distinct texts, one of which comes.

        Raises E_CONSTRAINT for what is invalid, what would not be enforced and what no text satisfies.
        """
        if len(constraint) != 1 or not constraint.keys() <= {*CONSTRAINT_KINDS}:
            raise spec_error("E_CONSTRAINT", PATH, f"is one of {choices(CONSTRAINT_KINDS)}, got {list(constraint)}")
        ((kind, value),) = constraint.items()
        path = f"{PATH}.{kind}"
        compiler = self._compiler or self._build(path)
        try:
            if kind == "json_schema":
                schema = enforced_schema(value)
                grammar = compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
            elif kind == "regex":
                grammar = compiler.compile_regex(checked_regex(_text(value, "pattern")))
            elif kind == "grammar":
                grammar = compiler.compile_grammar(_text(value, "GBNF grammar"))
            else:
                grammar = compiler.compile_grammar(_choice_grammar(value))
        except (ValueError, RuntimeError) as error:  # ours, and xgrammar's
            raise spec_error("E_CONSTRAINT", path, _reason(error)) from None
        compiled = Compiled(kind, grammar)
        self.matcher(compiled).check()
        return compiled

    def matcher(self, compiled: Compiled) -> Matcher:
        """A matcher at the beginning of a text; each sequence has its own."""
        return Matcher(compiled, self._text, self._eos)

    def _build(self, path: str) -> Any:
        tokenizer, width = self._tokenizer, len(self._text)
        if tokenizer is None:
            raise spec_error("E_CONSTRAINT", path, "needs a tokenizer, and this model was loaded without one")
        try:
            import xgrammar
        except ImportError as error:
            message = f"needs xgrammar ({_reason(error)}); type: pip install 'midstream[structured]'"
            raise spec_error("E_CONSTRAINT", PATH, message) from None
        if not self._eos:
            message = f"needs an EOS id below {width} to end the text, and the model's generation_config has none"
            raise spec_error("E_CONSTRAINT", PATH, message)
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=width, stop_token_ids=self._eos)
        except ValueError as error:
            message = f"xgrammar cannot read the vocabulary of a {type(tokenizer).__name__}: {_reason(error)}"
            raise spec_error("E_CONSTRAINT", PATH, message) from None
        pieces = info.decoded_vocab
        # xgrammar takes <|im_start|> for those twelve characters; decoding leaves it out
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        special |= {*tokenizer.all_special_ids, *self._eos}
        text = torch.tensor([bool(piece) and token not in special for token, piece in enumerate(pieces)])
        ids = [token for token in tokenizer.encode(_PROBE, add_special_tokens=False) if token < width]
        joined = b"".join(bytes(pieces[token]) for token in ids if text[token])
        if joined.strip() != tokenizer.decode(ids, skip_special_tokens=True).strip().encode():
            message = f"xgrammar misreads this tokenizer's vocabulary: it spells {_PROBE!r} as {joined!r}"
            raise spec_error("E_CONSTRAINT", PATH, message)
        self._text, threads = text, torch.get_num_threads()
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=CACHE_BYTES)
        return self._compiler


class Matcher:
    """Where one sequence is in its constraint.

    Before each token: `check` with the ids that the caller forbids besides, then `mask`; after it: `accept`.
    """

    def __init__(self, compiled: Compiled, text: Tensor, eos: list[int]) -> None:
        import xgrammar

        self._kind, self._text, self._eos = compiled.kind, text, eos
        self._matcher = xgrammar.GrammarMatcher(compiled.grammar)
        self._words = xgrammar.allocate_token_bitmask(1, len(text))
        self._allowed: Tensor | None = None
        self._accepted = 0

    @property
    def allowed(self) -> Tensor:
        """What may come next, bool `[vocab]` on the CPU; every EOS id where the text may end, and only there."""
        if self._allowed is None:
            if self._matcher.is_terminated():
                self._allowed = torch.zeros_like(self._text)
            else:
                self._matcher.fill_next_token_bitmask(self._words)
                octets = self._words.numpy().view(np.uint8)[0]
                bits = torch.from_numpy(np.unpackbits(octets, count=len(self._text), bitorder="little"))
                self._allowed = bits.bool() & self._text
                self._allowed[self._eos] = self._matcher.is_completed()
        return self._allowed

    @property
    def done(self) -> bool:
        """Whether the text is whole and nothing but EOS may follow, or EOS has come."""
        return self._matcher.is_completed() and not self.remaining(self._eos)

    def remaining(self, forbidden: Iterable[int] = ()) -> int:
        """How many ids may come next, once those in `forbidden` may not."""
        allowed = self.allowed
        taken = [token for token in set(forbidden) if token < len(allowed)]
        return int(allowed.sum()) - int(allowed[taken].sum())

    def check(self, forbidden: Collection[int] = ()) -> None:
        """Raise E_CONSTRAINT when no id may come next, once those in `forbidden` may not."""
        if self.remaining(forbidden):
            return
        if self.remaining():
            message = f"only ids that are forbidden may follow the {self._accepted} tokens so far: lower min_tokens"
        elif self._accepted:
            message = f"no token that this tokenizer has may follow the {self._accepted} so far: loosen the constraint"
        else:
            message = "no text that this tokenizer can spell satisfies it"
        raise spec_error("E_CONSTRAINT", f"{PATH}.{self._kind}", message)

    def mask(self, scores: Tensor) -> Tensor:
        """A float32 copy of `scores` `[vocab]` (any float dtype, any device) with −inf where a token may not come."""
        return scores.float().masked_fill(~self.allowed.to(scores.device), -torch.inf)

    def accept(self, token_id: int) -> None:
        """Go on after `token_id`; raises E_CONSTRAINT for one that may not come next."""
        if not self.allowed[token_id] or not self._matcher.accept_token(token_id):
            message = f"token {token_id} may not follow the {self._accepted} so far: sample from masked scores"
            raise spec_error("E_CONSTRAINT", f"{PATH}.{self._kind}", message)
        self._accepted += 1
        self._allowed = None


def _reason(error: Exception) -> str:
    """An error in one line, without the time and the source line that xgrammar puts first."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[\d:]+\] \S+: (Check failed: .*? is false: )?", "", text)[:200]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a {what} as text that is not empty, got {value!r:.60}")
    value.encode()  # half a surrogate pair is no text
    return value


def _choice_grammar(value: Any) -> str:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a list of texts that is not empty, got {value!r:.60}")
    texts = [_text(text, "choice") for text in value]
    if twice := [text for index, text in enumerate(texts) if text in texts[:index]]:
        raise ValueError(f"has {twice[0]!r:.60} twice: list each text once")
    return "root ::= " + " | ".join('"' + "".join(f"\\U{ord(char):08X}" for char in text) + '"' for text in texts)


_ATOM: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|U[0-9a-fA-F]{8}|c[A-Za-z]|.)|.", re.DOTALL
)
_ESCAPES: Final = frozenset("dDwWsSnrtfvbae0xuUc")


def checked_regex(pattern: str, *, in_json: bool = False) -> str:
    """`pattern` as xgrammar reads it alike; raises ValueError, or xgrammar's own error, for what it would not.

    in_json: for the inside of a JSON string, which must not name what JSON escapes, except to exclude it.
    """
    import xgrammar

    xgrammar.Grammar.from_regex(pattern)  # all of the syntax; the schema compiler passes over lookaheads and flags
    out: list[str] = []
    within: str | None = None  # "[" or "[^" in a character class
    plain = False  # whether that class names anything that JSON does not escape
    for found in _ATOM.finditer(pattern):
        atom, last = found[0], found.end() == len(pattern)
        if atom[0] == "\\" and atom[1].isascii() and atom[1].isalnum() and atom[1] not in _ESCAPES:
            raise ValueError(f"regex has {atom!r} at {found.start()}, which is not supported: only \\d \\w \\s are")
        escaped = in_json and _json_escapes(atom)
        if within is None:
            if (atom == "^" and found.start() > 0) or (atom == "$" and not last):
                raise ValueError(f"regex has {atom!r} at {found.start()}: leave it out, the whole text must match")
            if escaped:
                raise ValueError(f"regex names {atom!r}, which a JSON string escapes: leave it out")
            if atom == "[":
                within, plain = "[^" if pattern[found.end() : found.end() + 1] == "^" else "[", False
            atom = "[^\\n]" if atom == "." and not in_json else atom  # xgrammar's dot is any character
        elif atom == "]":
            if out[-1] == "^" and out[-2] == "[":
                raise ValueError("regex has '[^]', which dialects read differently: write \\] for a bracket")
            if in_json and within == "[" and not plain:
                raise ValueError("regex has a class of nothing but what a JSON string escapes: leave it out")
            within = None
        elif not escaped and atom != "-":
            plain = True
        out.append(atom)
    return "".join(out)


def _json_escapes(atom: str) -> bool:
    """Whether a regex's atom is one character that is escaped in a JSON string."""
    if atom[0] != "\\":
        return atom == '"' or atom < " "
    digits = atom[2:].strip("{}")
    return int(digits, 16) in {*range(32), 34, 92} if atom[1] in "xuU" and digits else atom[1] in '"\\nrtfbvae0c'


_NUMBERS: Final = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_STRINGS: Final = {"minLength", "maxLength", "pattern", "format"}
_IMPLIES: Final = {  # the type that xgrammar takes these for, where a schema names none
    "object": {"properties", "additionalProperties", "unevaluatedProperties"},
    "array": {"items", "prefixItems", "unevaluatedItems"},
}
_SIZES: Final = {"required", "minProperties", "maxProperties", "minItems", "maxItems"}
_OF_A_TYPE: Final = _NUMBERS.union(_STRINGS, _SIZES, *_IMPLIES.values(), ("patternProperties", "propertyNames"))
_WHOLE: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # the first of these hides all that is beside it
_NEVER: Final = {
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_FORMATS: Final = {
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip
_SHAPES: Final[dict[str, Any]] = {
    **dict.fromkeys(("properties", "patternProperties"), dict),
    **dict.fromkeys(("required", "enum", "anyOf", "oneOf", "allOf", "prefixItems"), list),
    **dict.fromkeys(("$ref", "pattern", "format"), str),
    "minProperties": int,
    "type": (str, list),
}


def enforced_schema(value: Any) -> str:
    """`value`, a JSON Schema, as JSON text; raises ValueError for what xgrammar would not enforce, with its place."""
    try:
        root = json.loads(value if isinstance(value, str) else json.dumps(value, allow_nan=False))
    except (ValueError, TypeError) as error:
        raise ValueError(f"is not JSON: {_reason(error)}") from None
    if not isinstance(root, dict | bool):
        raise ValueError(f"must be a JSON Schema (a dict, a bool or JSON text), got {value!r:.60}")
    _Schema(root).check(root, "$")
    return json.dumps(root)


@dataclass
class _Schema:
    """Walks through the schema `root` and all that it refers to, each $ref once."""

    root: Any
    seen: set[str] = field(default_factory=set)

    def check(self, schema: Any, at: str) -> None:
        """Refuse what would not be enforced in `schema`, which is at `at`."""
        if not isinstance(schema, dict):
            return
        for word, shape in _SHAPES.items():
            if word in schema and (not isinstance(schema[word], shape) or (word in _WHOLE and not schema[word])):
                raise ValueError(f"{word} at {at} cannot be {schema[word]!r:.60}")
        _refuse({word for word in _NEVER & schema.keys() if schema[word] is not False}, at)
        whole = next((word for word in _WHOLE if word in schema), None)
        types = schema.get("type", next((kind for kind, words in _IMPLIES.items() if words & schema.keys()), None))
        if whole is not None:
            self._whole(schema, whole, at)
        elif not types:
            _refuse({*_OF_A_TYPE, "type"} & schema.keys(), at, " without a type")
        else:
            self._typed(schema, types, at)

    def _whole(self, schema: dict[str, Any], whole: str, at: str) -> None:
        beside = schema.keys() & {*_OF_A_TYPE, *_WHOLE, "type"} - {whole}
        if "type" in beside and whole in ("const", "enum"):
            values = [schema["const"]] if whole == "const" else schema["enum"]
            beside -= {"type"} if all(_is_of(value, schema["type"]) for value in values) else set()
        _refuse(beside, at, f" beside {whole}")
        if whole == "$ref" and schema["$ref"] not in self.seen:
            self.seen.add(schema["$ref"])
            self.check(self._named(schema["$ref"]), schema["$ref"])
        if whole == "oneOf" and "discriminator" in schema:
            schema["anyOf"] = schema.pop(whole)  # the parts exclude each other: the same, and xgrammar says nothing
            whole = "anyOf"
        if whole == "oneOf" or (whole == "allOf" and len(schema["allOf"]) > 1):
            _refuse({whole}, at, " (write anyOf for oneOf, unless it has a discriminator; merge what allOf has)")
        for index, part in enumerate(schema[whole] if whole in ("anyOf", "allOf") else ()):
            self.check(part, f"{at}.{whole}[{index}]")

    def _named(self, ref: str) -> Any:
        start, *parts = ref.split("/")
        schema = self.root if start == "#" else None
        for part in parts:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
        if schema is None:
            raise ValueError(f"$ref {ref!r:.60} names no schema here: use '#/$defs/NAME'")
        return schema

    def _typed(self, schema: dict[str, Any], types: Any, at: str) -> None:
        if "string" in types:
            first = next((word for word in ("pattern", "format") if word in schema), "pattern")
            _refuse(_STRINGS & schema.keys() - {first} if first in schema else (), at, f" beside {first}")
            if schema.get("format", "date") not in _FORMATS:
                _refuse({"format"}, at, f" {schema['format']!r:.60}")
            if "pattern" in schema:
                _check_pattern(schema["pattern"], at)
        if "multipleOf" in schema and ("number" in types or "integer" in types):
            alone = "number" not in types and _NUMBERS & schema.keys() == {"multipleOf"}
            if not alone or schema["multipleOf"] not in range(1, 1025):
                _refuse({"multipleOf"}, at, " (but for an integer up to 1024 without bounds)")
        if "object" in types:
            self._object(schema, at)
        if "array" in types:
            for index, item in enumerate(schema.get("prefixItems", ())):
                self.check(item, f"{at}.prefixItems[{index}]")
            for word in ("items", "unevaluatedItems"):
                self.check(schema.get(word), f"{at}.{word}")

    def _object(self, schema: dict[str, Any], at: str) -> None:
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        more = [schema.get(word, False) for word in ("additionalProperties", "unevaluatedProperties")]
        if missing := [name for name in schema.get("required", ()) if str(name) not in properties]:
            raise ValueError(f"required at {at} names {missing[0]!r:.60}, which is not in its properties: add it there")
        if patterns and (properties or more != [False, False] or len(patterns) > 1):
            _refuse({"patternProperties"}, at, " beside other properties")
        if properties or patterns:
            _refuse({"propertyNames"} & schema.keys(), at, " beside other properties")
        if schema.get("minProperties", 0) > 1 and (not properties or more != [False, False]):
            _refuse({"minProperties"}, at, " where a name may come twice")
        for pattern in patterns:
            _check_pattern(pattern, at)
        for name, part in (*properties.items(), *patterns.items(), *(("*", part) for part in more)):
            self.check(part, f"{at}.{name}")
        names = schema.get("propertyNames")
        names = self._named(str(names["$ref"])) if isinstance(names, dict) and "$ref" in names else names
        if isinstance(names, dict):
            self.check({"type": "string", **names}, f"{at}.propertyNames")


def _refuse(words: Iterable[str], at: str, where: str = "") -> None:
    if words := sorted(words):
        raise ValueError(f"{', '.join(words)} at {at} would not be enforced{where}: leave it out")


def _check_pattern(pattern: str, at: str) -> None:
    try:
        checked_regex(pattern, in_json=True)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"pattern at {at}: {_reason(error)}") from None


def _is_of(value: Any, types: Any) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number" in types or ("integer" in types and value % 1 == 0)
    return {str: "string", list: "array", dict: "object", bool: "boolean"}.get(type(value), "null") in types
