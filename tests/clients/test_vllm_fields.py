"""Fields of vLLM's API: done as there, or refused with what to send instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from api.sim import MODEL, make_tokenizer
from api.sim_server import SimServer, sim_server
from tokenmill.core.config import ServerConfig

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def lenient() -> Iterator[SimServer]:
    with sim_server(ServerConfig(port=0, client_chat_templates=True)) as running:
        yield running


def text_of(answer: Any) -> str:
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("stream", [False, True])
def test_bad_words_are_not_said(server: SimServer, stream: bool) -> None:
    script = "say: one zebra"
    assert text_of(server.chat(script)) == "one zebra"
    spaced = TOKENIZER.encode(" zebra", False)
    assert len(spaced) > 1, "the word is a sequence, whose last token is forbidden"
    kept = TOKENIZER.decode(TOKENIZER.encode("one", False) + spaced[:-1])
    answer = server.chat(script, bad_words=["zebra"], stream=stream)
    if stream:
        deltas = [e["choices"][0]["delta"] for e in answer.events[:-1] if e["choices"]]
        said = "".join(delta.get("content") or "" for delta in deltas)
    else:
        said = text_of(answer)
    assert said == kept and "zebra" not in said
    assert text_of(server.complete(script, bad_words=["zebra"], max_tokens=99)) == kept
    schema = {"enum": ["zebra", "zebrX"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    both = server.chat('say: "zebra"', bad_words=["zebra"], response_format=form)
    assert text_of(both) == '"zebrX"', "beside a grammar, too"


def test_tokens_that_are_allowed_alone(server: SimServer) -> None:
    ids = TOKENIZER.encode("The quick", False)
    eos = TOKENIZER.eos_token_ids[0]
    assert text_of(server.chat("x", allowed_token_ids=[*ids, eos])).startswith("The quick")
    rest = server.complete("x", allowed_token_ids=ids, max_tokens=9, min_tokens=9).json
    assert rest["choices"][0]["finish_reason"] == "length", "the end is not allowed"
    assert rest["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("size", [3, 1, -1, 10_000])
def test_prompts_are_truncated_to_their_last_tokens(server: SimServer, size: int) -> None:
    prompt = "one two three four five say: six"
    token_ids = TOKENIZER.encode(prompt)
    answer = server.complete(
        prompt, truncate_prompt_tokens=size, echo=True, max_tokens=1, return_token_ids=True
    )
    kept = token_ids[-size:] if 0 < size < len(token_ids) else token_ids
    assert answer.json["choices"][0]["prompt_token_ids"] == kept
    assert answer.json["usage"]["prompt_tokens"] == len(kept)
    assert text_of(answer).startswith(TOKENIZER.decode(kept, skip_special_tokens=False))


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(server: SimServer) -> None:
    long = "x y " * 6000 + "say: end"
    assert server.chat(long).status == 400
    answer = server.chat(long, truncate_prompt_tokens=-1, max_tokens=50)
    assert text_of(answer) == "end" and answer.json["usage"]["prompt_tokens"] == 8192 - 50


def test_logprobs_name_tokens_by_their_ids(server: SimServer) -> None:
    wanted = [f"token_id:{i}" for i in TOKENIZER.encode("Hello", False)]
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True, "max_tokens": len(wanted)}
    chat = server.chat("say: Hello", logprobs=True, top_logprobs=1, **fields).json
    content = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == wanted
    assert bytes(b for each in content for b in each["bytes"]) == b"Hello"
    assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")
    logprobs = server.complete("say: Hello", logprobs=1, **fields).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == wanted and set(logprobs["top_logprobs"][0]) == {wanted[0]}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out(server: SimServer, stream: bool) -> None:
    script = "say: <think>Hmm.</think>Yes."
    for shown in (True, False):
        answer = server.chat(script, include_reasoning=shown, stream=stream)
        assert answer.status == 200
        choices = (
            [e["choices"][0] for e in answer.events[:-1]] if stream else answer.json["choices"]
        )
        said = [choice["delta" if stream else "message"] for choice in choices]
        reasoning = "".join(each.get("reasoning_content") or "" for each in said)
        assert reasoning == ("Hmm." if shown else "")
        assert "".join(each.get("content") or "" for each in said) == "Yes."


def test_a_template_of_the_client_by_the_operators_leave(lenient: SimServer) -> None:
    own = "{% for message in messages %}{{ message.content }} say: own{% endfor %}"
    assert text_of(lenient.chat("x", chat_template=own)) == "own"
    assert text_of(lenient.chat("say: other")) == "other"
    broken = lenient.chat("x", chat_template="{% for %}").error
    assert broken["param"] == "chat_template" and "not a usable" in broken["message"]
    failing = lenient.chat("x", chat_template="{{ raise_exception('no') }}")
    assert failing.status == 400


def test_structured_outputs_on_responses(server: SimServer) -> None:
    options = {"choice": ["red", "blue"], "disable_fallback": True}
    body = {"model": MODEL, "input": "say: blue", "structured_outputs": options}
    answer = server.call("POST", "/v1/responses", body).json
    assert answer["output"][0]["content"][0]["text"] == "blue"
    two = {"text": {"format": {"type": "json_object"}}}
    error = server.call("POST", "/v1/responses", body | two).error
    assert "text.format and structured_outputs exclude each other" in error["message"]


def test_limits_are_small(server: SimServer) -> None:
    """What a word costs at each token is bounded by how many there may be."""
    many = server.chat("x", bad_words=["x"] * 1000)
    assert many.status == 400 and many.error["param"] == "bad_words"
