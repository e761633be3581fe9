"""InterventionSpec on the wire: what is refused and where, one canonical form, which rows, salts, and binding."""

from __future__ import annotations

import json
import pickle
import re
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.artifacts import Artifact
from midstream.core.binding import BoundOp, bind, orthonormal
from midstream.core.errors import UNSUPPORTED, SpecError, UnsupportedOperationError
from midstream.core.interventions import Function, InterventionSpec, Patch, acts_on, block_salt
from midstream.core.op import OnRows, OnSublayers, Op
from midstream.core.ops import KINDS, Add, Replace
from midstream.core.select import SelectSpec
from midstream.core.sites import Site, SiteLayout
from midstream.taps.step import StepBatch, whole_sequence
from parity import intervention_oracle as oracle

NAN, HUGE, RANK_0, OTHER = float("nan"), 10**400, torch.tensor(3), f"sha256:{'7' * 64}"
V, M, T2, ALIGNED = [1.0, 2.0], [[1.0, 2.0], [2.0, 1.0]], [[1.0, 1.0], [2.0, 2.0]], {"measure": "cosine", "above": 0.5}
NO_LIST, NO_INTS, LOOSE = ["12", 1.5, True, {}], [[1.0], [True], [[3]], [1, "a"]], [[1, 0], (0, 0), np.array([2, 1])]
BASE: dict[str, dict[str, Any]] = {"add": {"vector": V}, "ablate": {"directions": M}, "replace": {"vector": V}}
BASE |= {"clamp": {"direction": V, "value": 0}, "rotate": {"basis": M, "angle": 1}, "router": {"layers": [1], "on": 0}}
BASE |= {"affine": {"matrix": M, "bias": V}, "low_rank": {"P": [V], "Q": [[1.0], [2.0]], "bias": [1.0]}}
BASE |= {"patch": {"layers": [0, 2], "vector": [T2, T2], "target": SelectSpec(prompt="all")}}
TWICE = {kind: {(name := next(iter(made.ranks))): [BASE[kind][name]] * 2} for kind, made in KINDS.items() if made.ranks}
ALL, FREE, FIXED = " ".join(KINDS), "add ablate clamp replace", "rotate affine low_rank"
TENSORS = {"vector", "directions", "direction", "basis", "matrix", "bias", "P", "Q"}
STREAM: tuple[Site, ...] = ("resid_post", "resid_pre", "attn_out", "mlp_out", "head_out")
LAYOUTS: dict[Site, dict[int, SiteLayout]] = {site: dict.fromkeys(range(3), SiteLayout(2)) for site in STREAM[:2]}
LAYOUTS["head_out"] = dict.fromkeys(range(3), SiteLayout(6, 3, 2))
LAYOUTS["router_logits"] = dict.fromkeys((1, 2), SiteLayout(4))
KIND, SITE, FIELD, LAYER = "E_UNKNOWN_KIND", "E_SITE", "E_UNKNOWN_FIELD", "E_LAYER_RANGE"
BAD, ROWS, MISSING = "E_BAD_PARAM", "E_SELECTION", "E_ARTIFACT_MISSING"


def op(kind: str = "add", /, **fields: Any) -> dict[str, Any]:
    """A valid op with other fields; `...` leaves a field out."""
    made = {"kind": kind, "layers": [0]} | BASE[kind] | fields
    return {name: value for name, value in made.items() if value is not ...}


def gate(part: str = "rule", kind: str = "sum", /, *, layers: Any = (1,), **fields: Any) -> dict[str, Any]:
    """A valid gate at layer 1, but for its part and fields of the gate ("") or of the part."""
    made = {"layers": layers, "readout": {"kind": "affine", "w": V}, "rule": {"kind": "sum"}}
    return made | ({part: {"kind": kind, **fields}} if part else fields)


affine, cosine = (partial(gate, "readout", kind) for kind in ("affine", "cosine"))
per_layer = partial(gate, "rule", "per_layer", threshold=1)


def spec(*ops: Any) -> InterventionSpec:
    return InterventionSpec(ops=list(ops))


