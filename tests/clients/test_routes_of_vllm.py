"""Routes of vLLM that benchmarks call: AIPerf resets the prefix cache, lm-eval asks for tokens."""

from __future__ import annotations

import dataclasses

import pytest

from api.sim import make_tokenizer
from api.sim_server import SimServer, sim_server
from tokenmill.core.config import PoolConfig, ServerConfig

LONG = "one two three four five six seven eight nine ten " * 5


@pytest.mark.parametrize("fronts", [1, 2])
def test_the_prefix_cache_is_reset_by_the_operator(fronts: int) -> None:
    config = dataclasses.replace(ServerConfig(port=0), fronts=fronts)
    with sim_server(config, pool=PoolConfig(workers=2)) as server:

        def cached() -> int:
            usage = [server.chat(LONG).json["usage"] for _ in range(6)]
            return min(each["prompt_tokens_details"]["cached_tokens"] for each in usage[4:])

        def first_cached() -> int:
            usage = server.chat(LONG).json["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert first_cached() == 0 and cached() > 0
        refused = server.call("POST", "/reset_prefix_cache")
        assert refused.status == 401 and first_cached() > 0
        token = {"authorization": f"Bearer {server.token}"}
        assert server.call("POST", "/reset_prefix_cache", None, token).status == 200
        assert first_cached() == 0, "at every worker"
        assert cached() > 0


def test_tokenizer_info_has_what_a_client_renders_with(server: SimServer) -> None:
    info = server.call("GET", "/tokenizer_info").json
    tokenizer = make_tokenizer()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None
    assert info["chat_template"] == tokenizer.chat_template
    assert (info["vocab_size"], info["model_max_length"]) == (tokenizer.vocab_size, 8192)


def test_a_lark_grammar_is_refused_by_its_name(server: SimServer) -> None:
    lark = 'start: "yes" | "no"\n%import common.WS'
    for fields, param in (
        ({"guided_grammar": lark}, "guided_grammar"),
        ({"structured_outputs": {"grammar": lark}}, "structured_outputs.grammar"),
    ):
        error = server.chat("x", **fields).error
        assert error["param"] == param and "Lark" in error["message"]
        assert "root ::=" in error["message"]
    ebnf = server.chat("say: yes", guided_grammar='root ::= "yes" | "no"')
    assert ebnf.json["choices"][0]["message"]["content"] == "yes"
