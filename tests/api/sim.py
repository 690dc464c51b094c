"""A server without a model: the real scheduler, a runner that follows a script in the prompt.

`say: TEXT` in the last message is answered with TEXT, `count: N` with N tokens, anything else with
a fixed text; then comes the end-of-sequence token. A grammar wins over the script. `crash:` makes
the step raise, `exit:` ends the worker process. Run as a script it is the worker, or the server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from tokenmill.core.config import PoolConfig, RouterConfig, SchedulerConfig, ServerConfig
from tokenmill.core.images import VisionConfig
from tokenmill.core.requests import Request
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import StepResult
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.sampling.grammar_pool import GrammarPool
from tokenmill.engine.sampling.sampler import forced_token, state_of
from tokenmill.plan.simulator import SimRunner
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Batch, Sequence
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.loader import ImageLoader
from tokenmill.vision.processor import ImageProcessor, PixelLimits
from tokenmill.workers.joining.joiner import Membership
from tokenmill.workers.joining.protocol import read_token
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.worker_process import run_worker

if TYPE_CHECKING:
    from tokenmill.workers.fronts.control import FrontSetup
    from workers.sim_kv import SimCache

MODEL = "sim-model"
MAX_MODEL_LEN = 512
NUM_BLOCKS = 8192
BLOCK_SIZE = 16
DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog."
CORPUS = [
    DEFAULT_TEXT,
    "Hello world! Hello there, how are you today?",
    'JSON {"name": "f", "arguments": {"x": [1, 2, 3]}}',
    "naïve café 数字 😀 👍",
]
SCRIPT = re.compile(r".*\b(say|count|crash|exit): (.*?)(?:<\|im_end\|>.*)?$", re.DOTALL)
TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> <tool_call> <|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if think %}<think>
{% endif %}{% endif %}"""


# The same with images, as Qwen3-VL's template writes them.
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_TEMPLATE = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}",
)


def make_tokenizer(sees: bool = False, tags: bool = True) -> Tokenizer:
    """A byte-level tokenizer of 400 tokens with a ChatML template; the same in every process.

    One that `sees` writes images; one without `tags` has no tokens for those of reasoning.
    """
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if tags:
        backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    if sees:
        backend.add_special_tokens([AddedToken(tag, normalized=False) for tag in IMAGE_TOKENS])
    return Tokenizer(
        backend,
        named_tokens={"eos_token": "<|im_end|>"},
        eos_token_ids=(backend.token_to_id("<|im_end|>"),),
        chat_templates={"default": ChatTemplate(IMAGE_TEMPLATE if sees else TEMPLATE, "sim")},
    )


def make_loader(config: VisionConfig, tokenizer: Tokenizer) -> ImageLoader:
    """Loads images as Qwen3-VL has them."""
    token_id = tokenizer.encode("<|image_pad|>", add_special_tokens=False)[0]
    limits, halves = PixelLimits(1024, 1024 * 256), (0.5, 0.5, 0.5)
    processor = ImageProcessor(limits, 16, 2, 2, 1 / 255, halves, halves, token_id)
    return ImageLoader(processor, config)


