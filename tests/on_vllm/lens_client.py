"""vllm-lens' own client, as its documentation shows it, in a process that has none of our code.

python lens_client.py URL SMALL_URL OUT      tensors to OUT/tensors.safetensors, the rest to OUT/said.json
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

TEXT, CHAT = "hello there", [{"role": "user", "content": "hello"}]
GIVEN = {"max_tokens": 5, "ignore_eos": True}


def vector(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def main() -> None:
    from vllm_lens import Hook, SteeringVector
    from vllm_lens.client import VLLMLensClient

    url, small, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    client, tensors, said = VLLMLensClient(url), {}, {}
    for name, transport in (("inline", None), ("binary", "binary")):
        found = client.generate(TEXT, capture_layers=[2, 0], activations_transport=transport, **GIVEN)
        tensors[name], said[name] = found.activations["residual_stream"], found.text
        found = client.chat(CHAT, capture_layers=[1], activations_transport=transport, **GIVEN)
        tensors[f"chat {name}"], said[f"chat {name}"] = found.activations["residual_stream"], found.text
    steers = {
        "every position": SteeringVector(activations=vector(1, 128), layer_indices=[1], scale=4.0),
        "norm match": SteeringVector(activations=vector(1, 128), layer_indices=[1], scale=0.5, norm_match=True),
        "some positions": SteeringVector(
            activations=vector(1, 2, 128), layer_indices=[0], scale=4.0, position_indices=[3, 7]
        ),
    }
    for name, steer in steers.items():
        found = client.generate(TEXT, capture_layers=[1], steering_vectors=[steer], **GIVEN)
        tensors[name], said[name] = found.activations["residual_stream"], found.text
    said["plain"] = client.generate(TEXT, **GIVEN).text
    for name, more in {
        "hooks": {"hooks": [Hook(fn=lambda ctx, h: None, layer_indices=[1])]},
        "no such layer": {"capture_layers": [9]},
        "several": {"capture_layers": [1], "n": 2},
        "qk": {"capture_qk": True},
    }.items():
        try:
            client.generate(TEXT, **GIVEN, **more)
        except RuntimeError as error:
            said[name] = str(error)
    # four at once in a cache that holds two: all but two are preempted, and run again
    tight = VLLMLensClient(small)
    prompts = [[10 + place + one % 90 for one in range(48)] for place in range(4)]
    with ThreadPoolExecutor(4) as pool:
        ends = list(
            pool.map(
                lambda ids: tight.generate(
                    ids, capture_layers=[1], max_tokens=60, ignore_eos=True, return_token_ids=True
                ),
                prompts,
            )
        )
    for place, found in enumerate(ends):
        tensors[f"tight {place}"] = found.activations["residual_stream"]
        said[f"tight {place}"] = [*prompts[place], *found.raw["choices"][0]["token_ids"][:-1]]
    save_file({name: one.contiguous() for name, one in tensors.items()}, out / "tensors.safetensors")
    (out / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
