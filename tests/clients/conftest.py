"""One simulated server for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from anthropic import Anthropic
from openai import OpenAI

from api.sim_server import SimServer, sim_server
from tokenmill.core.config import SchedulerConfig, ServerConfig


@pytest.fixture(scope="session")
def server() -> Iterator[SimServer]:
    limits = SchedulerConfig(max_model_len=8192)
    with sim_server(ServerConfig(port=0), limits) as running:
        yield running


@pytest.fixture(scope="session")
def openai(server: SimServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="session")
def anthropic(server: SimServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="-", max_retries=0) as opened:
        yield opened