def bound(steering: InterventionSpec, *held: Artifact) -> tuple[BoundOp, ...]:
    """Bound to the layouts, with a registry of what is `held`."""

    def fetch(artifact_id: str, path: str) -> Artifact:
        if not (found := [artifact for artifact in held if artifact.id == artifact_id]):
            raise SpecError("E_ARTIFACT_MISSING", path, "put it first")
        return found[0]

    return bind(steering, LAYOUTS, {"mlp_out": "its blocks are parallel"}, fetch)


def by_id(fields: dict[str, Any]) -> tuple[dict[str, Any], list[Artifact]]:
    """The op with its own tensors as ids, and the tensors; what is no tensor stays."""
    held: dict[str, Artifact] = {}
    for name in TENSORS & set(fields):
        with suppress(SpecError):
            held[name] = Artifact.of(fields[name])
    return fields | {name: found.id for name, found in held.items()}, list(held.values())


def refused(code: str, path: str, says: str, call: Any, *given: Any, **named: Any) -> str:
    """The message of the error, which has the code and the path and says it all in one line."""
    with pytest.raises(SpecError) as caught:
        call(*given, **named)
    error = caught.value
    assert (error.code, error.path, str(error)) == (code, path, f"{code} at {path}: {error.message}")
    assert [says in line for line in error.message.splitlines()] == [True]
    assert isinstance(error, UnsupportedOperationError) is (code in UNSUPPORTED)
    return error.message


def case(bad: dict[str, dict[str, list[Any]]], kinds: str = "add", code: str = BAD, **more: Any) -> list[Any]:
    """For each kind, path and bad value of the field that it begins with: an op, and its error, which says the key."""
    rows = [(at, says, value) for at, wrong in bad.items() for says, values in wrong.items() for value in values]
    made = [(more | {re.split(r"[.\[]", at)[0]: value}, code, at, says) for at, says, value in rows]
    return [(kind, *row[:-1], row[-1].replace("KIND", kind)) for kind in kinds.split() for row in made]


