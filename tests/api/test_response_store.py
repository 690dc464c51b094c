"""Stored responses: their limits, and that what is read is what was put."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import get_args

import pytest
from msgspec.structs import replace as replaced

from api.sim import MODEL
from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.answers import ChatLogprob, UsageReceipt, json_encode
from tokenmill.api.responses.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    Item,
    ItemReference,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    RefusalText,
    SummaryText,
    as_stored,
    carried,
)
from tokenmill.api.responses.response_object import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
)
from tokenmill.api.responses.response_request import (
    AllowedFunctions,
    FunctionTool,
    JsonObject,
    NamedJsonSchema,
    NamedTool,
    PlainText,
    ReasoningConfig,
    TextConfig,
)
from tokenmill.api.responses.response_tools import AllowedFunction
from tokenmill.api.responses_routes import ResponseStore, page_of
from tokenmill.core.config import ServerConfig
from tokenmill.workers.fronts.stored_responses import StoredResponses


def new_entry(name: str, text: str = "x") -> tuple[ResponseObject, list[Item]]:
    content = [OutputText(text=text)]
    item = MessageItem(id=f"msg_{name}", role="assistant", content=list(content))
    response = ResponseObject(
        id=name,
        created_at=0,
        model=MODEL,
        output=[item],
        reasoning=ReasoningConfig(),
        text=TextConfig(),
    )
    return response, [MessageItem(role="user", content=text)]


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_fill_stores(monkeypatch))


def new_store(config: ServerConfig) -> tuple[ResponseStore, StoredResponses]:
    keeper = StoredResponses(config)
    return ResponseStore(keeper, config), keeper


async def _fill_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(max_stored_responses=2, stored_response_age_s=10.0)
    store, keeper = new_store(config)
    for name in ("a", "b"):
        store.put(*new_entry(name), "a")
    await store.get("a", "a")
    store.put(*new_entry("c"), "a")
    with pytest.raises(ApiError, match="no response 'b'"):
        await store.get("b", "a")
    assert [(await store.get(name, "a")).response.id for name in ("a", "c")] == ["a", "c"]
    (item,) = await store.resolve([ItemReference(id="msg_a")], "a")
    assert item.id == "msg_a"
    for items in ([ItemReference(id="msg_b")], [ItemReference(id="msg_a")]):
        with pytest.raises(ApiError, match="no item"):
            await store.resolve(items, "b")
    later, _ = new_entry("d")
    store.put(later, (await store.get("a", "a")).conversation, "a")
    with pytest.raises(ApiError, match="no response 'a'"):
        await store.delete("a", "b")
    await store.delete("a", "a")
    (again,) = await store.resolve([ItemReference(id="msg_a")], "a")
    assert again == replaced(item, status="completed"), "a later turn has it, too"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    with pytest.raises(ApiError, match=r"for 10 s\); send the conversation"):
        await store.get("a", "a")
    assert keeper.size() == (0, 0) and not keeper._items

    small, kept = new_store(replace(config, max_stored_response_bytes=3000))
    small.put(*new_entry("a"), "a")
    small.put(*new_entry("b", "x" * 900), "a")
    assert kept.size()[0] == 1, "the first one went"
    small.put(*new_entry("c", "x" * 9000), "a")
    assert (await small.get("b", "a")).response.id == "b", "c is too large to keep"
    assert kept.size()[0] == 1
    none, kept = new_store(ServerConfig(max_stored_responses=0))
    none.put(*new_entry("a"), "a")
    kept.put("b", "a", ["i"], b"x")
    assert kept.size() == (0, 0)


def test_no_account_pushes_out_what_others_have_stored() -> None:
    async def main() -> None:
        store = StoredResponses(ServerConfig(max_stored_responses=6, max_stored_response_bytes=500))
        for name in ("a1", "a2", "b1"):
            store.put(name, name[0], [f"i-{name}"], b"x" * 100)
        for number in range(20):  # many small ones, and then large ones
            store.put(f"n{number}", "noisy", [f"i-{number}"], b"x")
        for number in range(20, 40):
            store.put(f"n{number}", "noisy", [], b"x" * 99)
        for name in ("a1", "a2", "b1"):
            assert await store.get(name, name[0]) == b"x" * 100
            assert await store.find_item(f"i-{name}", name[0]) is not None
        assert await store.get("n39", "noisy") and await store.get("n37", "noisy") is None
        assert not await store.delete("a1", "noisy") and await store.delete("a1", "a")
        assert store.size()[1] <= 500

    asyncio.run(main())


def test_what_is_stored_comes_back_as_it_was() -> None:
    logprob = ChatLogprob(token="a", logprob=-0.1, bytes=[97], top_logprobs=[])
    receipt = UsageReceipt(
        gpu_seconds=0.3,
        prefill_gpu_seconds=0.1,
        decode_gpu_seconds=0.1,
        drafts_gpu_seconds=0.1,
        saved_gpu_seconds=1e-9,
    )
    output: list[OutputItem] = [
        ReasoningItem(id="rs_1", content=[ReasoningText(text="hm")], encrypted_content=carried("")),
        FunctionCallItem(
            id="fc_1", call_id="c", name="f", arguments='{"a": 1}', status="completed"
        ),
        MessageItem(
            id="msg_1", role="assistant", content=[OutputText(text="a", logprobs=[logprob])]
        ),
    ]
    context: list[Item] = [
        *output,
        MessageItem(role="developer", content="plain \u2028 text"),
        MessageItem(
            id="mine",
            role="user",
            status="incomplete",
            content=[
                InputText(text=""),
                InputImage(image_url="data:,", detail="low", min_pixels=9),
            ],
        ),
        MessageItem(role="assistant", content=[RefusalText(refusal="no"), OutputText(text="\x00")]),
        FunctionCallOutputItem(call_id="c", output="text"),
        FunctionCallOutputItem(call_id="c", output=[InputText(text="x"), InputImage()]),
        ReasoningItem(summary=[SummaryText(text="s")], content=[]),
    ]
    kinds = {type(item) for item in context}
    assert kinds == set(get_args(Item)), "each kind of item is here"
    usage = ResponseUsage(
        input_tokens=1,
        input_tokens_details=InputTokensDetails(),
        output_tokens=2,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=1),
        total_tokens=3,
        receipt=receipt,
    )
    schema = {"type": "integer", "maximum": 10**30, "default": [None, True, 0.1, {"$ref": "#"}]}
    tools = [FunctionTool(name="f", parameters=schema), FunctionTool(name="g", strict=True)]
    choices = (
        "auto",
        NamedTool(name="f"),
        AllowedFunctions(mode="auto", tools=[AllowedFunction(name="f")]),
    )
    formats = (None, PlainText(), JsonObject(), NamedJsonSchema(schema=schema, name="s"))

    async def main() -> None:
        store, _ = new_store(ServerConfig())
        for number, (choice, form) in enumerate(itertools.product(choices, formats)):
            response = ResponseObject(
                id=str(number),
                created_at=1,
                model=MODEL,
                status="failed",
                output=output,
                usage=usage if number else None,
                error=ResponseFault(code="server_error", message="m") if number else None,
                incomplete_details=IncompleteDetails(reason="max_output_tokens"),
                metadata={"a": "b"},
                reasoning=ReasoningConfig(effort="low"),
                text=TextConfig(format=form, verbosity="low"),
                tool_choice=choice,
                tools=tools,
            )
            store.put(response, context, "a")
            found = await store.get(str(number), "a")
            assert found.response == response
            assert json_encode(found.response) == json_encode(response)
        ids = [item.id for item in found.context]
        assert len(set(ids)) == len(ids) and None not in ids
        for item, given in zip(found.context, context, strict=True):
            assert item == as_stored(replaced(given, id=item.id))
            assert await store.resolve([ItemReference(id=str(item.id))], "a")
        again = await store.resolve([ItemReference(id=str(i)) for i in ids], "a")
        assert len(again) == len(ids)

    asyncio.run(main())


def test_pages_of_items() -> None:
    items: list[Item] = [MessageItem(id=str(n), role="user", content="x") for n in range(5)]
    page = page_of(items, 2, True, None)
    assert ([i.id for i in page.data], page.has_more, page.last_id) == (["4", "3"], True, "3")
    page = page_of(items, 9, True, "3")
    assert ([i.id for i in page.data], page.has_more) == (["2", "1", "0"], False)
    with pytest.raises(ApiError, match="after: no input item"):
        page_of(items, 2, True, "nine")
