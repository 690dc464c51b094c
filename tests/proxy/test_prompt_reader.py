"""Prompts of long bodies are read by another process, and as those of short ones are."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from api.sim import TEMPLATE, make_tokenizer
from tokenmill.api.bodies.body_processes import LONG_BODY_BYTES
from tokenmill.api.errors import ApiError
from tokenmill.proxy import prompt_reader, tenants
from tokenmill.proxy.call_prompt import RoutedPrompt, read_prompt
from tokenmill.proxy.prompt_reader import PromptReader
from tokenmill.proxy.tenants import Tenant
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

LONG = "Hello there, how are you? " * (LONG_BODY_BYTES // 20)
TURNS = [{"role": "user", "content": LONG}]
CHAT = "/v1/chat/completions"
CALLS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS, "cache_salt": "s"},
    "/v1/completions": {"prompt": LONG},
    "/v1/messages": {"max_tokens": 9, "messages": TURNS},
    "/v1/responses": {"input": LONG, "previous_response_id": "resp_1"},
    "/v1/embeddings": {"input": LONG},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> Iterator[PromptReader]:
    with closing(PromptReader(tokenizer, None)) as reader:
        yield reader


def encode(call: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m"} | call).encode()


def read(prompts: PromptReader, body: bytes, path: str, stays: bool = True) -> RoutedPrompt:
    async def receive() -> dict[str, Any]:
        if stays:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return asyncio.run(prompts.read("a", body, path, receive))


def essence(prompt: RoutedPrompt) -> tuple[Any, ...]:
    return list(prompt.token_ids), prompt.model, prompt.salt, prompt.previous_response_id


@pytest.mark.parametrize("path", CALLS)
def test_a_long_prompt_is_read_elsewhere_and_alike(
    path: str, prompts: PromptReader, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = encode(CALLS[path])
    expected = read_prompt(body, tokenizer, path)
    assert len(expected.token_ids) > 10_000 and expected.model == "m"
    monkeypatch.setattr(prompt_reader, "read_prompt", lambda *call: pytest.fail("read here"))
    assert essence(read(prompts, body, path)) == essence(expected)


def test_ids_of_a_long_body_are_changed_elsewhere_and_alike(
    prompts: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = Tenant("a", b"salt"), Tenant("a", b"salt")
    own = here.seal("resp_1")
    body = encode({"input": [{"type": "item_reference", "id": "msg_2"}, LONG]})
    body = body.replace(b'"model"', b'"previous_response_id": "%s", "model"' % own.encode())
    path = "/v1/responses"
    expected = here.body(path, body)
    assert b'"resp_1"' in expected and b'"msg_2-' in expected

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(tenants, "_change_ids", lambda *call: pytest.fail("changed here"))
        assert asyncio.run(prompts.opened(elsewhere, body, path, receive)) == expected
    assert elsewhere.given_ids == here.given_ids and len(here.given_ids) == 2
    with pytest.raises(ApiError, match="not a JSON object"):
        asyncio.run(prompts.opened(elsewhere, body[:-1], path, receive))


def test_a_router_gets_no_more_tokens_than_contexts_hold(prompts: PromptReader) -> None:
    body = encode({"prompt": [7] * (prompt_reader.MAX_TOKENS + 5)})
    assert len(read(prompts, body, "/v1/completions").token_ids) == prompt_reader.MAX_TOKENS


def test_nobody_reads_for_a_client_that_has_gone(prompts: PromptReader) -> None:
    with pytest.raises(ClientDisconnect):
        read(prompts, encode(CALLS[CHAT]), CHAT, stays=False)


def test_where_no_process_can_read_the_router_does(folder: Path, tmp_path: Path) -> None:
    gone, body = tmp_path / "gone", encode(CALLS[CHAT])
    shutil.copytree(folder, gone)
    tokenizer = load_tokenizer(gone)
    with closing(PromptReader(tokenizer, None)) as prompts:
        shutil.rmtree(gone)
        assert essence(read(prompts, body, CHAT)) == essence(read_prompt(body, tokenizer, CHAT))


def test_a_body_that_ends_its_process_is_routed_by_load_alone(
    prompts: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(*work: Any) -> bytes:
        raise ApiError(500, "the process that read this body was ended")

    monkeypatch.setattr(prompts._processes, "run", end)
    assert read(prompts, encode(CALLS[CHAT]), CHAT) == RoutedPrompt()