REFUSED = [
    *case({"layers": {"empty list": [[]], "no layer '12', which is no integer": ["12"]}}, "add", LAYER),
    *case({"layers[1]": {"no layer -1; layers are counted from 0": [[0, -1]], "no integer": [[0, True]]}}, ALL, LAYER),
    *(row for kind, two in TWICE.items() for row in case({"layers": {"each once, where ": LOOSE}}, kind, LAYER, **two)),
    *case({"kind": {f"there are: {', '.join(KINDS)}": ["none", ["add"], ..., None, "function", "patch"]}}, "add", KIND),
    *case({"site": {"called 'resid_post'": ["residual"], "there are: resid_pre": ["none", 3, None]}}, ALL, SITE),
    *case({"site": {f"KIND acts on {', '.join(STREAM)}; not on": ["q", "router_logits"]}}, FREE, SITE),
    *case({"site": {"KIND acts on r": ["resid_pre", "head_out", "attn_out"]}}, f"{FIXED} router", SITE),
    *case({"rows": {"'rows'; there are: kind, site, layers, scope, gate": ["prompt"]}}, ALL, FIELD),
    *case({"heads": {"there are: kind": [[0]]}}, f"{FIXED} router", FIELD),
    *case({"only_aligned": {"there are: kind": [ALIGNED]}}, f"replace {FIXED} router", FIELD),
    *case({"vector": {"must be numbers": [None, [True], ["1"], np.array([1j]), {"a": 1}, HUGE, [2**70]]}}),
    *case({"vector": {"numbers": [torch.tensor([1j]), torch.tensor([True]), np.array([[True], [False]])]}}),
    *case({"vector": {"tensor": [torch.ones(1, device="meta"), torch.eye(2).to_sparse()], "one length": [[[1.0], V]]}}),
    *case({"vector": {"not finite": [[1.0, NAN], [-np.inf], [1e39], np.array([1e39])], "[1, 2, 2]; add": [[T2]]}}),
    *case({"vector": {"64 hex digits": ["sha256:" + "A" * 64, "v.safetensors"], "empty": [[], [[]], torch.empty(0)]}}),
    *(row for kind, two in TWICE.items() for row in case({min(two): {"]; KIND takes [": [3.0, RANK_0]}}, kind)),
    *case({"vector": {"has 2 rows: that is one for each of 2 layers, or": [T2]}}, "add replace"),
    *case({"vector": {"rows for 3 pos": [T2], "for 2 layers": [[T2, T2]]}}, "add replace", positions=[1, 2, 3]),
    *case({"vector": {"zero vector": [[0.0, 0.0]]}}, norm_match=True),
    *case({"vector[1]": {"zero vector": [[[1.0], [0.0]]]}}, only_aligned=ALIGNED, layers=[0, 1]),
    *case({"directions[1]": {"zero direction": [[[[1.0]], [[0.0]]]]}}, "ablate", layers=[0, 1]),
    *case({"direction": {"zero direction": [[0.0, 0.0]], "for 2 layers, and the op has layers [0]": [T2]}}, "clamp"),
    *case({"basis": {"zero basis": [[V, [0, 0]]], "got 1": [[V]], "[n, width] or": [V], "colinear": [T2]}}, "rotate"),
    *case({"basis[1]": {"colinear": [[M, [[1, 2], [-2, -4]]], [M, [[1, 0], [1, 3e-7]]]]}}, "rotate", layers=[0, 1]),
    *case({"matrix": {"square, got [1": [[V]]}, "bias": {"the matrix 2": [[1, 2, 3]], "for 2 layers": [T2]}}, "affine"),
    *case({"Q": {"[hidden, r]": [[V]]}, "bias": {"[r]": [V], "for 2 layers, and the op": [T2]}}, "low_rank"),
    *case({"strength": {"got": [NAN, np.inf, True, "1", None, [1.0]]}}, "add ablate replace affine low_rank"),
    *case({"strength": {"to 1": [1.5], "to 0": [-0.1]}, "only_aligned": {"one direction, and": [ALIGNED]}}, "ablate"),
    *case({"value": {"required": [...], "number": [None, "1", NAN], "too large for a float": [HUGE, -HUGE]}}, "clamp"),
    *case({"cap_norm": {"boolean, got": [1, "yes", None]}}, "add rotate"),
    *case({"norm_match": {"at attn_out use strength": [True]}}, site="attn_out"),
    *case({"only_aligned.measure": {"'projection', got 'cos'": [{"measure": "cos", "above": 0}]}}, "add clamp"),
    *case({"only_aligned.above": {"": [{"measure": "cosine"}], "finite": [ALIGNED | {"above": NAN}]}}, "add clamp"),
    *case({"positions": {"ascend": [[3, 3], [3, 1], np.array([3, 1]), range(3, 1, -1)]}}, "add replace", vector=T2),
    *case({"positions": {"from 0, got -1": [[-1, 2]], "more": [[], *NO_INTS], "must be a list": NO_LIST}}, vector=T2),
    *case({"heads": {"list of heads": [...], "heads ascend, each once": [[1, 1], [2, 0]]}}, FREE, site="head_out"),
    *case({"heads": {"more": [[], *NO_INTS], "list": NO_LIST}, "heads[0]": {"-1": [[-1]]}}, "clamp", site="head_out"),
    *case({"on": {"on, off, or shift": [[], ...], "be a list": [None, *NO_LIST], "are integers": NO_INTS}}, "router"),
    *case({"off": {"be a list": NO_LIST, "are integers": NO_INTS}, "off[0]": {"0, got -1": [[-1]]}}, "router"),
    *case({"shift[0][1]": {"number": [[[1, None]], {"1": True}, {"1": NAN}], "too large": [{1: HUGE}]}}, "router"),
    *case({"shift[0][0]": {"-1": [[[-1, 1]]]}, "shift": {"once": [[[1, 1.0], [1, 2.0]], {"1": 1, 1: 2}]}}, "router"),
    *case({"shift": {"experts are integers": [{"a": 1, "1": 2}, {"a": 1.0}, [[True, 1]], [[1.0, 1]]]}}, "router"),
    *case({"shift": {"pairs of expert and number": [[1, 2]], "must be a list": NO_LIST[:-1]}}, "router"),
    *(*case({"heads": {"resid_post has none": [[0]]}}, FREE), *case({"scope": {"prompt[-1]": ["all", {}]}}, ALL, ROWS)),
    *case({"scope": {"; not on": ["prompt", "prompt[-2]", "sequence[5:]"]}}, "add", ROWS, layers=[2], gate=gate()),
    *case({"scope": {"evidence at layer 1": ["prompt[-1]"]}}, "add router", ROWS, layers=[1, 2], gate=gate()),
    *case({"gate.layers[1]": {"no layer -1": [gate(layers=[0, -1])]}}, ALL, LAYER),
    *case({"gate.site": {"mlp_out; not": [gate("", site="q"), gate("", site="head_out")]}}, "add", SITE),
    *case({"gate.bias": {"there are: layers, site, pooling, readout, rule": [gate("", bias=1)]}}, "router", FIELD),
    *case({"gate.readout.w": {"no d": [affine(), affine(d=V)], "[0, 1]; got": [affine(layers=[0, 1], w=[V])]}}),
    *case({"gate.readout.w": {"per evidence layer, [1]; got [": [affine(w=w) for w in (T2, [[T2]], 1.0)]}}),
    *case({"gate.readout.d": {"takes d, and no w": [cosine(w=V)], "[1]; got [2, 2]": [cosine(d=T2)]}}),
    *case({"gate.readout.d": {"zero direction": [cosine(d=[0]), cosine(layers=[0, 1], d=[[1], [0]])]}}),
    *case({"gate.readout.b": {"into the rule": [cosine(d=V, b=1)]}, "gate.rule.bias": {"": [gate(bias=HUGE)]}}),
    *case({"gate.rule.threshold": {"takes none": [gate(threshold=1), per_layer(threshold=None)]}}),
    *case({"gate.rule.bias": {"into the threshold": [per_layer(bias=1)]}, "strength": {"too large": [HUGE, -HUGE]}}),
    *case({"gate.rule.compare": {"no compare": [gate(compare="ge")], "'le'": [per_layer(compare="gt")]}}),
    *case({"gate.rule.combine": {"no combine": [gate(combine="any")], "'all'": [per_layer(combine="ge")]}}),
]


