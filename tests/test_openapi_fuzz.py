"""Requests made up from the service's own OpenAPI document: no 5xx, no status or body that it does not document."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks

from running import Running

load_all_checks()
CHECKED = [
    CHECKS.get_one(name) for name in ("not_a_server_error", "status_code_conformance", "content_type_conformance")
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_request_of_the_documents_kinds_breaks_the_service(tiny_service: Running) -> None:
    schema = schemathesis.openapi.from_url(tiny_service.url + "/openapi.json")
    results: list[Any] = list(schema.get_all_operations())
    operations = [result.ok() for result in results]

    assert {operation.path for operation in operations} >= {"/logprobs", "/v1/completions", "/generate", "/info"}
    for operation in operations:
        fuzz(operation)
    assert tiny_service.get("/readyz").status_code == 200


def fuzz(operation: Any) -> None:
    @settings(
        max_examples=40 if operation.method == "post" else 3,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def answered(case: Any) -> None:
        case.call_and_validate(checks=CHECKED, timeout=30)

    answered()
