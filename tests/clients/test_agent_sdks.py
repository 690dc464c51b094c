"""Frameworks for agents over the newest SDKs: a tool is called, and a typed answer is read."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import pytest
from huggingface_hub import InferenceClient
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from api.sim import MODEL
from api.sim_server import SimServer

agents.set_tracing_disabled(True)  # traces would go to OpenAI

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


class City(BaseModel):
    city: str


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"say: It rains in {city}"


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_openai_agents(server: SimServer, api: str) -> None:
    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            kinds: Any = {
                "responses": agents.OpenAIResponsesModel,
                "chat": agents.OpenAIChatCompletionsModel,
            }
            model = kinds[api](model=MODEL, openai_client=client)
            tool = agents.function_tool(weather)
            agent = agents.Agent(name="a", instructions="Answer.", model=model, tools=[tool])
            result = await agents.Runner.run(agent, f"say: {CALL}")
            assert result.final_output == "It rains in Bern"
            typed = agents.Agent(name="b", model=model, output_type=City)
            result = await agents.Runner.run(typed, 'say: {"city": "Bern"}')
            assert result.final_output == City(city="Bern")

    asyncio.run(main())


def test_pydantic_ai(server: SimServer) -> None:
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="-")
    model = OpenAIChatModel(MODEL, provider=provider)
    agent = Agent(model, tools=[weather])
    assert agent.run_sync(f"say: {CALL}").output == "It rains in Bern"
    typed: Any = Agent(model, output_type=NativeOutput(City))
    assert typed.run_sync('say: {"city": "Bern"}').output == City(city="Bern")


def test_huggingface_hub(server: SimServer) -> None:
    client = InferenceClient(base_url=f"{server.url}/v1", api_key="-")
    said: Any = {"role": "user", "content": "say: hello"}
    assert client.chat_completion([said], model=MODEL).choices[0].message.content == "hello"
    form: Any = {"type": "json_object", "value": City.model_json_schema()}
    typed: Any = {"role": "user", "content": 'say: {"city": "Bern"}'}
    answer = client.chat_completion([typed], model=MODEL, response_format=form)
    content = answer.choices[0].message.content
    assert content is not None and City.model_validate_json(content) == City(city="Bern")