@pytest.mark.parametrize(("kind", "fields", "code", "path", "says"), REFUSED, ids=lambda value: f"{value!s:.50}")
def test_the_constructor_refuses(kind: str, fields: dict[str, Any], code: str, path: str, says: str) -> None:
    """The same from a spec, an object below any path, the op itself; and when its tensors are fetched later."""
    wrong = op(kind, **fields)
    message = refused(code, f"steering.ops[1].{path}", says, spec, op(), wrong)
    assert message == refused(code, f"body.ops[0].{path}", says, InterventionSpec.of, {"ops": [wrong]}, "body")
    assert "kind" in fields or message == refused(code, f"{kind}.{path}", says, KINDS[kind], **wrong)
    given, held = by_id(wrong)
    assert message == refused(code, f"steering.ops[1].{path}", says, lambda: bound(spec(op(), given), *held))


FILE = (64).to_bytes(8, "little") + b'{"tensor":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(64)
ID = f"sha256:{sha256(FILE + np.array([1, 2], '<f4').tobytes()).hexdigest()}"
ROUTER = op("router", on=3, off=[2, 1, 2], shift={"4": 0.5, "0": -1})
#: Every kind, site and option, as a caller may write it; no two alike.
TAKEN: list[dict[str, Any]] = [
    *(op(kind) for kind in KINDS),
    *(op(kind, site=site, heads=[0, 2] if site == "head_out" else ...) for kind in FREE.split() for site in STREAM[1:]),
    *(op(scope=scope) for scope in ("prompt", "sequence[17:]", "prompt, generated[3:], !prompt{5,7}")),
    *(op(kind, cap_norm=True, strength=0.5) for kind in ("add", "ablate", "replace", "affine", "low_rank")),
    *(op(strength=0), op(strength=-2.5), op(strength=1e-30), op(vector=[0.0, 0.0]), op(layers=[0, 2], vector=T2)),
    *(op(norm_match=True), op(only_aligned=ALIGNED), op(positions=[3, 9], vector=T2), op("affine", bias=...)),
    *(op("rotate", mode="by", angle=-7), op("low_rank", bias=...), op("ablate", directions=[1.0, 2.0])),
    *(op("replace", layers=[0, 2], positions=[3, 9], vector=[T2, T2]), op(gate=cosine(d=V)), ROUTER),
    *(op("clamp", value=-3, only_aligned={"measure": "projection", "above": -1}), op(gate=per_layer(threshold=0))),
    *(op(gate=gate()), op(gate=gate("", site="mlp_out")), op(gate=gate("", pooling="last")), op(gate=gate(bias=-1))),
    op(layers=[2], scope="prompt[-1]", gate=per_layer(threshold=0, compare="le", combine="all")),
]


