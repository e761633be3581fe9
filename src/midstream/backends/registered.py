"""What every backend keeps beside its engine: artifacts, and what it has said."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.formats.artifacts import ArtifactRegistry, default_registry


class Registered:
    """A registry of artifacts, the user's own unless another is given, and the reports that were made."""

    def __init__(self, registry: ArtifactRegistry | None = None) -> None:
        self.registry = registry or default_registry()
        self._reported: set[str] = set()

    def stage_artifacts(self, payloads: Mapping[str, bytes]) -> None:
        """Keep artifacts (id → the bytes of its file) in the registry; hashed again."""
        for artifact_id, data in payloads.items():
            self.registry.put_bytes(artifact_id, data)

    def report_once(self, key: str) -> bool:
        """Whether this is the first report under `key`: what would repeat is said once."""
        first = key not in self._reported
        self._reported.add(key)
        return first
