"""Turns the flags of `bench endpoint` into loads, data and the target to send them to."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from tokenmill.bench.options import BenchConfig, EndpointConfig
from tokenmill.bench.results.mooncake import read_trace
from tokenmill.bench.workload import BenchError, make_cells
from tokenmill.settings import Settings, SettingsError

if TYPE_CHECKING:
    from tokenmill.bench.client.arrivals import ClientLoad
    from tokenmill.bench.client.datasets import Dataset, Synthetic
    from tokenmill.bench.client.records import Endpoint
    from tokenmill.bench.results.reports import PromptsReport

Count = Callable[[str], int]

DEFAULT_CONCURRENCY, DEFAULT_REQUESTS = 16, 100
INPUT_LEN, OUTPUT_LEN = 128, 64
PROBES = 64, 96  # words of prompts that show what a server adds to each
SATURATION_S = 15.0  # of a point of --saturate where nothing bounds it
UNIFORM_ROWS = 1024
POINT_SEED = 1_000_003  # between the seeds of two points
SEEDS = 2**31  # that are drawn from
MODELS_TIMEOUT_S = 10.0


def make_loads(config: EndpointConfig, dataset: Dataset, seed: int) -> list[ClientLoad]:
    from tokenmill.bench.client.arrivals import ClientLoad
    from tokenmill.bench.client.datasets import Trace

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
        return [ClientLoad(concurrency=value, **common) for value in config.concurrency]
    if isinstance(dataset, Trace):
        offsets = tuple(row.arrival_ms / 1e3 for row in dataset.rows)
        return [ClientLoad(arrival="trace", offsets_s=offsets, **common)]
    common |= {"arrival": config.arrival, "burst_size": config.burst_size}
    if config.saturate:
        return [ClientLoad(concurrency=1, **common)]
    if config.rate:
        return [ClientLoad(rate=value, **common) for value in config.rate]
    if config.arrival == "burst":
        return [ClientLoad(**common)]
    return [ClientLoad(concurrency=DEFAULT_CONCURRENCY, **common)]


def make_dataset(settings: Settings, config: EndpointConfig) -> Dataset:
    from tokenmill.bench.client.datasets import Synthetic, Trace, read_prompts

    output_len = settings.values.get("output-len")
    if config.trace is not None:
        block = settings.get("trace-block-tokens")
        return Trace(tuple(read_trace(config.trace, block, config.trace_speed)), block=block)
    if config.prompts is not None:
        prompts = read_prompts(config.prompts, output_len)
        if config.api != "chat" and not all(isinstance(turn.said, str) for turn in prompts.turns):
            raise BenchError(f'{config.prompts}: "messages" and "images" need --api chat')
        return prompts
    lengths: tuple[tuple[int, int], ...]
    lengths = ((settings.values.get("input-len", INPUT_LEN), output_len or OUTPUT_LEN),)
    if source := settings.values.get("lengths"):
        rows = UNIFORM_ROWS if source.startswith("uniform:") else None
        wanted = BenchConfig(lengths=source, num_prompts=rows, output_len=output_len)
        lengths = make_cells(wanted)[0].lengths
    return Synthetic(
        lengths,
        num_turns=config.turns,
        prefix_len=config.shared_prefix,
        num_prefixes=config.num_prefixes,
        num_images=config.images,
        image_size=config.image_size,
    )


@dataclass(slots=True)
class PromptSource:
    """Gives every point new data, because earlier points have filled the server's cache."""

    dataset: Dataset
    seed: int
    is_drawn: bool  # the seed, for this run alone
    same: bool  # at every point, and given prompts as they are
    salt: str = ""  # what is changed in given prompts

    @classmethod
    def of(
        cls, settings: Settings, config: EndpointConfig, dataset: Dataset, count: Count | None
    ) -> PromptSource:
        given = settings.values.get("seed")
        seed = secrets.randbelow(SEEDS) if given is None else given
        source = cls(dataset, seed, given is None, config.same_prompts)
        if config.prompts is not None and not source.same:
            source._salt(count)
        return source

    def _salt(self, count: Count | None) -> None:
        from tokenmill.bench.client.datasets import SALT_WORDS, Prompts, Shuffled, find_cuts

        prompts = self.dataset.dataset if isinstance(self.dataset, Shuffled) else self.dataset
        assert isinstance(prompts, Prompts)
        self.salt = f"{SALT_WORDS} words before each prompt, about as many tokens"
        cuts = find_cuts(prompts.turns, count) if count else ()
        if not cuts:
            return
        longer = sum(not cut.num_chars for cut in cuts)
        self.salt = "words in the place of a prompt's first ones, no token more or less"
        if longer:
            self.salt += f"; {SALT_WORDS} words before {longer} of {len(cuts)} prompts"
        prompts, outer = replace(prompts, cuts=cuts), self.dataset
        self.dataset = replace(outer, dataset=prompts) if isinstance(outer, Shuffled) else prompts

    def point(self, number: int) -> Dataset:
        from tokenmill.bench.client.datasets import Prompts, Shuffled, fresh

        if self.same and isinstance(self.dataset, Prompts | Shuffled):
            return self.dataset
        return fresh(self.dataset, self.seed + (0 if self.same else POINT_SEED * number))

    def report(self) -> PromptsReport:
        from tokenmill.bench.results.reports import PromptsReport

        return PromptsReport(
            seed=self.seed,
            seed_drawn=self.is_drawn,
            same_at_every_point=self.same,
            salt=self.salt or None,
        )


