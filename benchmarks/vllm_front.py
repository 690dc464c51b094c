"""vLLM's API server over an engine core that only counts tokens; benchmarks/front_peers.py runs it.

    VENV/bin/python benchmarks/vllm_front.py FOLDER STEP_MS TOKEN_ID

Its renderer, output processor and detokenizer are its own. The core is in the API process, so that
decoding the messages of an engine costs it nothing; what the core takes is counted as vLLM's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

MODEL = "simulated"
CONTEXT = 4096


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
    serve_vllm(*sys.argv[1:])