def test_canonical_json_by_the_letter_and_at_most_64_kib() -> None:
    """The document's example; a router; a gate, and a switch that is on."""
    one = spec(op(layers=12, scope="generated", strength=4), ROUTER, op("clamp", gate=gate(), cap_norm=True))
    text = (
        '{"ops":[{"kind":"add","layers":[12],"scope":{"generation":"all"},"site":"resid_post","strength":4.0,'
        '"vector":"ID"},{"kind":"router","layers":[1],"off":[1,2],"on":[3],"shift":[[0,-1.0],[4,0.5]],'
        '"site":"router_logits"},{"cap_norm":true,"direction":"ID","gate":{"layers":[1],"pooling":"mean","readout":'
        '{"b":0.0,"kind":"affine","w":"ID"},"rule":{"bias":0.0,"kind":"sum"},"site":"resid_post"},"kind":"clamp",'
        '"layers":[0],"site":"resid_post","value":0.0}]}'
    )
    assert one.canonical_json() == text.replace("ID", ID)

    def of_size(size: int) -> InterventionSpec:
        many, rest = divmod(size - len(spec(op(positions=[10000], vector=ID)).canonical_json()), 6)
        return spec(op(positions=[*range(10000, 10000 + many), 99999 * 10**rest], vector=ID))

    assert len(of_size(65536).canonical_json()) == 65536
    for call in (of_size(65537).canonical_json, lambda: of_size(65537).digest):
        refused("E_SPEC_TOO_LARGE", "steering", "65,537 bytes of JSON, at most 65,536", call)


@pytest.mark.parametrize("fields", TAKEN, ids=lambda value: f"{value!s:.90}")
def test_canonical_round_trip(fields: dict[str, Any]) -> None:
    one = spec(op(), fields)
    text = one.canonical_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), allow_nan=False)
    again = InterventionSpec.of(json.loads(text))
    assert again == one == pickle.loads(pickle.dumps(one))
    assert (hash(again), again.digest, again.canonical_json()) == (hash(one), one.digest, text)
    assert one.digest == sha256(text.encode()).hexdigest()
    held = [value for found in one.canonical()["ops"] for name, value in found.items() if name in TENSORS]
    assert {Artifact.of(value).given_id for value in held} <= set(one.artifacts())  # ids, and never numbers


