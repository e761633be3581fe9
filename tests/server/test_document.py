"""The OpenAPI document: its examples are answered, and whatever it allows is answered or refused in its own form."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from server.kit import Serve

CHECKS: Any = (not_a_server_error, content_type_conformance, response_schema_conformance)


def test_examples_are_answered(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    tried = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for example in content.get("examples", {}).values():
                answer = client.request(method, path, json=example["value"])
                assert answer.is_success, (path, example, answer.text)
                tried += 1
    assert tried >= 8


def test_every_route_of_the_contract_is_in_the_document(client: httpx2.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path, methods in {
        "/v1/completions": {"post"},
        "/v1/chat/completions": {"post"},
        "/v1/models": {"get"},
        "/v1/models/{model}": {"get"},
        "/v1/capabilities": {"get"},
        "/v1/artifacts": {"get"},
        "/v1/artifacts/{artifact_id}": {"put", "head", "get", "delete"},
        "/v1/activations/{handle}": {"get", "delete"},
        "/v1/files": {"post", "get"},
        "/v1/files/{file_id}": {"get", "delete"},
        "/v1/files/{file_id}/content": {"get"},
        "/v1/batches": {"post", "get"},
        "/v1/batches/{batch_id}": {"get"},
        "/v1/batches/{batch_id}/cancel": {"post"},
        "/v1/jobs": {"post"},
        "/v1/jobs/{job_id}": {"get", "delete"},
        "/v1/jobs/{job_id}/result": {"get"},
        "/v1/budget": {"get"},
        "/v1/usage": {"get"},
        "/v1/midstream/capabilities": {"get"},
        "/health/live": {"get"},
        "/health/ready": {"get"},
        "/metrics": {"get"},
        "/version": {"get"},
    }.items():
        assert methods <= set(paths.get(path, ())), path
    page = client.get("/")
    assert page.status_code == 200
    assert "midstream" in page.text


@pytest.mark.slow
def test_whatever_it_allows(server: Serve) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    tried, failed = 0, list[str]()
    for found in schema.get_all_operations():
        operation = found.ok()

        # the same cases in every run: what other cases find is added to the tables of refusals
        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(case=operation.as_strategy())
        def answered(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=60)

        try:
            answered()
        except BaseExceptionGroup as group:
            failed.append(f"{operation.label}: {[f'{one!s:.300}' for one in group.exceptions]}")
        tried += 1
    assert not failed, "\n".join(failed)
    assert tried > 25
    assert server.ready()
