"""The HTTP front beside vLLM's: CPU time of a token and of a request, in one run.

    python scripts/front_peers.py VENV/bin/python

vLLM has to be installed for that interpreter, one of its own (`pip install vllm`). Its API
server runs with its own renderer, output processor and detokenizer over an engine core of this
file, which gives every request one token a step; our server has the simulated engine of `bench
frontend`. Both get the calls of `bench frontend` for a model with our tokenizer, in turns. vLLM's
core runs in the API process, so that decoding the messages of an engine, which we do, costs it
nothing; what its core itself takes is counted as vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SERVE_VLLM = "--serve-vllm"
MODEL = "simulated"
CONTEXT = 4096
# streams, tokens of each, tokens per second that the engine offers
LOADS = ((128, 200, 5_000), (128, 400, 80_000), (1000, 30, 5_000))
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * CONTEXT,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("vllm_python", help="a Python that has vLLM")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        word = write_model(Path(folder))
        for num_streams, num_tokens, offered in LOADS * args.rounds:
            step_ms = f"{1000 * num_streams / offered:g}"
            flags = [f"--num-streams={num_streams}", f"--stream-tokens={num_tokens}"]
            role = ["-P", "-m", "tokenmill", "bench", "frontend-server", f"--step-ms={step_ms}"]
            theirs = [args.vllm_python, __file__, SERVE_VLLM, folder, step_ms, str(word)]
            for name, command in (("ours", [sys.executable, *role, *flags]), ("vLLM", theirs)):
                measure_server(name, command, num_streams, num_tokens, offered)


def write_model(folder: Path) -> int:
    """A model folder with our tokenizer and no weights; returns the id of a word."""
    from tokenmill.console import fetch
    from tokenmill.settings import SETTINGS
    from tokenmill.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(fetch(SETTINGS["model"].default))
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.named_tokens}
    named["chat_template"] = tokenizer.chat_template or ""
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = CONFIG | {"vocab_size": tokenizer.vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    return tokenizer.encode(" word")[0]


def measure_server(
    name: str, command: list[str], num_streams: int, num_tokens: int, offered: int
) -> None:
    """Start a server, load it as `bench frontend` does, and print its figures."""
    from tokenmill.bench.commands.frontend import measure
    from tokenmill.bench.front_load import FrontLoad

    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(line.strip() for line in process.stdout if line.startswith("http://"))
        point = measure(FrontLoad(url, MODEL), num_streams, num_tokens, process.pid)
    finally:
        process.terminate()
        process.wait()
    print(
        f"{name}: {num_streams} streams, {offered} tok/s offered: {point['tok_s']:.0f} tok/s in "
        f"{point['tokens_per_chunk']:.2f} tokens an event, {point['us_per_token']:.1f} us a token, "
        f"{point['us_per_request']:.0f} us a request",
        flush=True,
    )


# With vLLM's interpreter.


class CountingCore:
    """An engine core that gives each request one token a step."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, step_s: float, token_id: int) -> None:
        self._step_s = step_s
        self._token_id = token_id
        self._left: dict[str, int] = {}  # tokens to come, by request
        self._next_s = 0.0

    async def add_request_async(self, request: Any) -> None:
        self._left[request.request_id] = request.sampling_params.max_tokens

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        while not self._left:
            await asyncio.sleep(0.001)
        self._next_s = max(self._next_s + self._step_s, time.monotonic())
        await asyncio.sleep(self._next_s - time.monotonic())
        outputs = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            reason = None if self._left[request_id] else FinishReason.LENGTH
            outputs.append(EngineCoreOutput(request_id, [self._token_id], finish_reason=reason))
        self._left = {request_id: left for request_id, left in self._left.items() if left}
        return EngineCoreOutputs(outputs=outputs, timestamp=time.monotonic())

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    def shutdown(self, *_: Any, **__: Any) -> None:
        """There is nothing to end."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        async def nothing(*_: Any, **__: Any) -> None:
            return None

        return nothing


def serve_vllm(folder: str, step_ms: str, token_id: str) -> None:
    """vLLM's API server over a core that counts, on a free port."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    import uvloop
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = platforms.current_platform = CpuPlatform()
    from vllm.v1.engine.core_client import EngineCoreClient

    core = CountingCore(float(step_ms) / 1e3, int(token_id))
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: core)
    uvloop.run(_serve_vllm(folder))


async def _serve_vllm(folder: str) -> None:
    import uvicorn
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    flags = ["--model", folder, "--served-model-name", MODEL, "--max-model-len", str(CONTEXT)]
    flags += ["--disable-log-stats", "--dtype", "float32"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    engine = AsyncLLM(config, Executor.get_class(config), log_stats=False, log_requests=False)
    app = build_app(args, ("generate",), config.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    settings = uvicorn.Config(app, log_level="warning", access_log=False)
    await uvicorn.Server(settings).serve([listener])


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE_VLLM]:
        serve_vllm(*sys.argv[2:])
    else:
        main()