def make_target(settings: Settings, config: EndpointConfig) -> Endpoint:
    from tokenmill.bench.client.connections import route_url
    from tokenmill.bench.client.records import Endpoint

    key = next(iter(settings.values.get("api-key", ())), None)
    url = route_url(settings.get("url"), config.api)
    fields: dict[str, Any] = {"ignore_eos": True} if settings.values.get("ignore-eos", True) else {}
    if "temperature" in settings:
        fields["temperature"] = settings.get("temperature")
    target = Endpoint(
        url=url,
        model=settings.values.get("model", ""),
        api=config.api,
        stream=config.stream,
        api_key=key,
        timeout_s=config.timeout_s,
        insecure=config.insecure,
        keep_text=config.turns > 1 or config.tokenizer is not None,
        fields=fields | _extra_body(config.extra_body),
    )
    return target if target.model else replace(target, model=first_model(target))


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise SettingsError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"--extra-body must be a JSON object, got {text}")
    return found


def served_models(target: Endpoint) -> list[dict[str, Any]]:
    """What the server's /models lists; OSError, ValueError, KeyError or TypeError without it."""
    from tokenmill.bench.client.connections import call_once

    _, body = call_once(target, _models_url(target.url), timeout_s=MODELS_TIMEOUT_S)
    cards: list[dict[str, Any]] = json.loads(body)["data"]
    return cards


def _models_url(url: str) -> str:
    return url.removesuffix("/completions").removesuffix("/chat") + "/models"


def first_model(target: Endpoint) -> str:
    try:
        return str(served_models(target)[0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(
            f"{_models_url(target.url)} does not name a model ({error}): give --model, "
            "or check --url"
        ) from None


def with_template(dataset: Synthetic, target: Endpoint) -> Synthetic:
    """Prompts that leave room for what the server adds to each, which two calls find out."""
    from tokenmill.bench.client.datasets import words

    short, long = (
        _counted(target, words(f"template/{secrets.token_hex()}", 0, size)) for size in PROBES
    )
    if long - short != PROBES[1] - PROBES[0]:
        raise BenchError(
            f"--exact-input-len: {PROBES[1] - PROBES[0]} more words are {long - short} more tokens "
            "here, so no length can be met exactly: leave it out"
        )
    shortest = min(length for length, _ in dataset.lengths)
    if shortest <= short - PROBES[0]:
        raise BenchError(
            f"--exact-input-len: a prompt of {shortest} tokens is too short: the server adds "
            f"{short - PROBES[0]} to each; ask for more, or use --api completions"
        )
    return replace(dataset, template_tokens=short - PROBES[0])


def _counted(target: Endpoint, text: str) -> int:
    """Tokens of the prompt by the server's usage."""
    from tokenmill.bench.client.connections import call_once
    from tokenmill.bench.client.records import request_body

    body = request_body(replace(target, stream=False), text, 1)
    try:
        _, answer = call_once(target, target.url, "POST", body)
        return int(json.loads(answer)["usage"]["prompt_tokens"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"--exact-input-len: {target.url} does not count a prompt: {error}"
        ) from None


def token_counter(name: str | None) -> Count | None:
    """Counts the tokens of a text as the model's tokenizer does."""
    if name is None:
        return None
    from tokenmill.console import fetch
    from tokenmill.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(fetch(name))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