class ScriptRunner(SimRunner):
    """A SimRunner whose answer stands in the prompt."""

    def __init__(
        self, tokenizer: Tokenizer, step_ms: float, prefill_ms: float, cache: SimCache
    ) -> None:
        super().__init__(tokenizer.encode(DEFAULT_TEXT), lambda batch: step_ms / 1e3)
        self._prefill_s = prefill_ms / 1e3
        self._tokenizer = tokenizer
        self._cache = cache
        self._scripts: dict[str, list[int]] = {}

    def run(self, batch: Batch) -> StepResult:
        self._cache.compute(batch.items)
        sleep(self._prefill_s * (batch.num_tokens - batch.num_singles()))
        return super().run(batch)

    def sample(self, sequence: Sequence, num_new: int) -> list[int]:
        if sequence.num_computed_tokens + num_new < sequence.num_tokens:
            return []
        script = self._scripts.get(sequence.request_id)
        if script is None:
            script = self._scripts[sequence.request_id] = self._script(sequence.request)
        if (forced := forced_token(sequence)) is not None:
            return [forced]
        position = sequence.num_output_tokens
        eos = self._tokenizer.eos_token_ids[0]
        token = script[position] if position < len(script) else eos
        mask = state_of(sequence).mask
        candidates = [token, eos, *range(self._tokenizer.vocab_size)]
        return [next(t for t in candidates if mask is None or mask[t // 32] >> t % 32 & 1)]

    def _script(self, request: Request) -> list[int]:
        prompt = self._tokenizer.decode(request.task.prompt_token_ids, skip_special_tokens=False)
        match = SCRIPT.match(prompt)  # search() would try anew from each character
        verb, argument = match.groups() if match else ("", "")
        if verb == "say":
            return self._tokenizer.encode(argument, add_special_tokens=False)
        if verb == "count":
            return (self._token_ids * int(argument))[: int(argument)]
        if verb == "crash":
            raise RuntimeError("the script says so")
        if verb == "exit":
            os._exit(9)
        return self._token_ids


def make_vision(tokenizer: Tokenizer) -> VisionSpec:
    """An encoder with the patches of make_loader(), which never runs."""
    start, image, end = (tokenizer.encode(t, add_special_tokens=False)[0] for t in IMAGE_TOKENS)
    return VisionSpec(1, 64, 64, 2, 3, 16, 2, 2, 64, 8, (), (4, 2, 2), image, start, end)


def run_sim_worker(
    address: str,
    limits: SchedulerConfig,
    step_ms: float,
    prefill_ms: float,
    num_blocks: int,
    fault_rate: float,
    sees: bool,
    leave: Callable[[], None] | None = None,
) -> None:
    from workers.sim_kv import SimCache

    tokenizer = make_tokenizer(sees)
    warnings = []
    if limits.max_model_len > num_blocks * BLOCK_SIZE:
        limits = replace(limits, max_model_len=num_blocks * BLOCK_SIZE)
        warnings = [f"the context is {limits.max_model_len} tokens"]
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(limits, pool, frozenset(tokenizer.eos_token_ids))
    cache = SimCache(num_blocks, BLOCK_SIZE)
    kv = cache.transfer(scheduler, fault_rate)
    facts = ModelFacts(
        max_model_len=limits.max_model_len,
        vocab_size=tokenizer.vocab_size,
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype="none",
        kv=kv.address,
        max_waiting=limits.max_waiting,
        warnings=warnings,
    )
    grammar = GrammarPool(tokenizer.grammar_vocab())
    assert "torch" not in sys.modules, "importing torch is longer than all else that a start does"
    runner = ScriptRunner(tokenizer, step_ms, prefill_ms, cache)
    vision = make_vision(tokenizer) if sees else None
    engine = LanguageEngine(scheduler, runner, grammar, kv=kv, vision=vision)
    run_worker(engine, address, facts, kv, leave=leave)


def worker_argv(
    limits: SchedulerConfig,
    step_ms: float,
    num_blocks: int = NUM_BLOCKS,
    fault_rate: float = 0.0,
    prefill_ms: float = 0.0,
    sees: bool = False,
) -> list[str]:
    """The command that starts a worker, but for its address; `prefill_ms` is by prompt token."""
    times = {"step_ms": step_ms, "prefill_ms": prefill_ms}
    sizes = {"num_blocks": num_blocks, "fault_rate": fault_rate, "sees": sees}
    options = json.dumps({"limits": asdict(limits), **times, **sizes})
    return [sys.executable, str(Path(__file__)), "worker", "--options", options]


def server_argv(
    config: ServerConfig,
    pool: PoolConfig,
    router: RouterConfig,
    worker: list[str],
    vision: VisionConfig | None = None,
) -> list[str]:
    """The command that starts a server with such workers; it prints its URL."""
    parts = {"config": config, "pool": pool, "router": router, "vision": vision}
    given = {name: asdict(part) for name, part in parts.items() if part is not None}
    options = json.dumps({"worker": worker} | given)
    return [sys.executable, str(Path(__file__)), "server", "--options", options]


def load(setup: FrontSetup, sees: bool) -> tuple[Tokenizer, ImageLoader | None]:
    """What a front needs of the model."""
    tokenizer = make_tokenizer(sees)
    return tokenizer, make_loader(setup.vision, tokenizer) if sees else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["worker", "server", "front"])
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--address")
    parser.add_argument("--join", nargs=2, metavar=("ADDRESS", "TOKEN_FILE"))
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the modules beside this one
    if args.role == "worker":
        args.options["limits"] = SchedulerConfig(**args.options["limits"])
        leave = None
        if args.join:
            member = Membership(args.join[0], read_token(args.join[1]), wait_s=60.0)
            args.address, leave = member.address, member.leave
        run_sim_worker(args.address, **args.options, leave=leave)
        return
    from tokenmill.api.front_server import run_front, serve_fronts
    from tokenmill.api.server import serve
    from tokenmill.cli.serve import set_log_level

    if args.role == "front":
        set_log_level("info")
        run_front(args.address, lambda setup: load(setup, args.options["sees"]))
        return
    config = ServerConfig(**args.options["config"])
    set_log_level(config.log_level)
    vision = args.options.get("vision")
    tokenizer = make_tokenizer(vision is not None)
    if config.fronts > 1:
        sees = json.dumps({"sees": vision is not None})
        serve_fronts(
            args.options["worker"],
            [sys.executable, str(Path(__file__)), "front", "--options", sees],
            tokenizer,
            config,
            MODEL,
            on_listening=lambda url, facts: print(url, flush=True),
            pool=PoolConfig(**args.options["pool"]),
            router=RouterConfig(**args.options["router"]),
            vision=VisionConfig(**vision or {}),
        )
        return
    serve(
        args.options["worker"],
        tokenizer,
        config,
        MODEL,
        on_listening=lambda url, facts: print(url, flush=True),
        pool=PoolConfig(**args.options["pool"]),
        router=RouterConfig(**args.options["router"]),
        images=make_loader(VisionConfig(**vision), tokenizer) if vision is not None else None,
    )


if __name__ == "__main__":
    main()