def test_digests_and_ids_are_of_content() -> None:
    assert len({spec(fields).digest for fields in TAKEN}) == len(TAKEN)
    assert spec(op(), op("clamp")).digest != spec(op("clamp"), op()).digest
    same = [op(layers=[0, 0], strength=1), op(layers=np.array(0), vector=ID), op(cap_norm=False, scope=None)]
    assert {spec(fields).digest for fields in same} == {spec(op()).digest}
    forms: list[Any] = [[1, 2], (1.0, 2.0), Artifact.of([1, 2]), ID, np.array([1, 0, 2, 0], ">f4")[::2]]
    forms += [torch.tensor([1, 9, 2]).to(dtype)[::2] for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    forms += [torch.tensor([1, 2]), torch.tensor([1.0, 2.0], requires_grad=True)]
    assert {Add(layers=0, vector=form).vector.id for form in forms} == {ID}
    lazy = Artifact.of(given_ := np.ones(2, np.float32))
    given_[0] = 7  # an artifact is a copy
    assert lazy == Artifact.of([1, 1])


def test_a_spec_is_a_list_of_ops_and_specs_add() -> None:
    for bad in ([], (), None, {}, "add", 3):
        refused(BAD, "steering.ops", "ops is a list of one or more", InterventionSpec, ops=bad)
        refused(*((KIND, "steering.ops[1].kind") if bad == {} else (BAD, "steering.ops[1]")), "", spec, op(), bad)
    refused(BAD, "steering.ops", "required", InterventionSpec)
    refused(FIELD, "steering.x", "", InterventionSpec, ops=[op()], x=1)
    for made in (Op, OnRows, OnSublayers):  # what kinds are made of, and none
        refused(BAD, "steering.ops[1]", "an object with a kind", spec, op(), made(kind="add", layers=0))
    one, two = spec(op(), op("clamp")), spec(op("router"))
    assert [each.kind for each in (one + two + one).ops] == ["add", "clamp", "router", "add", "clamp"]
    assert one + two == InterventionSpec.read([*one.ops, op("router")]) != two + one
    a_patch, a_function = Patch(**op("patch")), Function(layers=[0, 2], fn=print)
    for whole, says in ((one + spec(a_patch), "use spec.lowered(rows)"), (one + spec(a_function), "in process only")):
        for call in (whole.canonical, whole.canonical_json, lambda whole=whole: whole.digest):
            refused(KIND, "steering.ops[2].kind", says, call)
    refused(KIND, "steering.ops[1].kind", "use spec.lowered(rows)", bound, spec(op(), a_patch))
    assert bound(spec(a_function))[0].tensors == {0: {}, 2: {}}


@pytest.mark.parametrize(("target", "places"), [("prompt[1:3]", [1, 2]), ("prompt[0], sequence[7:]", [0, 7])])
def test_a_patch_is_lowered_to_replace_at_positions(target: str, places: list[int]) -> None:
    """Rows pair in order, and rows of the prompt alone; the other ops stay."""
    rows, aim, vector = whole_sequence(range(10), 8), SelectSpec.parse(target), np.arange(32.0).reshape(2, 8, 2)
    shared: dict[str, Any] = {"layers": [0, 2], "site": "head_out", "heads": [1], "cap_norm": True}
    part, whole = (Patch(vector=each, target=aim, **shared) for each in (vector[:, : len(places)], vector))
    low, placed = spec(op(), part, op("clamp")).lowered(rows), Replace(vector=part.vector, positions=places, **shared)
    assert low == low.lowered(rows) == spec(op(), placed, op("clamp"))
    says = f"selects {len(places)} rows of the prompt, and the source has 8"
    refused(ROWS, "body.ops[1].target", f"{target!r} {says}", spec(op(), whole).lowered, rows, "body")
    none = Patch(**op("patch", target=SelectSpec(generation="all")))
    refused(ROWS, "steering.ops[0].target", "'generated' selects 0 rows of the prompt", spec(none).lowered, rows)


SCOPES = ["prompt", "generated", "prompt[-1]", "prompt[-3:], generated{6,9}", "sequence[2:5], !prompt{3}"]
REACH = ["generated", "generated[2:], generated{6}", "prompt[-1]", "generated[0], prompt[-1]"]


@settings(deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 12), st.none() | st.integers(0, 2))
def test_acts_on_row_by_row(data: st.DataObject, prompt_len: int, length: int, evidence: int | None) -> None:
    """By scope, positions and the gate's reach, on any part of a sequence in any order."""
    scope = data.draw(st.none() | st.sampled_from(SCOPES if evidence is None else REACH))
    first = 0 if evidence is None or "prompt" not in (scope or "") else evidence + 1
    layers = data.draw(st.lists(st.integers(first, 3), min_size=1))
    positions = data.draw(st.none() | st.lists(st.integers(0, 12), min_size=1, unique=True).map(sorted))
    vector = [1.0, 2.0] if positions is None else np.ones((len(positions), 2))
    gates = None if evidence is None else gate(layers=[evidence])
    (one,) = spec(op(layers=layers, scope=scope, positions=positions, vector=vector, gate=gates)).ops
    order = np.array(data.draw(st.permutations(range(length))))
    table = whole_sequence(range(length), prompt_len).take(order[: length // 2 + 1])

    def due(position: int, token: int, layer: int) -> bool:
        reach = evidence is None or position >= prompt_len or (position == prompt_len - 1 and layer > evidence)
        named = oracle.selected(one.scope and one.scope.canonical(), position, token, prompt_len)
        return named and reach and (positions is None or position in positions)

    rows = list(zip(table.position.tolist(), table.token_id.tolist(), strict=True))
    for layer in one.layers:
        assert acts_on(one, table, layer).tolist() == [due(*row, layer) for row in rows]
    assert acts_on(one, table).tolist() == [any(due(*row, layer) for layer in layers) for row in rows]


def salt(*ops: Any, rows: StepBatch | None = None, end: int = 8, decisions: Any = ()) -> str:
    return block_salt(spec(*ops), whole_sequence(range(12), 8) if rows is None else rows, end, decisions)


def test_a_salt_is_of_what_was_done() -> None:
    """First `prompt[-1]` on a prompt of 32 tokens, then on it and 20 more: row 31 of the second is plain."""
    last, short, longer = op(scope="prompt[-1]"), whole_sequence(range(32), 32), whole_sequence(range(52), 52)
    assert salt(last, rows=short, end=31) == salt(last, rows=longer, end=32) == block_salt(None, longer, 9)
    assert len({salt(last, rows=longer, end=end) for end in (32, 52)} | {salt(last, rows=short, end=32)}) == 3
    assert salt(last, rows=longer, end=32) == salt(op(strength=0)) == salt(op(scope="generated")) == ""
    two, base = op(scope="prompt[2:4]"), salt(op(scope="prompt[2:4]"))
    assert {salt(op(scope=scope)) for scope in ("sequence[2:4]", "prompt[-6:-4]", "prompt{2,3}")} == {base}
    assert {salt(two, end=4), salt(two, end=12), salt(two, rows=short), salt(two | {"vector": ID})} == {base}
    for more in (op(strength=0), op("clamp", scope="generated"), op(gate=gate()), op("router", on=[], shift=[[1, 0]])):
        assert salt(more, two, decisions=[False]) == base
    others = [[two, op("clamp")], [op("clamp"), two], [two, two], [op(scope="prompt[2:5]")], [op(scope="prompt[2]")]]
    changes = [{"kind": "replace"}, {"strength": 2}, {"vector": [1.0, 3.0]}, {"layers": 1}, {"cap_norm": True}]
    salts = [salt(*ops) for ops in [*others, *([two | change] for change in changes)]]
    assert len({base, "", *salts}) == len(salts) + 2
    gated, before = op(layers=[2], gate=gate()), op(layers=[0, 1], gate=gate())  # which acts at no row of the prompt
    assert salt(before, decisions=[True]) == "" != salt(before, end=9, decisions=[True])
    assert salt(gated, end=7, decisions=[True]) == salt(gated, end=12, decisions=[False]) == ""
    salts = [salt(gated, decisions=[True]), salt(gated, end=9, decisions=[True]), salt(gated)]
    assert len({"", *salts, salt(gated | {"gate": gate(bias=-1)}, decisions=[True])}) == 5


HELD = [Artifact.of(T2), Artifact.of([0.0, 0.0])]
UNBOUND = [
    *case({"site": {"no mlp_out: its blocks are parallel; it has: resid_post, resid_pre": ["mlp_out"]}}, "add", SITE),
    *case({"site": {"no attn_out: the architecture has none": ["attn_out"]}}, "clamp", SITE),
    *case({"layers[1]": {"no layer 3; resid_post of this model has layers 0 to 2": [[0, 3]]}}, "add", LAYER),
    *case({"layers[0]": {"no layer 0; router_logits of this model has layers 1 to 2": [[0, 1]]}}, "router", LAYER),
    *case({"vector": {"width 1, and resid_post at layer 0 has 2": [[1.0]]}}, "add replace"),
    *case({"heads": {"no head 3; layer 0 has heads 0 to 2": [[0, 3]]}}, "clamp", site="head_out"),
    *case({"direction": {"with its heads has 4": [[1.0]]}}, "clamp", site="head_out", heads=[0, 2]),
    *case({name: {"no expert 4; layer 1 has experts 0 to 3": [4, [0, 4]]} for name in ("on", "off")}, "router"),
    *case({"shift": {"no expert 9; layer 1 has experts 0 to 3": [{"9": 1}]}}, "router"),
    *case({"gate.site": {"no attn_out": [gate("", site="attn_out")]}}, "add", SITE),
    *case({"gate.layers[1]": {"no layer 7": [gate(layers=[1, 7])]}}, "add", LAYER),
    *case({"gate.readout.w": {"width 1, and resid_post at layer 1 has 2": [affine(w=[1.0])]}}),
    *case({"gate.readout.w": {"2, 2]": [affine(w=HELD[0].id)]}, "gate.readout.d": {"zero": [cosine(d=HELD[1].id)]}}),
    *case({"gate.readout.w": {"put": [affine(w=OTHER)]}, "gate.readout.d": {"put": [cosine(d=OTHER)]}}, "add", MISSING),
    *case({"vector": {"put it first": [OTHER]}}, "add", MISSING),
    *case({"scope": {"where its target says": ["generated"]}, "gate": {"where its target says": [gate()]}}, "patch"),
    *case({"vector": {"rows, [layers, rows, width]": [T2, ID], "the shape [": [[[T2]], [1.0], 1.0]}}, "patch"),
    *case({"vector": {"for 1 layers, and the op has layers [0, 2]": [[T2]]}, "target": {"": [None, "x"]}}, "patch"),
    *case({"layers": {"ascend, each once, where vector may": [[2, 0], [0, 0]]}}, "patch", LAYER),
]


@pytest.mark.parametrize(("kind", "fields", "code", "path", "says"), UNBOUND)
def test_bind_refuses_and_so_does_a_patch(kind: str, fields: dict[str, Any], code: str, path: str, says: str) -> None:
    if kind == "patch":
        refused(code, f"patch.{path}", says, Patch, **op(kind, **fields))
    else:
        refused(code, f"steering.ops[1].{path}", says, bound, spec(op(), op(kind, **fields)), *HELD)


@pytest.mark.parametrize("kind", KINDS)
def test_bound_by_id_is_bound_by_value(kind: str) -> None:
    each = affine(layers=[0, 2], w=Artifact.of(T2).id)
    given, held = by_id(op(kind, gate=each))
    (one,), (two,) = bound(spec(op(kind, gate=each)), Artifact.of(T2)), bound(spec(given), Artifact.of(T2), *held)
    assert (one.op, one.layout, one.place, set(one.tensors)) == (two.op, two.layout, 0, set(two.op.layers))
    assert {layer: array.tolist() for layer, array in two.evidence.items()} == {0: T2[0], 2: T2[1]}
    np.testing.assert_equal(dict(one.tensors), dict(two.tensors))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1.0, 1e30]))
