"""What the flags of `bench endpoint` ask for: loads, data, and whom to send them to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.bench.workload import BenchError, make_cells
from tokenmill.core.config import BenchConfig, EndpointConfig
from tokenmill.settings import Settings, SettingsError

if TYPE_CHECKING:
    from tokenmill.bench.datasets import Dataset
    from tokenmill.bench.load import Load
    from tokenmill.bench.wire import Target

Report = dict[str, Any]

DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = 16, 100
INPUT_LEN, OUTPUT_LEN = 128, 64
SATURATION_S = 15.0  # of a point of --saturate where nothing bounds it
UNIFORM_ROWS = 1024
POINT_SEED = 1_000_003  # between the seeds of two points
MODELS_TIMEOUT_S = 10.0


def make_loads(config: EndpointConfig, dataset: Dataset, seed: int) -> list[Load]:
    """One load per point of the sweep."""
    from tokenmill.bench.datasets import Trace
    from tokenmill.bench.load import Load

    num_requests, duration_s = config.num_requests, config.duration_s
    if num_requests is None and duration_s is None:
        if config.saturate:
            duration_s = SATURATION_S
        else:
            num_requests = dataset.size or DEFAULT_REQUESTS
    if num_requests is not None and isinstance(dataset, Trace):
        num_requests = min(num_requests, len(dataset.rows))
    common: dict[str, Any] = {
        "num_sessions": None if num_requests is None else -(-num_requests // config.turns),
        "duration_s": duration_s,
        "ramp_s": config.ramp_s,
        "seed": seed,
    }
    if config.concurrency and not config.saturate:
        return [Load(concurrency=value, **common) for value in config.concurrency]
    if isinstance(dataset, Trace):
        offsets = tuple(row.offset_s for row in dataset.rows)
        return [Load(arrival="trace", offsets_s=offsets, **common)]
    common |= {"arrival": config.arrival, "burst_size": config.burst_size}
    if config.saturate:
        return [Load(concurrency=1, **common)]
    if config.rate:
        return [Load(rate=value, **common) for value in config.rate]
    if config.arrival == "burst":
        return [Load(**common)]
    return [Load(concurrency=DEFAULT_CONCURRENCY, **common)]


def make_dataset(settings: Settings, config: EndpointConfig) -> Dataset:
    """The data that the flags ask for."""
    from tokenmill.bench.datasets import Synthetic, read_prompts, read_trace

    seed, output_len = settings.get("bench-seed") or 0, settings.values.get("output-len")
    if config.trace is not None:
        return read_trace(Path(config.trace).expanduser(), config.trace_speed, seed)
    if config.prompts is not None:
        return read_prompts(Path(config.prompts).expanduser(), output_len)
    lengths: tuple[tuple[int, int], ...]
    lengths = ((settings.values.get("input-len", INPUT_LEN), output_len or OUTPUT_LEN),)
    if source := settings.values.get("lengths"):
        rows = UNIFORM_ROWS if source.startswith("uniform:") else None
        wanted = BenchConfig(lengths=source, num_prompts=rows, output_len=output_len)
        lengths = make_cells(wanted)[0].lengths
    return Synthetic(lengths, seed, config.turns, config.shared_prefix, config.num_prefixes)


def fresh(dataset: Dataset, point: int) -> Dataset:
    """Synthetic prompts of their own for every point: the one before has filled the caches."""
    from tokenmill.bench.datasets import Synthetic

    if not isinstance(dataset, Synthetic):
        return dataset
    return replace(dataset, seed=dataset.seed + POINT_SEED * point)


def make_target(settings: Settings, config: EndpointConfig) -> Target:
    """Whom to ask, and what every request says."""
    from tokenmill.bench.client import route_url
    from tokenmill.bench.wire import Target

    key = next(iter(settings.values.get("api-key", ())), None)
    url = route_url(settings.get("url"), config.api)
    fields: Report = {"ignore_eos": True} if settings.values.get("ignore-eos", True) else {}
    if "temperature" in settings:
        fields["temperature"] = settings.get("temperature")
    return Target(
        url=url,
        model=settings.values.get("model") or first_model(url, key),
        api=config.api,
        stream=config.stream,
        api_key=key,
        timeout_s=config.timeout_s,
        insecure=config.insecure,
        keep_text=config.turns > 1 or config.tokenizer is not None,
        fields=fields | _extra_body(config.extra_body),
    )


def _extra_body(text: str | None) -> Report:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise SettingsError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"--extra-body must be a JSON object, got {text}")
    return found


def first_model(url: str, api_key: str | None) -> str:
    """The first name of the server's /models."""
    from urllib.request import Request, urlopen

    base = url.removesuffix("/completions").removesuffix("/chat")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(base + "/models", headers=headers), timeout=MODELS_TIMEOUT_S) as got:
            return str(json.load(got)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(
            f"{base}/models does not name a model ({error}): give --model, or check --url"
        ) from None


def token_counter(name: str | None) -> Callable[[str], int] | None:
    """Counts the tokens of a text as the model's tokenizer does."""
    if name is None:
        return None
    from tokenmill.cli.pull import fetch
    from tokenmill.serve.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(fetch(name))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
