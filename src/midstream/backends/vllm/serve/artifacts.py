"""Tensors of specs, on their way to the servers: by upload, or through a directory that both sides see."""

from __future__ import annotations

from collections.abc import Mapping

from anyio import to_thread

from midstream.core.artifacts import Artifact
from midstream.core.errors import EngineError
from midstream.formats.artifacts import ArtifactRegistry

from .transport import Server


class Uploads:
    """registry: where the caller's own are. shared: of the directory that servers see too, if there is one."""

    def __init__(self, registry: ArtifactRegistry, shared: ArtifactRegistry | None) -> None:
        self._registry, self._shared = registry, shared

    async def ensure(self, server: Server, artifacts: Mapping[str, Artifact]) -> None:
        """Let a server have these artifacts, which it had not from us yet."""
        for name, artifact in artifacts.items():
            if name not in server.artifacts:
                async with server.sending:
                    if name not in server.artifacts:
                        await self._send(server, name, artifact)
                        server.artifacts.add(name)

    async def again(self, server: Server, artifacts: Mapping[str, Artifact]) -> None:
        """The same, whatever it had."""
        server.artifacts -= set(artifacts)
        await self.ensure(server, artifacts)

    async def _send(self, server: Server, name: str, artifact: Artifact) -> None:
        path = f"/v1/midstream/artifacts/{name}"
        if self._shared is not None:
            data = await to_thread.run_sync(self._registry.file_of, artifact)
            await to_thread.run_sync(self._shared.put_bytes, name, data)
            if not await server.has(path):
                raise EngineError(
                    f"{server.base_url} does not see {self._shared.directory}: start it with --artifact-dir of that "
                    "directory as it sees it, or leave artifact_dir out"
                )
        elif not await server.has(path):
            data = await to_thread.run_sync(self._registry.file_of, artifact)
            await server.put(path, data)
