"""Images in calls, over a simulated engine, by the clients of OpenAI and Anthropic."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from io import BytesIO, StringIO
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI
from PIL import Image

from api.sim import MODEL, make_loader, make_tokenizer
from api.sim_server import GENEROUS_S, KIND, SimServer, sim_server, wait_until
from tokenmill.__main__ import run
from tokenmill.api.protocol.images import pixel_limits
from tokenmill.bench.client.synthetic_images import synthetic_image
from tokenmill.cli.chat.chat_images import ImagePrompts
from tokenmill.cli.worker_commands import _images
from tokenmill.core.config import PoolConfig, RouterConfig, SchedulerConfig
from tokenmill.core.images import VisionConfig
from tokenmill.core.types import TokenmillError
from tokenmill.vision import processor
from vision.pictures import data_url, empty_png, file_of, gif, mutated, photo, seeds

PNG = file_of(photo(128, 96), "PNG")  # 4 x 3 tokens
URL = data_url(PNG)
NUM_TOKENS = 12
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
STALL_S = 10.0  # a stream that is so long without a token hangs, on a busy machine too
NUM_FUZZED = int(os.environ.get("TOKENMILL_FUZZED_IMAGES", "200"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    (path / "a.png").write_bytes(PNG)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SimServer]:
    vision = VisionConfig(folder=str(folder), max_images=4, cache_bytes=16 * 2**20)
    limits = SchedulerConfig(max_model_len=1024)
    pool, router = PoolConfig(workers=2), RouterConfig(policy="kv")
    with sim_server(limits=limits, vision=vision, pool=pool, router=router) as running:
        yield running


@pytest.fixture(scope="module")
def openai(server: SimServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def anthropic(server: SimServer) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


def image(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def ask(client: OpenAI, *parts: dict[str, Any], **fields: Any) -> Any:
    messages: Any = [user(*parts)]
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def prompt_of(server: SimServer, *messages: dict[str, Any]) -> list[str]:
    body = {"messages": list(messages), "return_token_strs": True}
    answer = server.call("POST", "/tokenize", body)
    assert answer.status == 200, answer.body
    strings: list[str] = answer.json["token_strs"]
    return strings


def num_image_tokens(server: SimServer, part: dict[str, Any]) -> int:
    return prompt_of(server, user(part)).count("<|image_pad|>")


def test_an_image_stands_where_it_was_sent(server: SimServer) -> None:
    tokens = prompt_of(server, user(text("before"), image(), text("after"), image()))
    image_tokens = ["<|vision_start|>", *["<|image_pad|>"] * NUM_TOKENS, "<|vision_end|>"]
    start = tokens.index("<|vision_start|>")
    assert tokens[start : start + NUM_TOKENS + 2] == image_tokens
    assert tokens.count("<|image_pad|>") == 2 * NUM_TOKENS
    assert "after" in "".join(tokens[start + NUM_TOKENS + 2 :]).replace("Ġ", " ")


def test_chat_completions(openai: OpenAI) -> None:
    answer = ask(openai, image(), text("say: a cat"))
    assert answer.choices[0].message.content == "a cat"
    assert answer.usage.prompt_tokens_details.image_tokens == NUM_TOKENS
    assert answer.usage.prompt_tokens > NUM_TOKENS
    plain = ask(openai, text("say: no image"))
    assert plain.usage.prompt_tokens_details.image_tokens is None


def test_streams_say_image_tokens(openai: OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(ask(openai, image(), text("say: a"), stream=True, stream_options=options))
    assert chunks[-1].usage.prompt_tokens_details.image_tokens == NUM_TOKENS


def test_several_images_and_turns(openai: OpenAI) -> None:
    other = data_url(file_of(photo(64, 64, 3), "WEBP"))
    messages: Any = [
        {"role": "system", "content": "be kind"},
        user(image(), text("what is it?")),
        {"role": "assistant", "content": "a cat"},
        user(text("and these: say: a dog"), image(other), image()),
    ]
    answer = openai.chat.completions.create(model=MODEL, messages=messages)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == 2 * NUM_TOKENS + 4


def test_tools_and_schemas(openai: OpenAI) -> None:
    script = 'say: <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": TOOL}]
    answer = ask(openai, image(), text(script), tools=tools)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "f"
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    answer = ask(openai, image(), text('say: {"x": 1}'), response_format=schema)
    assert answer.choices[0].message.content == '{"x": 1}'
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": [image(), text("say: ok")]}
    earlier: Any = {"role": "assistant", "tool_calls": [call.model_dump()]}
    answer = openai.chat.completions.create(
        model=MODEL, messages=[user(text("go")), earlier, result], tools=tools
    )  # type: ignore[call-overload]
    assert answer.usage.prompt_tokens_details.image_tokens == NUM_TOKENS


def test_responses(openai: OpenAI) -> None:
    content: Any = [
        {"type": "input_text", "text": "say: a cat"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    first = openai.responses.create(model=MODEL, input=[{"role": "user", "content": content}])
    assert first.output_text == "a cat"
    assert first.usage.input_tokens_details.image_tokens == NUM_TOKENS
    second = openai.responses.create(
        model=MODEL, input="say: still a cat", previous_response_id=first.id
    )
    assert second.output_text == "still a cat"
    assert second.usage.input_tokens_details.image_tokens == NUM_TOKENS
    items = openai.responses.input_items.list(first.id)
    assert items.data[0].content[1].type == "input_image"


def test_messages(anthropic: Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    block = {"type": "image", "source": source}
    content: Any = [block, {"type": "text", "text": "say: a cat"}]
    messages: Any = [{"role": "user", "content": content}]
    answer = anthropic.messages.create(model=MODEL, max_tokens=20, messages=messages)
    assert answer.content[0].text == "a cat"
    counted = anthropic.messages.count_tokens(model=MODEL, messages=messages)
    cached = answer.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == answer.usage.input_tokens + cached > NUM_TOKENS
    assert answer.usage.model_extra == {"input_tokens_details": {"image_tokens": NUM_TOKENS}}
    with anthropic.messages.stream(model=MODEL, max_tokens=20, messages=messages) as stream:
        usage = stream.get_final_message().usage
    assert usage.model_extra == {"input_tokens_details": {"image_tokens": NUM_TOKENS}}
    content[0] = block | {"max_pixels": 4 * 1024}
    answer = anthropic.messages.create(model=MODEL, max_tokens=20, messages=messages)
    assert answer.usage.model_extra == {"input_tokens_details": {"image_tokens": 2}}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    turns: Any = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "say: seen"}]},
    ]
    tools: Any = [{"name": "f", "input_schema": {"type": "object"}}]
    answer = anthropic.messages.create(model=MODEL, max_tokens=9, messages=turns, tools=tools)
    assert answer.content[0].text == "seen"


def test_limits_of_pixels(server: SimServer) -> None:
    large = data_url(file_of(photo(640, 640), "JPEG"))  # 400 tokens, the server's limit is 256
    assert num_image_tokens(server, image(large)) == 256
    assert num_image_tokens(server, image(large, detail="high")) == 256
    assert num_image_tokens(server, image(max_pixels=6 * 1024)) == 4
    assert num_image_tokens(server, image() | {"max_pixels": 4 * 1024}) == 2
    assert num_image_tokens(server, image(min_pixels=100 * 1024)) == 108
    assert num_image_tokens(server, {"type": "image_url", "image_url": URL}) == NUM_TOKENS


def test_detail_low_is_less(folder: Path) -> None:
    loader = make_loader(VisionConfig(max_pixels=2**20), make_tokenizer(sees=True))
    assert pixel_limits(loader.processor, "low", None, None).high == 512 * 512
    for detail in ("high", "auto", "original", None):
        assert pixel_limits(loader.processor, detail, None, None).high == 2**20  # type: ignore[arg-type]
    loader.close()


def test_kwargs_hold_for_all_images(openai: OpenAI) -> None:
    extra = {"mm_processor_kwargs": {"max_pixels": 1024}}
    answer = ask(openai, image(), image(max_pixels=6 * 1024), text("say: x"), extra_body=extra)
    assert answer.usage.prompt_tokens_details.image_tokens == 1 + 4


def test_files_of_the_folder(openai: OpenAI, folder: Path) -> None:
    answer = ask(openai, image((folder / "a.png").as_uri()), text("say: x"))
    assert answer.usage.prompt_tokens_details.image_tokens == NUM_TOKENS


def test_chat_with_an_image(
    server: SimServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("say: a cat\nsay: a dog\n/reset\nsay: a cow\n"))
    chat = ["chat", "--max-tokens", "20", "--url", server.url]  # without /v1, as with bench
    arguments = [*chat, "--image", str(folder / "a.png")]
    assert run(arguments) == 0
    assert capsys.readouterr().out == "a cat\na dog\na cow\n"
    assert run([*arguments[:-1], "none.png"]) == 1
    assert "--image none.png: No such file" in capsys.readouterr().err


def test_prompts_of_a_model_in_this_process() -> None:
    tokenizer = make_tokenizer(sees=True)
    loader = make_loader(VisionConfig(), tokenizer)
    messages = [user(image(), text("hi")), {"role": "assistant", "content": "yes"}]
    token_ids, spans = ImagePrompts(loader.processor, 1024).encode(tokenizer, messages)
    (span,) = spans
    assert span.num_tokens == NUM_TOKENS == token_ids.count(loader.processor.token_id)
    assert set(token_ids[span.offset : span.end]) == {loader.processor.token_id}
    loader.close()


def test_a_model_in_this_process_refuses_images_before_the_first_message(folder: Path) -> None:
    loader = make_loader(VisionConfig(), make_tokenizer(sees=True))
    prompts = ImagePrompts(loader.processor, 1024)
    prompts.check([str(folder / "a.png")])
    broken = folder / "broken.png"
    broken.write_bytes(PNG[:200])
    with pytest.raises(TokenmillError, match="it cannot be used: it cannot be decoded"):
        prompts.check([str(broken)])
    large = folder / "large.png"
    for file, limit in (
        (empty_png(30_000, 30_000), "it has 30000 x 30000 pixels, and 64000000 are allowed"),
        (bytes(2**25), "it is larger than 20971520 bytes"),
        (file_of(photo(4000, 4000), "JPEG"), "it has 256 tokens, and this model's context has 99"),
    ):
        large.write_bytes(file)
        with pytest.raises(TokenmillError) as caught:
            ImagePrompts(loader.processor, 99).check([str(large)])
        said = f"--image {large}: it cannot be used: {limit}; give a smaller one"
        assert str(caught.value) == said, "no flag of a server, and no field of a call"
    with pytest.raises(TokenmillError, match="a URL needs a server"):
        prompts.check(["https://example.com/a.png"])
    with pytest.raises(TokenmillError, match="takes text only"):
        ImagePrompts(None, 1024).check([str(folder / "a.png")])
    loader.close()


def test_a_model_in_this_process_says_that_images_need_pillow(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make_loader(VisionConfig(), make_tokenizer(sees=True))
    loader.close()
    monkeypatch.setattr(processor, "find_spec", lambda name: None)
    with pytest.raises(TokenmillError, match=r"need Pillow: pip install 'pillow"):
        ImagePrompts(loader.processor, 1024).check([str(folder / "a.png")])


def test_a_benchmark_with_images(
    server: SimServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*("--url", f"{server.url}/v1", "--num-requests", "4", "--warmup-requests", "0")]
    flags += ["--concurrency", "2", "--output-len", "2", "--no-audit", "--processes", "1"]
    assert run(["bench", "endpoint", *flags, "--images", "2", "--image-size", "128x64"]) == 0
    out = capsys.readouterr().out
    point = json.loads(out.splitlines()[-1])["points"][0]
    assert (point["num_completed"], point["num_image_tokens"]) == (4, 4 * 2 * 8)
    assert "image tokens" in out
    lines = [{"prompt": "count: 2", "images": ["a.png"]}, {"messages": [user(image())]}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--json"]
    assert run(["bench", "endpoint", *flags, *prompts]) == 0
    point = json.loads(capsys.readouterr().out.splitlines()[-1])["points"][0]
    assert point["num_image_tokens"] == 4 * NUM_TOKENS
    for line in lines:
        (folder / "prompts.jsonl").write_text(json.dumps(line))
        assert run(["bench", "endpoint", *flags, *prompts, "--api", "completions"]) != 0
        assert '"messages" and "images" need --api chat' in capsys.readouterr().err
    assert run(["bench", "endpoint", *flags, "--images", "1", "--api", "completions"]) != 0
    assert "--images are parts of a chat" in capsys.readouterr().err
    assert run(["bench", "endpoint", *flags, "--image-size", "12"]) != 0
    assert "WIDTHxHEIGHT" in capsys.readouterr().err


def test_synthetic_images_are_images_of_their_number() -> None:
    one, same, other = (synthetic_image("k", number, (50, 70)) for number in (1, 1, 2))
    assert one == same != other
    with Image.open(BytesIO(base64.b64decode(one.partition(",")[2]))) as picture:
        assert (picture.size, picture.mode) == ((50, 70), "RGB")
        colours = picture.getpixel((0, 0)), picture.getpixel((15, 15)), picture.getpixel((16, 0))
    assert colours[0] == colours[1] != colours[2]


WRONG = [
    (image("data:image/png;base64,AAAA"), "no readable PNG"),
    (image(data_url(PNG[:200])), "cannot be decoded"),
    (
        image(data_url(empty_png(30_000, 30_000))),
        "it has 30000 x 30000 pixels, and 64000000 are allowed; send a smaller one",
    ),
    (image(data_url(gif(65_535, 65_535))), "it has 65535 x 65535 pixels, and 64000000 are allowed"),
    (image(data_url(file_of(Image.new("RGB", (900, 4)), "PNG"))), "200 times"),
    (image(data_url(file_of(Image.new("I;16", (40, 40)), "PNG"))), "8 bits a channel"),
    (image("https://example.com/a.png"), "--image-host example.com"),
    (image("http://169.254.169.254/meta"), "--image-host"),
    (image("file:///etc/passwd"), "not in the folder"),
    (image("a.png"), "send https://"),
    (image("data:video/mp4;base64,AAAA"), "it is a video"),
    (image(max_pixels=10**9), "image_url.max_pixels: 1000000000 is over the server's limit"),
    (image() | {"max_pixels": 1000}, "content[1].max_pixels: 1000 is less than one token has"),
    (image(min_pixels=9000, max_pixels=8000), "send 8000 at most"),
    (image(detail="most"), "'high'"),
    (
        image(max_pixel=4096),
        "content[1].image_url.max_pixel: unknown or unsupported field; did you mean 'max_pixels'? "
        "Otherwise leave it out. Allowed here: min_pixels, max_pixels, url, detail, format",
    ),
    (image() | {"max_pixel": 4096}, "content[1].max_pixel: unknown or unsupported field; did you"),
    (image() | {"crop": [0, 0, 9, 9]}, "leave it out. Allowed here: type, min_pixels, max_pixels"),
    (image() | {"prompt": "a cat"}, "leave it out. Allowed here: type"),
    ({"type": "image_url", "url": URL, "image_url": {"url": URL}}, "send it inside 'image_url'"),
    ({"type": "image_url"}, "image_url"),
    ({"type": "video_url", "video_url": {"url": "x"}}, "videos are not taken"),
    ({"type": "input_audio", "input_audio": {}}, "audio"),
    ({"type": "input_image", "image_url": URL}, "as 'image_url' in chats"),
]


@pytest.mark.parametrize(("part", "problem"), WRONG)
def test_wrong_images_are_named(server: SimServer, part: dict[str, Any], problem: str) -> None:
    body = {"messages": [user(text("what?"), part)]}
    answer = server.call("POST", "/v1/chat/completions", body)
    assert answer.status == 400
    assert problem in answer.error["message"]
    assert str(answer.error["param"]).startswith("messages[0].content[1]")


def test_wrong_images_of_other_apis_are_named_where_they_stand(server: SimServer) -> None:
    part = {"type": "input_image", "image_url": "data:,x"}
    body: Any = {"instructions": "x", "input": [{"role": "user", "content": [part]}]}
    answer = server.call("POST", "/v1/responses", body)
    assert (answer.status, answer.error["param"]) == (400, "input[0].content[0]")
    body["input"][0] |= {"role": "system"}
    assert "role 'user'" in server.call("POST", "/v1/responses", body).error["message"]
    block = {"type": "image", "source": {"type": "url", "url": "data:,x"}}
    body = {"model": MODEL, "max_tokens": 1, "system": "x"}
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "x"}, block]}]
    answer = server.call("POST", "/v1/messages", body)
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("messages[0].content[1]: the image cannot")


def test_unknown_fields_of_images_of_other_apis_are_named(server: SimServer) -> None:
    part = {"type": "input_image", "image_url": URL, "max_pixel": 4096}
    answer = server.call("POST", "/v1/responses", {"input": [user(part)]})
    assert (answer.status, answer.error["param"]) == (400, "input[0].content[0].max_pixel")
    assert "did you mean 'max_pixels'?" in answer.error["message"]
    source = {"type": "url", "url": URL}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"source": source, "max_pixel": 4096}, "max_pixel: unknown or unsupported field; did you"),
        ({"source": source | {"headers": {}}}, "source.headers: unknown or unsupported field"),
        (
            {"source": source, "transformations": {"oversized_image": "error"}},
            "images over the limit are always scaled down; send 'downsize'",
        ),
    ]
    for fields, problem in wrong:
        body = {"model": MODEL, "max_tokens": 1, "messages": [user({"type": "image", **fields})]}
        answer = server.call("POST", "/v1/messages", body)
        assert answer.status == 400 and problem in answer.json["error"]["message"]


def test_fields_of_images_that_clients_send_and_that_change_nothing(server: SimServer) -> None:
    cached, breakpoint = {"type": "ephemeral"}, {"mode": "explicit"}
    part = image(format="image/png", next_year=None) | {"cache_control": cached, "uuid": "u"}
    assert num_image_tokens(server, part | {"prompt_cache_breakpoint": breakpoint}) == NUM_TOKENS
    part = {"type": "input_image", "image_url": URL, "file_id": None, "detail": "auto"}
    part |= {"prompt_cache_breakpoint": breakpoint}
    answer = server.call("POST", "/v1/responses", {"input": [user(part)]})
    assert answer.status == 200, answer.body
    block = {"type": "image", "source": {"type": "url", "url": URL}, "cache_control": cached}
    block |= {"transformations": {"oversized_image": "downsize"}}
    body = {"model": MODEL, "max_tokens": 1, "messages": [user(block)]}
    answer = server.call("POST", "/v1/messages", body)
    assert answer.status == 200, answer.body


def test_images_in_the_form_of_another_api_say_the_right_form(server: SimServer) -> None:
    body: Any = {"input": [{"role": "user", "content": [image()]}]}
    answer = server.call("POST", "/v1/responses", body)
    assert answer.status == 400 and "'input_image' in responses" in answer.error["message"]
    body = {"model": MODEL, "max_tokens": 1, "messages": [user(image())]}
    answer = server.call("POST", "/v1/messages", body)
    assert answer.status == 400
    assert "'image' in Anthropic's API" in answer.json["error"]["message"]


def test_a_limit_for_all_images_is_named_where_it_stands(server: SimServer) -> None:
    body = {"messages": [user(image())], "mm_processor_kwargs": {"max_pixels": 1000}}
    answer = server.call("POST", "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, "mm_processor_kwargs.max_pixels")


def test_placeholders_in_texts_are_refused(server: SimServer) -> None:
    answer = server.call(
        "POST", "/v1/chat/completions", {"messages": [user(text("<|image_pad|>"))]}
    )
    assert answer.status == 400
    assert "1 placeholders for 0 images" in answer.error["message"]
    answer = server.complete("a <|image_pad|>")
    assert answer.status == 400
    assert "stands for an image" in answer.error["message"]


def test_too_many_images_and_too_long_prompts(server: SimServer, openai: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="5 images; 4 are allowed"):
        ask(openai, *[image()] * 5)
    large = data_url(file_of(photo(512, 512), "PNG"))
    with pytest.raises(BadRequestError, match="context length is 1024 tokens"):
        ask(openai, *[image(large)] * 4)


def test_a_body_of_200_mb_is_refused_by_its_size(server: SimServer) -> None:
    """The answer comes though most of the body does not."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{KIND}"
    head += f"Content-Length: {200 * 2**20}\r\n\r\n"
    with socket.create_connection(server.address, timeout=GENEROUS_S) as connection:
        connection.sendall(head.encode() + bytes(2**16))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert server.chat("say: on").status == 200