def test_orthonormal(rank: int, more: int, seed: int, scale: float) -> None:
    """Rows are orthonormal and span what was given; what depends on others adds none; one keeps its sign."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=(rank, 7))
    rows = np.concatenate([base, rng.normal(size=(more, rank)) @ base])[rng.permutation(rank + more)]
    basis = orthonormal((rows * scale).astype(np.float32)).astype(np.float64)
    assert basis.shape == (rank, 7)
    np.testing.assert_allclose(basis @ basis.T, np.eye(rank), atol=1e-6)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(rows @ basis.T @ basis, rows, atol=1e-4)
    assert len(rows) > 1 or np.allclose(basis, rows, atol=1e-6)


@pytest.mark.parametrize("sine", [1.0, 1e-2, 1e-4, 3e-6])
def test_a_plane_is_orthonormal(sine: float) -> None:
    """However near to colinear, and however long; from the first vector to the second."""
    turned = np.array([0.3, 0.3 + np.arcsin(sine)])
    basis = np.stack([np.cos(turned), np.sin(turned)], 1) * [[1e-12], [1e12]]
    plane = bound(spec(op("rotate", basis=basis)))[0].tensors[0]["basis"].astype(np.float64)
    np.testing.assert_allclose(plane @ plane.T, np.eye(2), atol=2e-7)
    np.testing.assert_allclose(plane, [[np.cos(0.3), np.sin(0.3)], [-np.sin(0.3), np.cos(0.3)]], atol=2e-7)
