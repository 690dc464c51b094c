"""schemathesis: what fits the server's own OpenAPI document, or just does not, is answered so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from api.sim import MAX_MODEL_LEN, MODEL
from api.sim_server import SimServer, sim_server
from tokenmill.api.openapi import document
from tokenmill.api.routes import LANGUAGE
from tokenmill.core.config import SchedulerConfig

OPERATIONS = [
    (method, path)
    for path, operations in document(LANGUAGE, "0", MODEL, needs_key=False)["paths"].items()
    for method in operations
]
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with sim_server(limits=SchedulerConfig(max_model_len=MAX_MODEL_LEN)) as running:
        yield running


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_operation(
    server: SimServer,
    method: str,
    path: str,
    mode: GenerationMode,
    pytestconfig: pytest.Config,
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[path][method.upper()]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return

    @settings(
        max_examples=pytestconfig.getoption("schema_cases") if operation.body else 5,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


def test_the_server_has_survived(server: SimServer) -> None:
    assert server.chat("say: ok").status == 200
    assert server.metric("worker_restarts_total") == 0
