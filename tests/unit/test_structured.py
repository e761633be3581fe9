"""Constraints: random walks through what they allow, where EOS is allowed, and everything that is refused."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from midstream.backends.bundled import smollm2_path
from midstream.backends.huggingface.structured import Constrainer, Matcher
from midstream.core.errors import SpecError, UnsupportedOperationError
from unit.tiny_checkpoint import byte_tokenizer

pytest.importorskip("xgrammar")

BYTES = byte_tokenizer()
EOS = 1
PADDED = 300  # the byte tokenizer has 258 ids
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


@pytest.fixture(scope="module")
def plain() -> Constrainer:
    return Constrainer(BYTES, PADDED, frozenset({EOS}))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path())


@pytest.fixture(scope="module")
def real(tokenizer: Any) -> Constrainer:
    return Constrainer(tokenizer, len(tokenizer) + 48, frozenset({0, 2}))


def spelled(text: str) -> list[int]:
    return BYTES.encode(text, add_special_tokens=False)


def after(constrainer: Constrainer, constraint: dict[str, Any], text: str = "") -> Matcher:
    matcher = constrainer.matcher(constrainer.compile(constraint))
    for token in spelled(text):
        matcher.accept(token)
    return matcher


def accepts(constrainer: Constrainer, constraint: dict[str, Any], text: str) -> bool:
    """Whether `text` may be sampled, and EOS after it."""
    matcher = constrainer.matcher(constrainer.compile(constraint))
    for token in spelled(text):
        if not matcher.allowed[token]:
            return False
        matcher.accept(token)
    return bool(matcher.allowed[EOS])


def walk(constrainer: Constrainer, tokenizer: Any, constraint: dict[str, Any], seed: int, limit: int = 300) -> str:
    """The text of random allowed tokens until EOS, as a session decodes it; the seeds make what closes likely."""
    generator = torch.Generator().manual_seed(seed)
    matcher = constrainer.matcher(constrainer.compile(constraint))
    width = len(matcher.allowed)
    bonus = torch.zeros(width)
    closing = ['"', '"}', "}", "]", '",', '":', ",", "]}", "}}"]
    bonus[[token for token in tokenizer.convert_tokens_to_ids(closing) if token < width]] = 11
    bonus[[0, 1, 2]] = 12  # EOS ids of both tokenizers, and a special token that must never come
    taken: list[int] = []
    for _ in range(limit):
        matcher.check()
        scores = torch.randn(width, generator=generator) + bonus
        masked = matcher.mask(scores)
        token = int(torch.multinomial(masked.softmax(-1), 1, generator=generator))
        assert not matcher.allowed[len(tokenizer) :].any()
        matcher.accept(token)
        taken.append(token)
        if token in (0, 1, 2):
            assert token in matcher._eos
            assert matcher.done
            return tokenizer.decode(taken, skip_special_tokens=True)
    raise AssertionError(f"no end in {limit} tokens: {tokenizer.decode(taken)!r}")


def is_compact(text: str) -> bool:
    return not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a b", "c", 'd"']}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags"],
}


def is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and list(value) in (["name", "age", "tags"], ["name", "age", "tags", "next"])
        and 1 <= len(value["name"]) <= 12
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 130
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a b", "c", 'd"'}
        and (value.get("next") is None or is_person(value["next"]))
    )


@pytest.mark.real_model
@pytest.mark.parametrize("seed", range(6))
def test_a_schema_on_a_real_vocabulary(real: Constrainer, tokenizer: Any, seed: int) -> None:
    text = walk(real, tokenizer, {"json_schema": PERSON}, seed)
    assert is_person(json.loads(text))
    assert is_compact(text)


@pytest.mark.real_model
@pytest.mark.parametrize("schema", [json.dumps({"type": "object"}), {"type": "object"}])
@pytest.mark.parametrize("seed", range(3))
def test_any_object(real: Constrainer, tokenizer: Any, schema: Any, seed: int) -> None:
    text = walk(real, tokenizer, {"json_schema": schema}, seed)
    assert isinstance(json.loads(text), dict)
    assert is_compact(text)


@pytest.mark.real_model
@pytest.mark.parametrize("schema", [True, {}, "true"])
def test_any_json(real: Constrainer, tokenizer: Any, schema: Any) -> None:
    found = [walk(real, tokenizer, {"json_schema": schema}, seed) for seed in range(4)]
    assert all(is_compact(text) for text in found)
    assert any(not isinstance(json.loads(text), dict) for text in found)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "pattern",
    [
        r"[A-Z][a-z]{2,8} \d{1,3}(\.\d+)?",
        r"(?:yes|no|é😀)",
        r"^.{3,9}$",
        r"a\.b\n[^x]\t?",
        r"(?<word>\w{1,9})-[\w.]{1,3}",
        r"[.^$]{2}",
    ],
)
def test_a_regex_on_a_real_vocabulary(real: Constrainer, tokenizer: Any, pattern: str) -> None:
    python = pattern.replace("(?<", "(?P<")
    for seed in range(4):
        text = walk(real, tokenizer, {"regex": pattern}, seed)
        assert re.fullmatch(python, text), text


@pytest.mark.real_model
def test_choices_on_a_real_vocabulary(real: Constrainer, tokenizer: Any) -> None:
    texts = ["yes", "yes, but", 'a"\\b', "two\nlines", " é😀", "<|im_end|>", "[a-z]*"]
    found = {walk(real, tokenizer, {"choice": texts}, seed) for seed in range(60)}
    assert found == set(texts)


@pytest.mark.real_model
def test_a_grammar_on_a_real_vocabulary(real: Constrainer, tokenizer: Any) -> None:
    grammar = 'root ::= term (" + " term){0,2}\nterm ::= [1-9] [0-9]? | "(" root ")"'
    for seed in range(5):
        text = walk(real, tokenizer, {"grammar": grammar}, seed)
        assert re.fullmatch(r"[0-9+() ]+", text)
        assert isinstance(eval(text), int)


@pytest.mark.real_model
def test_special_tokens_and_padding_never_come(real: Constrainer, tokenizer: Any) -> None:
    matcher = real.matcher(real.compile({"regex": "(.|\n)*"}))
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    assert len(special) == 17
    assert [token for token in special if matcher.allowed[token]] == [0, 2]
    assert matcher.allowed.sum() > 48_000
    assert not matcher.allowed[len(tokenizer) :].any()


@pytest.mark.real_model
def test_logits_narrower_than_the_tokenizer(tokenizer: Any) -> None:
    narrow = Constrainer(tokenizer, 1000, frozenset({2, 49_151}))
    text = walk(narrow, tokenizer, {"json_schema": PERSON}, 0)
    assert is_person(json.loads(text))


def test_eos_is_allowed_exactly_where_the_text_may_end() -> None:
    both = Constrainer(BYTES, PADDED, frozenset({EOS, 299, 5000}))
    matcher = after(both, {"regex": "ab?"})
    a, b = spelled("ab")
    assert matcher.allowed.nonzero().flatten().tolist() == [a]
    assert not matcher.done
    matcher.accept(a)
    assert matcher.allowed.nonzero().flatten().tolist() == sorted([EOS, b, 299])
    assert not matcher.done
    matcher.accept(b)
    assert matcher.allowed.nonzero().flatten().tolist() == [EOS, 299]
    assert matcher.done
    matcher.accept(299)
    assert matcher.done
    assert matcher.remaining() == 0


def test_nothing_may_follow_eos(plain: Constrainer) -> None:
    matcher = after(plain, {"regex": "a*"}, "aa")
    matcher.accept(EOS)
    assert matcher.done
    assert matcher.remaining() == 0
    with pytest.raises(UnsupportedOperationError, match="may not follow the 3 so far"):
        matcher.accept(*spelled("a"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mask_changes_nothing_else(plain: Constrainer, dtype: torch.dtype) -> None:
    matcher = after(plain, {"regex": "[a-e]+"}, "a")
    scores = torch.randn(PADDED, generator=torch.Generator().manual_seed(0)).to(dtype)
    b, c = spelled("bc")
    scores[b], scores[c] = -0.0, torch.inf
    before = scores.clone()
    masked = matcher.mask(scores)
    assert masked.dtype == torch.float32
    assert masked.shape == (PADDED,)
    assert torch.equal(scores.view(torch.uint8), before.view(torch.uint8))
    kept = torch.zeros(PADDED, dtype=torch.bool)
    kept[[EOS, *spelled("abcde")]] = True
    assert torch.equal(masked[kept].view(torch.int32), scores[kept].float().view(torch.int32))
    assert (masked[~kept] == -torch.inf).all()


def test_what_is_left_when_the_caller_forbids_ids(plain: Constrainer) -> None:
    matcher = after(plain, {"choice": ["no", "not"]}, "no")
    (t,) = spelled("t")
    assert matcher.remaining() == 2
    assert matcher.remaining([EOS]) == 1
    assert matcher.remaining([EOS, t, t, 9999]) == 0
    matcher.check([EOS])
    matcher.accept(t)
    matcher.check()
    with pytest.raises(UnsupportedOperationError) as caught:
        matcher.check([EOS])
    assert str(caught.value) == (
        "E_CONSTRAINT at generation.constraint.choice: "
        "only ids that are forbidden may follow the 3 tokens so far: lower min_tokens"
    )


def test_a_dead_end_is_said() -> None:
    holes = Constrainer(BYTES, PADDED, frozenset({EOS}))
    matcher = after(holes, {"regex": "az"})
    matcher._text = matcher._text.clone()
    matcher._text[spelled("z")] = False
    matcher.accept(*spelled("a"))
    assert not matcher.done
    with pytest.raises(UnsupportedOperationError, match="no token that this tokenizer has may follow the 1 so far"):
        matcher.check()


def test_a_token_that_may_not_come_changes_nothing(plain: Constrainer) -> None:
    matcher = after(plain, {"regex": "ab"}, "a")
    for token in (*spelled("x"), 0, EOS, 299):
        with pytest.raises(UnsupportedOperationError, match=f"token {token} may not follow the 1 so far"):
            matcher.accept(token)
    matcher.accept(*spelled("b"))
    assert matcher.done


def test_matchers_share_nothing(plain: Constrainer) -> None:
    compiled = plain.compile({"regex": "ab"})
    one, other = plain.matcher(compiled), plain.matcher(compiled)
    one.accept(*spelled("a"))
    assert other.allowed.nonzero().flatten().tolist() == spelled("a")


def test_the_vocabulary_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import xgrammar

    once = Constrainer(BYTES, PADDED, frozenset({EOS}))
    once.compile({"regex": "a"})
    size = once._compiler.get_cache_size_bytes()
    monkeypatch.delattr(xgrammar.TokenizerInfo, "from_huggingface")
    once.compile({"regex": "a"})
    assert once._compiler.get_cache_size_bytes() == size
    once.compile({"regex": "b"})
    assert once._compiler.get_cache_size_bytes() > size


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INTEGER, ["0", "-12"], ["1.5", "01", ""]),
        ({"type": "object"}, ["{}", '{"a":{"b":[1,2]}}'], ['{"a": 1}', "[]"]),
        ({"properties": {"a": INTEGER}}, ["{}", '{"a":1}'], ['{"b":1}', '{"a":"x"}', "3"]),
        ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING}, ['{"b":"x"}'], ['{"b":1}']),
        (
            {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["a"]},
            ['{"b":1,"a":[2]}'],
            ['{"a":1,"b":2}'],
        ),
        ({"type": "object", "patternProperties": {"^x+$": INTEGER}}, ['{"xx":1}'], ['{"y":1}', '{"x":"s"}']),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1}'], ['{"c":1}']),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"type": "array", "prefixItems": [INTEGER, STRING]}, ['[1,"a"]', "[1]"], ['["a"]', '[1,"a",2]']),
        ({"items": INTEGER, "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"], ["[]", "[1,2,3]", "[1, 2]"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"éa"', '"abc"'], ['"a"', '"abcd"', '"a\n"']),
        ({"type": "string", "pattern": r'^[^"\\\x00-\x1f]+\d$'}, ['"a1"'], ['"a"', '"\n1"', '""1"']),
        ({"type": "string", "pattern": r'.["a]'}, ['"ba"'], ['"b""', '""a"']),
        ({"type": "string", "format": "date"}, ['"2026-11-30"'], ['"2026-13-01"', '"x"']),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, ["3", "11"], ["2", "12", "111"]),
        ({"type": "number", "minimum": 0.5, "maximum": 1.5}, ["0.5", "1.25"], ["0.4", "1.6"]),
        ({"type": "integer", "multipleOf": 5}, ["10", "-5", "0"], ["7"]),
        ({"type": ["integer", "null"], "minimum": 3}, ["3", "null"], ["1", '"a"']),
        ({"type": "integer", "minLength": 3}, ["1"], ['"abc"']),
        ({"type": "string", "enum": ["a", "b"]}, ['"a"'], ['"c"']),
        ({"enum": [{"a": [1, 0.1]}, None, "é/", 10**18]}, ['{"a":[1,0.1]}', "null", '"é/"', str(10**18)], ["1"]),
        ({"const": 'a"\n'}, ['"a\\"\\n"'], ['"a"']),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": INTEGER}}, ["1"], ['"a"']),
        ({"anyOf": [INTEGER, {"type": "null"}], "title": "T", "default": None}, ["1", "null"], ['"a"']),
        ({"oneOf": [INTEGER, STRING], "discriminator": {"propertyName": "k"}}, ["1", '"a"'], ["null"]),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "uniqueItems": False}, ['{"n":{"n":{}}}'], ['{"n":1}']),
        ({"type": "object", "properties": {'"\n': INTEGER, "": INTEGER}}, ['{"\\"\\n":1,"":2}'], ['{"":1,"a":2}']),
    ],
)
def test_what_a_schema_allows(
    plain: Constrainer, schema: Any, good: list[str], bad: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    constraint = {"json_schema": schema}
    assert [text for text in good if not accepts(plain, constraint, text)] == []
    assert [text for text in bad if accepts(plain, constraint, text)] == []
    assert capfd.readouterr().err == ""  # where xgrammar says what it leaves out


def test_the_schema_is_left_as_it_was(plain: Constrainer) -> None:
    schema = {"oneOf": [INTEGER, STRING], "discriminator": {"propertyName": "k"}}
    before = json.dumps(schema)
    plain.compile({"json_schema": schema})
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a|", ["a", ""], ["b"]),
        ("a.c", ["abc", "a\rc"], ["a\nc"]),
        (r"a\.c[.]", ["a.c."], ["abc."]),
        (r"\s\S", [" a", "\nb", "\ufeffé"], ["ab", "  "]),
        (r"\d\w", ["1a"], ["1é", "१a"]),
        (r"[\]^\-a]+", ["]^-a"], ["b"]),
        (r"\x41\u0042\u{43}", ["ABC"], ["AB"]),
        ("^(a{2})*?$", ["", "aaaa"], ["a"]),
    ],
)
def test_what_a_regex_allows(
    plain: Constrainer, pattern: str, good: list[str], bad: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert [text for text in good if not accepts(plain, {"regex": pattern}, text)] == []
    assert [text for text in bad if accepts(plain, {"regex": pattern}, text)] == []
    assert capfd.readouterr().err == ""


def refusal(constrainer: Constrainer, constraint: dict[str, Any]) -> SpecError:
    with pytest.raises(UnsupportedOperationError) as caught:
        constrainer.compile(constraint)
    assert caught.value.code == "E_CONSTRAINT"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return caught.value


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (3, "must be a JSON Schema"),
        ([], "must be a JSON Schema"),
        (None, "must be a JSON Schema"),
        ("{", "is not JSON"),
        ("3", "must be a JSON Schema"),
        ({"const": float("nan")}, "is not JSON"),
        ({"const": object()}, "is not JSON"),
        ("[" * 100_000, "recursion"),
        (False, "cannot accept any value"),
        ({"type": "text"}, "Unsupported type"),
        ({"type": []}, "type at $ would not be enforced without a type"),
        ({"type": 3}, "type at $ cannot be 3"),
        ({"properties": []}, "properties at $ cannot be []"),
        ({"type": "object", "required": "a"}, "required at $ cannot be 'a'"),
        ({"type": "string", "pattern": 3}, "pattern at $ cannot be 3"),
        ({"enum": []}, "enum at $ cannot be []"),
        ({"anyOf": []}, "anyOf at $ cannot be []"),
        ({"const": "\ud800"}, "Failed to parse JSON"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum greater than maximum"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "greater than maxLength"),
        ({"type": "array", "items": [INTEGER]}, "items must be"),
        ({"$ref": "http://localhost/x"}, "'http://localhost/x' names no schema here: use '#/$defs/NAME'"),
        ({"$ref": "#x", "$defs": {"a": {"$anchor": "x"}}}, "'#x' names no schema"),
        ({"$ref": "#/$defs/a"}, "'#/$defs/a' names no schema"),
        ({"$ref": "#"}, "Circular $ref"),
    ],
)
def test_schemas_that_are_invalid(plain: Constrainer, schema: Any, words: str) -> None:
    error = refusal(plain, {"json_schema": schema})
    assert error.path == "generation.constraint.json_schema"
    assert words in error.message
    assert "/project/" not in error.message


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": INTEGER}, "not at $"),
        ({"if": INTEGER, "then": {"minimum": 1}}, "if, then at $"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems at $"),
        ({"type": "array", "items": INTEGER, "contains": INTEGER}, "contains at $"),
        ({"$dynamicRef": "#x"}, "$dynamicRef at $"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf at $"),
        ({"type": "integer", "multipleOf": 5, "minimum": 0}, "multipleOf at $"),
        ({"type": "integer", "multipleOf": 5000}, "multipleOf at $"),
        ({"type": ["integer", "number"], "multipleOf": 5}, "multipleOf at $"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "write anyOf for oneOf"),
        ({"allOf": [INTEGER, {"minimum": 3}]}, "merge what allOf has"),
        ({"allOf": [INTEGER], "minimum": 3}, "minimum at $ would not be enforced beside allOf"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}}, "minimum at $"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "type at $ would not be enforced beside anyOf"),
        ({"type": "string", "enum": ["a", 1]}, "type at $ would not be enforced beside enum"),
        ({"type": "integer", "const": 1.5}, "type at $ would not be enforced beside const"),
        ({"enum": ["a", "bc"], "minLength": 2}, "minLength at $"),
        ({"minLength": 2}, "minLength at $ would not be enforced without a type"),
        ({"required": ["a"]}, "required at $ would not be enforced without a type"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "maxLength at $ would not be enforced beside pattern"),
        ({"type": "string", "pattern": "a", "format": "date"}, "format at $ would not be enforced beside pattern"),
        ({"type": "string", "format": "date", "minLength": 2}, "minLength at $ would not be enforced beside format"),
        ({"type": "string", "format": "color"}, "format at $ would not be enforced 'color'"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern at $: Regex parsing error"),
        ({"type": "string", "pattern": "(?i)a"}, "pattern at $: Regex parsing error"),
        ({"type": "string", "pattern": "a^b"}, "regex has '^' at 1"),
        ({"type": "string", "pattern": 'a"'}, "which a JSON string escapes"),
        ({"type": "string", "pattern": r"\\"}, "which a JSON string escapes"),
        ({"type": "string", "pattern": r"\n"}, "which a JSON string escapes"),
        ({"type": "string", "pattern": r"\x22"}, "which a JSON string escapes"),
        ({"type": "string", "pattern": r"\u{22}"}, "which a JSON string escapes"),
        ({"type": "string", "pattern": r'["\\]'}, "nothing but what a JSON string escapes"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'b', which is not in its properties"),
        ({"type": "object", "required": ["b"]}, "'b', which is not in its properties"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties at $"),
        ({"type": "object", "patternProperties": {"a": {}}, "additionalProperties": {}}, "patternProperties at $"),
        ({"type": "object", "patternProperties": {"(?i)a": {}}}, "pattern at $"),
        ({"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "a"}}, "propertyNames at $"),
        ({"type": "object", "propertyNames": {"enum": [1]}}, "type at $.propertyNames"),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"enum": [1]}}}, "$.propertyNames"),
        (
            {"type": "object", "minProperties": 2},
            "minProperties at $ would not be enforced where a name may come twice",
        ),
    ],
)
def test_schemas_that_would_not_be_enforced(plain: Constrainer, schema: Any, words: str) -> None:
    assert words in refusal(plain, {"json_schema": schema}).message


@pytest.mark.parametrize(
    ("around", "place"),
    [
        (lambda inner: {"type": "object", "properties": {"p": inner}}, "$.p"),
        (lambda inner: {"type": "object", "additionalProperties": inner}, "$.*"),
        (lambda inner: {"type": "object", "unevaluatedProperties": inner}, "$.*"),
        (lambda inner: {"type": "object", "patternProperties": {"p": inner}}, "$.p"),
        (lambda inner: {"type": "array", "items": inner}, "$.items"),
        (lambda inner: {"type": "array", "prefixItems": [INTEGER, inner]}, "$.prefixItems[1]"),
        (lambda inner: {"type": "array", "unevaluatedItems": inner}, "$.unevaluatedItems"),
        (lambda inner: {"anyOf": [INTEGER, inner]}, "$.anyOf[1]"),
        (lambda inner: {"allOf": [inner]}, "$.allOf[0]"),
        (
            lambda inner: {"$ref": "#/$defs/d", "$defs": {"d": {"items": {"$ref": "#/$defs/e"}}, "e": inner}},
            "#/$defs/e",
        ),
    ],
)
def test_every_part_of_a_schema_is_looked_at(plain: Constrainer, around: Any, place: str) -> None:
    assert f"not at {place} would" in refusal(plain, {"json_schema": around({"not": INTEGER})}).message


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"regex": ""}, "must be a pattern as text that is not empty, got ''"),
        ({"regex": 3}, "must be a pattern as text that is not empty, got 3"),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"regex": "a\0"}, "null characters"),
        ({"regex": "("}, "Regex parsing error at position 2: The parenthesis is not closed."),
        ({"regex": ".*("}, "Regex parsing error at position 4"),
        ({"regex": "[z-a]"}, "lower bound is larger"),
        ({"regex": "*"}, "Expect element"),
        ({"regex": "a{2,1}"}, "2 > 1"),
        ({"regex": "(?=a)b"}, "Lookahead"),
        ({"regex": "(?i)b"}, "flag"),
        ({"regex": r"(a)\1"}, "Backreference"),
        ({"regex": r"a\b"}, "Word boundary"),
        ({"regex": r"\p{L}"}, "Unicode character class"),
        ({"regex": r"[\p{L}]"}, r"regex has '\\p' at 1, which is not supported"),
        ({"regex": r"\Aa\Z"}, r"regex has '\\A' at 0, which is not supported"),
        ({"regex": "a^b"}, "regex has '^' at 1: leave it out, the whole text must match"),
        ({"regex": "a$|b"}, "regex has '$' at 1: leave it out, the whole text must match"),
        ({"regex": "[^]a]"}, "regex has '[^]'"),
        ({"grammar": ""}, "must be a GBNF grammar as text that is not empty, got ''"),
        ({"grammar": {"root": "a"}}, "must be a GBNF grammar"),
        ({"grammar": 'start: "a"'}, "EBNF lexer error at line 1, column 6"),
        ({"grammar": 'rule ::= "a"'}, 'The root rule with name "root" is not found'),
        ({"grammar": "root ::= other"}, 'Rule "other" is not defined'),
        ({"grammar": "root ::= []"}, "no text that this tokenizer can spell satisfies it"),
        ({"grammar": "root ::= Token(0)"}, "no text that this tokenizer can spell satisfies it"),
        ({"choice": []}, "must be a list of texts that is not empty, got []"),
        ({"choice": "yes"}, "must be a list of texts that is not empty, got 'yes'"),
        ({"choice": {"yes": 1}}, "must be a list of texts"),
        ({"choice": ["yes", ""]}, "must be a choice as text that is not empty, got ''"),
        ({"choice": ["yes", 1]}, "must be a choice as text that is not empty, got 1"),
        ({"choice": ["yes", "no", "yes"]}, "has 'yes' twice: list each text once"),
        ({"choice": ["\ud800"]}, "surrogates not allowed"),
    ],
)
def test_what_is_refused_of_the_others(plain: Constrainer, constraint: dict[str, Any], words: str) -> None:
    error = refusal(plain, constraint)
    assert error.path == f"generation.constraint.{next(iter(constraint))}"
    assert words in error.message


@pytest.mark.parametrize("constraint", [{}, {"regex": "a", "choice": ["a"]}, {"lark": "a"}])
def test_not_one_of_the_kinds(plain: Constrainer, constraint: dict[str, Any]) -> None:
    error = refusal(plain, constraint)
    assert error.path == "generation.constraint"
    assert error.message == f"is one of json_schema, regex, grammar, choice, got {list(constraint)}"


def test_no_tokenizer() -> None:
    error = refusal(Constrainer(None, 100, frozenset({1})), {"regex": "a"})
    assert str(error) == (
        "E_CONSTRAINT at generation.constraint.regex: needs a tokenizer, and this model was loaded without one"
    )


def test_no_xgrammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    error = refusal(Constrainer(BYTES, PADDED, frozenset({EOS})), {"regex": "a"})
    assert error.path == "generation.constraint"
    assert error.message.startswith("needs xgrammar (")
    assert error.message.endswith("); type: pip install 'midstream[structured]'")


def test_no_eos() -> None:
    for eos in (frozenset[int](), frozenset({PADDED})):
        error = refusal(Constrainer(BYTES, PADDED, eos), {"regex": "a"})
        assert error.path == "generation.constraint"
        assert error.message.startswith("needs an EOS id below 300")


def test_a_vocabulary_that_is_misread() -> None:
    words = Tokenizer(models.WordLevel({"A": 0, "word": 1, ",": 2, "[UNK]": 3, "[EOS]": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[EOS]")
    error = refusal(Constrainer(tokenizer, 5, frozenset({4})), {"regex": "A"})
    assert error.path == "generation.constraint"
    assert "xgrammar misreads this tokenizer's vocabulary" in error.message


def test_a_tokenizer_that_cannot_be_read() -> None:
    error = refusal(Constrainer(object(), 5, frozenset({4})), {"regex": "A"})
    assert error.path == "generation.constraint"
    assert "xgrammar cannot read the vocabulary of a object" in error.message
