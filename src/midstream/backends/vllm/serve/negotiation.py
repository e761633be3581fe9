"""What servers are and have, before anything is asked of them: versions, models, fingerprints, adapters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from midstream.backends.fingerprints import Fingerprints, weights
from midstream.core.errors import EngineError, ModelLoadError, SpecError, TransportError
from midstream.formats.discovery import OWN_ENGINE, WIRE, Capabilities

from ..engine import check_version
from .pool import Pool
from .transport import Server, UnknownThereError

CAPABILITIES: Final = "/v1/midstream/capabilities"
_START: Final = "start it with `midstream vllm-serve`"


@dataclass(frozen=True, eq=False)
class Found:
    """What all servers of a pool agree on. model: the name that requests carry."""

    model: str
    capabilities: Capabilities


async def found(pool: Pool, model: str | None) -> Found:
    """Ask every server what it is; ModelLoadError for one that cannot be used, or is not as the others."""
    each: list[Found] = []
    for server in pool.servers:
        try:
            each.append(await _one(server, model))
        except (TransportError, EngineError) as error:
            raise ModelLoadError(str(error)) from error
    first, *others = each
    for server, other in zip(pool.servers[1:], others, strict=True):
        for what, mine, theirs in (
            ("model", first.model, other.model),
            ("weights", _identity(first), _identity(other)),
            ("sites", first.capabilities.capture, other.capabilities.capture),
        ):
            if mine != theirs:
                raise ModelLoadError(
                    f"{server.base_url} has other {what} than {pool.servers[0].base_url}: {theirs!s:.80} and "
                    f"{mine!s:.80}"
                )
    return first


def _identity(one: Found) -> Any:
    return one.capabilities.model.facts["model_fingerprint"]


async def _one(server: Server, model: str | None) -> Found:
    try:
        said = await server.json("GET", CAPABILITIES)
    except UnknownThereError as error:
        raise ModelLoadError(f"{server.base_url} has no plugin of midstream: {_START}") from error
    wire = said.get("versions", {}).get("wire") if isinstance(said, dict) else None
    if wire != WIRE:
        raise ModelLoadError(f"{server.base_url} speaks version {wire} of our protocol, and this is {WIRE}: update one")
    try:
        capabilities = Capabilities.of(said)
    except SpecError as error:
        raise ModelLoadError(f"{server.base_url} says what is not understood here: {error}") from error
    if not capabilities.versions.engine.startswith(OWN_ENGINE):
        check_version(capabilities.versions.engine, f"{server.base_url}: ")
    return Found(await _model(server, model), capabilities)


async def _model(server: Server, model: str | None) -> str:
    """The name under which a model is served: its own, or that of the folder or hub id that it was loaded from."""
    listed = (await server.json("GET", "/v1/models"))["data"]
    base = [one for one in listed if one.get("parent") is None]
    names = [one["id"] for one in base]
    if model is None:
        if len(names) != 1:
            raise ModelLoadError(f"{server.base_url} serves {', '.join(names)}: name one of them")
        return names[0]
    for one in base:
        if model in (one["id"], one.get("root")) or _same_folder(model, one.get("root")):
            return one["id"]
    raise ModelLoadError(f"{server.base_url} serves {', '.join(names)}, and no {model!r}: name one of them, or None")


def _same_folder(model: str, root: Any) -> bool:
    return isinstance(root, str) and Path(model).is_dir() and Path(root).exists() and Path(model).samefile(root)


def compare(here: Fingerprints, there: Fingerprints, checkpoint: str | None) -> None:
    """ModelLoadError where a server's config or weights are not those that are known here; a warning for the rest.

    What is not known on one side says nothing. checkpoint: a folder whose weights are meant.
    """
    if checkpoint is not None:
        if (meant := weights(checkpoint)) is None:
            raise ModelLoadError(f"no checkpoint {checkpoint!r}: give a folder with .safetensors files")
        if there.weights is None:
            raise ModelLoadError("the server cannot tell its weights: it serves no folder")
        here = Fingerprints(here.config, meant, here.tokenizer, here.template)
    for name in ("config", "weights"):
        mine, theirs = getattr(here, name), getattr(there, name)
        if None not in (mine, theirs) and mine != theirs:
            advice = f"midstream vllm-serve MODEL --checkpoint {checkpoint}" if checkpoint else "name another server"
            raise ModelLoadError(f"the server's {name} {theirs} is not the one here, {mine}: {advice}")
    for name, effect in (("tokenizer", "texts may have other ids there"), ("template", "chats may read otherwise")):
        mine, theirs = getattr(here, name), getattr(there, name)
        if None not in (mine, theirs) and mine != theirs:
            warnings.warn(f"the server's {name} is not the one that is used here: {effect}", stacklevel=2)


async def adapter(pool: Pool, lora: str, capabilities: Capabilities) -> str:
    """The name of a LoRA adapter on every server, loaded there if it is not; its name holds what it is."""
    if not capabilities.engine.lora:
        raise ModelLoadError(f"the server takes no adapters: {_START} and --enable-lora")
    name = f"midstream-{adapter_fingerprint(lora)[:16]}"
    for server in pool.servers:
        listed = (await server.json("GET", "/v1/models"))["data"]
        if any(one["id"] == name for one in listed):
            continue
        try:
            await server.json("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": lora}, read=False)
        except UnknownThereError as error:
            raise ModelLoadError(
                f"{server.base_url} loads no adapters while it runs: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            ) from error
    return name


def adapter_fingerprint(lora: str) -> str:
    """The hash of an adapter's path and, where it is a folder here too, of its files."""
    digest = sha256(lora.encode())
    folder = Path(lora)
    for file in sorted(folder.glob("adapter_*")) if folder.is_dir() else []:
        digest.update(file.name.encode() + sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def of_server(capabilities: Capabilities) -> Fingerprints:
    """The fingerprints that a server tells."""
    return Fingerprints(**capabilities.model.fingerprints)
