"""A chat in which the model calls a function of yours, by the OpenAI SDK.

    tokenmill serve
    python examples/tool_calls.py "How warm is it in Bern?"

The server holds the arguments to the function's JSON schema, so any model calls it as it should; a
model that was trained with tools also chooses well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from openai import OpenAI

CITIES = {"Bern": 17.5, "Oslo": 9.0, "Quito": 14.0}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": [*CITIES]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature of a city in degrees Celsius.",
        "parameters": SCHEMA,
        "strict": True,
    },
}


def temperature(city: str) -> dict[str, Any]:
    return {"city": city, "celsius": CITIES[city]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="How warm is it in Bern?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args(arguments)
    with OpenAI(base_url=args.url, api_key=args.api_key) as client:
        model = client.models.list().data[0].id
        messages: list[Any] = [{"role": "user", "content": args.question}]
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], tool_choice="required", temperature=0
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            assert call.type == "function"
            result = temperature(**json.loads(call.function.arguments))
            print(f"{call.function.name}: {json.dumps(result)}")
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )
        stream = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=64, stream=True
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
