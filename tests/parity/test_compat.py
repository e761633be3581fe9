"""Other tools' entry points give the numbers of a plain Hugging Face forward, or differ as their docstrings say."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import midstream as ms
import midstream.compat.hidden_states as hs
from midstream.compat import capture_activations, load_hidden_states
from midstream.core.errors import SpecError, UnsupportedOperationError
from parity.tiny import base, build

IDS = torch.tensor([[1, 17, 42, 5, 99, 3]])
LAYERS = 3


def llama() -> Any:
    config = hf.LlamaConfig(**base(intermediate_size=96, num_key_value_heads=2, num_hidden_layers=LAYERS))
    return build(lambda: hf.LlamaForCausalLM(config))


def gemma2() -> Any:
    config = hf.Gemma2Config(**base(intermediate_size=96, num_key_value_heads=2, num_hidden_layers=LAYERS, head_dim=16))
    config._attn_implementation = "eager"
    return build(lambda: hf.Gemma2ForCausalLM(config))


def plain(model: Any) -> tuple[tuple[Tensor, ...], dict[tuple[int, str], Tensor]]:
    """Hugging Face's hidden states, and the outputs of the attention and MLP modules."""
    outputs: dict[tuple[int, str], Tensor] = {}
    handles = []
    for layer, block in enumerate(model.model.layers):
        for name, module in (("attn", block.self_attn), ("mlp", block.mlp), ("block", block)):

            def keep(_m: Any, _i: Any, out: Any, key: Any = (layer, name)) -> None:
                outputs[key] = (out[0] if isinstance(out, tuple) else out)[0].detach()

            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    for handle in handles:
        handle.remove()
    return tuple(state[0] for state in states), outputs


def close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs).abs().max().detach()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("as_lm", [True, False])
def test_interlens_numbers(as_lm: bool) -> None:
    model = llama()
    states, outputs = plain(model)
    spec = {"sites": ["residual", "attn", "mlp"]}
    if as_lm:
        with ms.load(model) as lm:
            rows = capture_activations(lm, IDS, spec)
    else:
        rows = capture_activations(model, IDS, spec)
    found = {(layer, site): tensor for layer, site, tensor in rows}
    assert len(rows) == len(found) == 3 * LAYERS
    for layer in range(LAYERS):
        assert close(found[layer, "attn"], outputs[layer, "attn"])
        assert close(found[layer, "mlp"], outputs[layer, "mlp"])
        assert close(found[layer, "residual"], outputs[layer, "block"])
        # by intent: the last one is un-normed, where interlens gives what the final norm makes of it
        assert close(found[layer, "residual"], states[layer + 1]) == (layer < LAYERS - 1)
    assert close(model.model.norm(found[LAYERS - 1, "residual"]), states[-1])


def test_interlens_sublayers_of_a_post_norm_model() -> None:
    """By intent: what is added to the stream, which is the normed output of the module."""
    model = gemma2()
    states, outputs = plain(model)
    rows = {(layer, site): x for layer, site, x in capture_activations(model, IDS, {"sites": ["attn", "mlp"]})}
    for layer in range(LAYERS - 1):
        assert not close(rows[layer, "attn"], outputs[layer, "attn"])
        assert close(states[layer] + rows[layer, "attn"] + rows[layer, "mlp"], states[layer + 1])


def test_the_model_is_left_as_it_was() -> None:
    model = llama()
    before = copy.deepcopy(model.state_dict())
    capture_activations(model, IDS, {"layers": [1]})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_easysteers_functions_on_a_model_in_process() -> None:
    """Streams, both wrappers, and what needs an engine refused; outputs are Completions where no engine speaks."""
    model = llama()
    lm, prompts = ms.load(model), [[1, 17, 42], [5, 99, 3, 8]]
    states, _ = plain(model)
    found = hs.capture(lm, IDS.tolist(), layers=[0, 1])
    for layer in (0, 1):
        torch.testing.assert_close(found.rows(layer), states[layer + 1], atol=1e-5, rtol=1e-5)
        assert found.meta(layer).token_ids.tolist() == IDS[0].tolist()
    heads = hs.capture(lm, prompts, stream="attention_heads", layers=[1], select="prompt[-1]")
    assert heads.layouts[1]["num_heads"] == heads.rows(1).shape[1] // heads.layouts[1]["head_size"]
    assert len(heads.rows(1)) == len(prompts)
    nested, outputs = hs.get_all_hidden_states_generate(lm, prompts, max_tokens=2, ignore_eos=True)
    assert [len(of) for of in nested] == [LAYERS, LAYERS]
    assert [one.token_ids for one in outputs] == [
        one.token_ids for one in lm.generate(prompts, max_tokens=2, ignore_eos=True)
    ]
    batches = list(hs.capture_batches(lm, prompts, batch_size=1, layers=[2]))
    torch.testing.assert_close(batches[1].rows(2), hs.capture(lm, prompts, layers=[2]).sample(1)[2])
    for name in ("positions", "reduce"):
        with pytest.raises(SpecError, match=f"E_UNKNOWN_FIELD at {name}: name rows with select="):
            hs.capture(lm, prompts, **{name: "last"})
    with pytest.raises(SpecError, match="E_SITE"):
        hs.get_moe_router_logits_generate(lm, prompts)
    with pytest.raises(UnsupportedOperationError, match="others submit no requests to a model in this process"):
        hs.start_capture(lm)


def test_hidden_states_files_hold_vllms_aux_layers(tmp_path: Any) -> None:
    """Aux id k is the stream after k blocks: 0 the embeddings, L what the last block leaves."""
    model = llama()
    states, outputs = plain(model)
    with ms.load(model) as lm, warnings.catch_warnings():
        warnings.simplefilter("error")
        capture = lm.capture([IDS[0].tolist(), [1, 2]], sites=["resid_pre", "resid_post"])
        generated = lm.capture([IDS[0].tolist()], layers=[0], max_tokens=4)
    paths = capture.save_hidden_states(tmp_path)
    file = load_hidden_states(paths[0])
    assert file["hidden_states"].shape == (6, LAYERS + 1, 64)
    assert file["token_ids"].tolist() == IDS[0].tolist()
    for aux in range(LAYERS):
        assert close(file["hidden_states"][:, aux], states[aux])
    assert close(file["hidden_states"][:, LAYERS], outputs[LAYERS - 1, "block"])
    (path,) = generated.save_hidden_states(tmp_path / "generated")
    consumed = [*IDS[0].tolist(), *generated.outputs[0].token_ids[:-1]]
    assert load_hidden_states(path)["token_ids"].tolist() == consumed


def test_a_real_capture_through_its_file(tmp_path: Any) -> None:
    with ms.load(llama()) as lm:
        capture = lm.capture([IDS[0].tolist(), [1, 2]], rows="prompt[-1], generated", max_tokens=3)
    back = ms.CaptureResult.load(capture.save(tmp_path / "acts.safetensors"))
    assert list(back.tensors) == list(capture.tensors)
    assert all(torch.equal(back.tensors[key], tensor) for key, tensor in capture.tensors.items())
    assert back.labels == capture.labels
    assert tuple(back.outputs) == tuple(capture.outputs)
    assert (back.spec, back.receipt, back.layouts) == (capture.spec, capture.receipt, capture.layouts)
    assert back.model_fingerprint == capture.model_fingerprint
