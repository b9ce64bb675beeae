"""What /openapi.json promises, schemathesis holds the server to: generated requests, good and bad, on every
path."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_every_operation_does_what_it_says(fuzzed: httpx.Client) -> None:
    document = fuzzed.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 15

    @settings(
        max_examples=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def each(data: st.DataObject) -> None:
        operation: Any = data.draw(st.sampled_from(operations))
        case = data.draw(operation.as_strategy())
        case.call_and_validate(base_url=str(fuzzed.base_url), checks=CHECKS, timeout=60)

    each()