def test_the_same_image_is_a_prefix_hit_and_another_is_not(openai: OpenAI) -> None:
    """The router sends a conversation to the worker that has its image cached."""

    def cached(url: str) -> int:
        answer = ask(openai, image(url), text("say: x"), max_tokens=1)
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    first, second = (data_url(file_of(photo(512, 480, seed), "PNG")) for seed in (7, 8))
    assert cached(first) < 32
    assert cached(second) < 32
    for url in (first, second, first):
        assert cached(url) >= 240


def longest_gap(server: SimServer, over: Event) -> float:
    """Seconds between two pieces of streams of text that follow each other until `over`."""
    longest = 0.0
    while not over.is_set():
        with server.open_stream("count: 400", max_tokens=400) as stream, stream.makefile() as lines:
            before = None
            for line in lines:
                if line.startswith("data: [DONE]"):
                    break
                if line.startswith("data: "):
                    now = monotonic()
                    longest = max(longest, now - (before or now))
                    before = now
            else:
                pytest.fail("a stream ended without [DONE]")
    return longest


def test_fuzzed_images_never_fail_the_server(server: SimServer) -> None:
    """Streams of text go on meanwhile, and every call ends in an answer or a 400.

    The server's memory is that after the first fifth of the calls, or little more.
    """
    source, files = random.Random(1), seeds()

    def body() -> dict[str, Any]:
        url = data_url(mutated(source.choice(files), source))
        sampled = {"stream": bool(source.randrange(2)), "max_tokens": 4}
        return {"messages": [user(image(url), text("hi"))], **sampled}

    def send(body: dict[str, Any]) -> int:
        answer = server.call("POST", "/v1/chat/completions", body)
        if answer.status == 200 and body["stream"]:
            assert answer.events[-1] == "[DONE]"
        return answer.status

    def say(index: int) -> str:
        *events, last = server.chat(f"say: {index}", stream=True).events
        assert last == "[DONE]"
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)

    statuses: Counter[int] = Counter()
    grown: list[int] = []
    over = Event()
    with ThreadPoolExecutor(6) as threads, ExitStack() as ending:
        gap = threads.submit(longest_gap, server, over)
        ending.callback(over.set)
        for _ in range(5):
            said = threads.map(say, range(NUM_FUZZED // 50))
            sent = [threads.submit(send, body()) for _ in range(NUM_FUZZED // 5)]
            statuses.update(each.result() for each in sent)
            assert list(said) == [str(index) for index in range(NUM_FUZZED // 50)]
            grown.append(resident_kib(server.process.pid))
    print(f"{statuses.total()} calls {dict(statuses)}, KiB of the server {grown}")
    print(f"the longest gap of a stream of text beside them: {1e3 * gap.result():.0f} ms")
    assert set(statuses) == {200, 400}
    assert 0 < gap.result() < STALL_S
    assert grown[-1] - grown[0] < 100 * 1024
    assert server.chat("say: still here").json["choices"][0]["message"]["content"] == "still here"
    wait_until(lambda: server.metric("requests_running") == 0, "no request is left")


def resident_kib(pid: int) -> int:
    """The memory of a process; 0 where /proc is not to be had."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_images_are_counted(server: SimServer, openai: OpenAI) -> None:
    before = counted(server)
    for part in (image(), image(data_url(PNG[:200])), image("https://example.com/a.png")):
        with suppress(BadRequestError):
            ask(openai, part, text("say: a"))
    after = counted(server)
    more = {name: after[name] - before.get(name, 0.0) for name in after}
    assert more["images_total"] == 3 and more["image_tokens_total"] == NUM_TOKENS
    assert more['images_refused_total{stage="decode"}'] == 1
    assert more['images_refused_total{stage="fetch"}'] == 1
    view = server.call("GET", "/workers").json["images"]
    assert view["images"] == after["images_total"] and view["decoded"] >= 1
    assert f"{view['images']} images ({view['tokens']} tokens)" in _images(view)


def counted(server: SimServer) -> dict[str, float]:
    """The metrics of images, without the label that all have."""
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    found = [line.removeprefix("tokenmill_") for line in lines if line.startswith("tokenmill_im")]
    pairs = [line.rsplit(" ", 1) for line in found]
    clean = [(re.sub(r'model_name="[^"]*",?', "", name), value) for name, value in pairs]
    return {name.replace("{}", ""): float(value) for name, value in clean}
