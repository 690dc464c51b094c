"""vLLM's names of settings: what each is here, or what to use instead of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    PARALLEL,
    SCHEDULER,
    SettingsError,
    by_key,
    read_value,
)


@dataclass(frozen=True, slots=True)
class VllmName:
    """One argument of vLLM's `LLM(...)`; its flag has dashes."""

    name: str
    here: str = ""  # the flag here, without its dashes; "": none
    instead: str = ""  # what to use where it is refused
    switch: bool = False
    negated: bool = False  # a switch that means the opposite here
    values: Mapping[str, str] = field(default_factory=dict)  # vLLM's and ours, where they differ
    harmless: tuple[str, ...] = ()  # values that ask for what happens anyway

    @property
    def flag(self) -> str:
        return self.name.replace("_", "-")

    def read(self, given: str) -> str | None:
        """The value here of vLLM's value; None where nothing needs to be set."""
        if given in self.harmless:
            return None
        if not self.here:
            raise SettingsError(f"{self.name} is a setting of vLLM; {self.instead}")
        if not self.switch:
            return self.values.get(given, given)
        return str((given == "true") != self.negated).lower()

    def flags(self, given: str) -> list[str]:
        """The value as a part of our command line."""
        value = self.read(given)
        if value is None:
            return []
        if self.switch:
            return [f"--{'' if value == 'true' else 'no-'}{self.here}"]
        return [f"--{self.here}={value}"]


DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
_CACHE_DTYPES = DTYPES | {"float16": "fp16", "fp8_e4m3": "fp8"}
_CALLS = "send sampling parameters in each call"
_OFFLOAD = "use --kv-offloading host=SIZE"
ROWS = (
    VllmName("dtype", "dtype", values=DTYPES),
    VllmName("max_model_len", "max-model-len"),
    VllmName("max_num_seqs", "max-num-seqs"),
    VllmName("max_num_batched_tokens", "max-num-batched-tokens"),
    VllmName("gpu_memory_utilization", "gpu-memory-utilization"),
    VllmName("kv_cache_memory_bytes", "kv-cache-memory"),
    VllmName("kv_cache_dtype", "kv-cache-dtype", values=_CACHE_DTYPES),
    VllmName("block_size", "block-size"),
    VllmName("enable_prefix_caching", "prefix-cache", switch=True),
    VllmName(
        "enable_chunked_prefill",
        switch=True,
        instead="long prompts are always split over several steps",
        harmless=("true",),
    ),
    VllmName(
        "async_scheduling",
        switch=True,
        instead="on a GPU a step is always prepared while the one before it runs",
        harmless=("true",),
    ),
    VllmName("enforce_eager", "cuda-graphs", switch=True, negated=True),
    VllmName("scheduling_policy", instead="use --client-priority", harmless=("fcfs",)),
    VllmName("tensor_parallel_size", "tp"),
    VllmName("chat_template", "chat-template"),
    VllmName("load_format", instead="use --random-weights", harmless=("auto", "safetensors")),
    VllmName(
        "trust_remote_code",
        switch=True,
        instead="code of models is not run here: their architectures are built in",
        harmless=("false",),
    ),
    VllmName("seed", instead="send seed in each call", harmless=("0",)),
    VllmName("host", "host"),
    VllmName("port", "port"),
    VllmName("served_model_name", "served-model-name"),
    VllmName("api_key", "api-key"),
    VllmName("api_server_count", "fronts"),
    VllmName("tool_call_parser", "tool-parser"),
    VllmName("reasoning_parser", "reasoning-parser"),
    VllmName(
        "enable_auto_tool_choice",
        switch=True,
        instead="calls are always found; send tool_choice 'none'",
        harmless=("true",),
    ),
    VllmName("trust_request_chat_template", "client-chat-templates", switch=True),
    VllmName("allowed_origins", "cors-origin"),
    VllmName("ssl_certfile", "tls-cert"),
    VllmName("ssl_keyfile", "tls-key"),
    VllmName("enable_log_requests", "log-requests", switch=True),
    VllmName("disable_log_stats", switch=True, instead="use --log-level warning"),
    VllmName("data_parallel_size", "workers"),
    VllmName("pipeline_parallel_size", instead="use --tp N or --ep N", harmless=("1",)),
    VllmName("enable_expert_parallel", switch=True, instead="use --ep N", harmless=("false",)),
    VllmName("speculative_config", instead="use --mtp N, with --draft for what drafts"),
    VllmName("quantization", instead="the checkpoint says how it is quantized; see --dtype"),
    VllmName("tokenizer", instead="the tokenizer comes with the model's folder"),
    VllmName("revision", instead="name a folder with that revision as the model"),
    VllmName("download_dir", instead="set TOKENMILL_CACHE or HF_HOME"),
    VllmName("swap_space", instead=_OFFLOAD, harmless=("0",)),
    VllmName("cpu_offload_gb", instead=f"weights stay on the device; for KV {_OFFLOAD}"),
    VllmName("kv_transfer_config", instead="use --prefill and --decode"),
    VllmName("distributed_executor_backend", instead="use --placement process or ray"),
    VllmName("generation_config", "generation-config", values={"vllm": "none"}),
    VllmName("override_generation_config", instead=_CALLS),
    VllmName("hf_overrides", instead="change config.json in a copy of the model's folder"),
    VllmName("enable_lora", switch=True, instead="merge adapters into the weights beforehand"),
    VllmName("limit_mm_per_prompt", instead="images are limited by their size and the context"),
    VllmName("disable_custom_all_reduce", switch=True, instead="leave it out", harmless=("false",)),
)
_BY_FLAG = {row.flag: row for row in ROWS}
_SHORT = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-q": "--quantization"}


def as_flags(arguments: Sequence[str]) -> list[str]:
    """A command line with vLLM's flags replaced by ours; SettingsError says what to use instead."""
    left, line = list(arguments), list[str]()
    while left:
        argument = left.pop(0)
        if argument == "--":
            return [*line, argument, *left]
        name, equals, value = argument.partition("=")
        name = _SHORT.get(name, name).replace("_", "-")
        row = _BY_FLAG.get(name.removeprefix("--"))
        off = _BY_FLAG.get(name.removeprefix("--no-"))
        if name.startswith("--no-") and off is not None and off.switch:
            line += off.flags("false")
        elif not name.startswith("--") or row is None:
            line.append(argument)
        elif row.switch:
            line += row.flags(value.lower() or "true")
        elif equals or left:
            line += row.flags(value if equals else left.pop(0))
        else:
            line.append(f"--{row.here}" if row.here else argument)
    return line


def as_fields(arguments: Mapping[str, Any]) -> dict[type, dict[str, Any]]:
    """Keyword arguments of vLLM's LLM as fields of the configs of an engine."""
    rows, known = {row.name: row for row in ROWS}, by_key(*_ENGINE)
    found: dict[type, dict[str, Any]] = {}
    for name, given in arguments.items():
        if name not in rows:
            raise TypeError(f"LLM() has no argument {name!r}; docs/python_api.md lists them")
        if given is None:
            continue
        text = str(given).lower() if isinstance(given, bool) else str(given)
        if (value := rows[name].read(text)) is None:
            continue
        setting = known.get(rows[name].here)
        if setting is None:
            raise SettingsError(f"{name} is a setting of servers; use tokenmill serve")
        fields = found.setdefault(setting.owner, {})
        fields[setting.field] = (
            value == "true" if rows[name].switch else read_value(setting, value, name)
        )
    return found


_ENGINE = (MODEL, CACHE, SCHEDULER, EXECUTION, PARALLEL)
