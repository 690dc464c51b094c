"""The vocabulary: sampling parameters, ends of requests, errors and figures of engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import zip_longest
from typing import Any, Literal

from tokenmill.core.flags import INTEGER, Flag, Kind, count, number

MAX_TOP_LOGPROBS = 20
MAX_PATTERN_SIZE = 1024  # tokens of a repetition; what is kept and compared for each token
# Stop strings of a call: how many, the bytes of each, and of all together.
MAX_STOPS, MAX_STOP_BYTES, MAX_STOPS_BYTES = 64, 1024, 4096


class FinishReason(StrEnum):
    """How a request ended. Every submitted request gets exactly one."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the caller gave up, or the deadline passed
    REJECT = "reject"  # never ran: queue full, draining, or it cannot fit
    ERROR = "error"  # the engine or its process failed


class TokenmillError(Exception):
    """Base of the errors that a user can cause and should read."""


class InvalidRequestError(TokenmillError, ValueError):
    """A parameter is out of range or unsupported; `param` names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ImageError(InvalidRequestError):
    """An image that cannot be taken; the message says why, of "it"."""


class LargeImageError(ImageError):
    """An image over a limit; `remedy` is what helps beside a smaller image."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class ModelLoadError(TokenmillError):
    """A checkpoint, config or tokenizer cannot be used; the message names file and field."""


class RanksLostError(TokenmillError):
    """A process that runs a part of the model is gone or failed; the engine cannot go on."""


class OutOfMemory(Exception):
    """A step needs more device memory than there is; nothing of it was computed."""


@dataclass(frozen=True, slots=True)
class FreeText:
    """Text before a constraint, such as reasoning, that is bound by nothing.

    It ends with the token `end`. With `begin` it ends only where that sequence came before, and no
    token of `breaks` and no other `begin[0]` or `end` between them: a header that is closed.
    """

    end: int
    begin: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
    opening: int | None = None  # opens it as the first token; another first token is constrained
    banned: tuple[int, ...] = ()  # tokens that it does not have: those that would end the sequence


@dataclass(frozen=True, slots=True)
class Channels:
    """The tokens of GPT-OSS's channels, by which its reasoning is found in a sequence."""

    start: int
    channel: int
    message: int
    constrain: int
    ends: tuple[int, ...]  # of a message
    role: tuple[int, ...]
    analysis: tuple[int, ...]
    final: tuple[int, ...]
    bound: bool  # a constraint binds the channel `final`: all others are reasoning
    calls: bool  # a message with a recipient is a call, whatever its channel


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How the reasoning of an answer begins and ends: by tags as tokens or texts, or by channels.

    Once a budget is spent, `forced` comes: the first sequence, and if it goes on reasoning later,
    the last.
    """

    forced: tuple[tuple[int, ...], ...]
    opened: int | None = None  # its tokens in a prompt that has opened it; None: it has not
    tag_ids: tuple[int, int] | None = None
    tag_texts: tuple[str, str] | None = None
    channels: Channels | None = None


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """vLLM's: an answer ends once its last tokens are `min_count` times the same pattern."""

    max_pattern_size: int = 0  # in tokens; 0: off
    min_pattern_size: int = 0  # 0 is 1
    min_count: int = 0

    def __post_init__(self) -> None:
        bounds = {
            "max_pattern_size": (0, MAX_PATTERN_SIZE),
            "min_pattern_size": (0, self.max_pattern_size),
            "min_count": (2 if self.max_pattern_size else 0, math.inf),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                path = f"repetition_detection.{name}"
                raise InvalidRequestError(f"{path} must be {Bounds(low, high)}, got {value}", path)


@dataclass(frozen=True, slots=True)
class Branch:
    """A token sequence, and the JSON schema of what comes after it."""

    token_ids: tuple[int, ...]
    json_schema: str


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens an answer may have, whatever its text means."""

    allowed: tuple[int, ...] | None = None  # None: all
    banned: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that it must not have


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the generated text, enforced token by token."""

    kind: Literal[
        "any",
        "json_object",
        "json_schema",
        "regex",
        "choice",
        "grammar",
        "structural_tag",
        "branches",
    ]
    value: str = ""  # JSON text for json_schema, choice (a list of strings) and structural_tag
    branches: tuple[Branch, ...] = ()  # of kind "branches": the output is one of them
    after: FreeText | None = None  # what comes before the constraint holds
    # Keywords of JSON schemas that were left out, as pointers: clients are told.
    unenforced: tuple[str, ...] = ()
    rules: TokenRules | None = None  # hold in what comes before, too


@dataclass(frozen=True, slots=True)
class GrammarVocab:
    """The tokens as a grammar compiler sees them; special tokens are empty, no text emits them."""

    encoded_vocab: list[str]
    vocab_type: Literal["RAW", "BYTE_FALLBACK", "BYTE_LEVEL"]
    vocab_size: int  # the width of the model's logits
    stop_token_ids: list[int]
    add_prefix_space: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    low: float
    high: float = math.inf
    above: bool = False  # the lowest value is not allowed itself

    def __contains__(self, value: float) -> bool:  # NaN is in no range
        inside = self.low < value if self.above else self.low <= value
        return inside and value <= self.high and value < math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"> {self.low:g}" if self.above else f"at least {self.low:g}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


def sampling(
    default: Any,
    help: str,
    low: float | None = None,
    high: float = math.inf,
    *,
    above: bool = False,
    kind: Kind | None = None,
    repeated: bool = False,
    direct: bool = True,
) -> Any:
    """A field of SamplingParams: its flag, its bounds, and whether calls have it by this name.

    This declaration is all: the command line, the API's request, its checks, the Python API and
    the messages to workers follow from it. What is not `direct` is made by api/protocol/prepare.py.
    """
    bounds = None if low is None else Bounds(low, high, above)
    if bounds is not None and kind is None:
        is_float = isinstance(default, float)
        kind = number(bounds.low, high) if is_float else count(int(bounds.low), high)
    flag = {"flag": Flag(help, kind, repeated=repeated)} if help else {}
    return field(default=default, metadata={**flag, "bounds": bounds, "direct": direct})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens. `temperature=0` is greedy."""

    n: int = sampling(1, "", 1, 128, direct=False)
    max_tokens: int | None = sampling(16, "Most tokens of an answer.", 1, direct=False)  # None: all
    min_tokens: int = sampling(0, "Fewest tokens of an answer.", 0)
    temperature: float = sampling(1.0, "0 takes the likeliest token.", 0, 100)
    top_p: float = sampling(1.0, "Keep the likeliest tokens up to this sum.", 0, 1, above=True)
    top_k: int = sampling(0, "Keep the k likeliest tokens; 0 keeps all.", -1)
    min_p: float = sampling(0.0, "Keep tokens above this share of the best.", 0, 1)
    seed: int | None = sampling(None, "Same seed, same tokens.", kind=INTEGER)
    repetition_penalty: float = sampling(1.0, "Above 1 repeats less.", 0, above=True)
    presence_penalty: float = sampling(0.0, "Above 0 repeats less.", -2, 2)
    frequency_penalty: float = sampling(0.0, "Above 0 repeats less.", -2, 2)
    stop: tuple[str, ...] = sampling((), "Text that ends the answer; repeatable.", repeated=True)
    stop_token_ids: tuple[int, ...] = sampling((), "")
    ignore_eos: bool = sampling(False, "Go on after the end-of-text token.")
    skip_special_tokens: bool = sampling(True, "")
    include_stop_str_in_output: bool = sampling(False, "")
    logit_bias: dict[int, float] | None = sampling(None, "", direct=False)
    # None: off; k: the sampled token and the k best
    logprobs: int | None = sampling(None, "", 0, MAX_TOP_LOGPROBS, direct=False)
    prompt_logprobs: int | None = sampling(None, "", 0, MAX_TOP_LOGPROBS, direct=False)
    structured: StructuredOutput | None = sampling(None, "", direct=False)
    thinking_token_budget: int | None = sampling(
        None, "Most tokens of reasoning; then the answer follows.", 0
    )
    reasoning: ReasoningMarks | None = sampling(None, "", direct=False)
    repetition_detection: RepetitionDetection | None = sampling(None, "")

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):  # vLLM users pass a list or one string
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else tuple(value or ())
            object.__setattr__(self, name, value)
        if isinstance(self.repetition_detection, dict):
            found = RepetitionDetection(**self.repetition_detection)
            object.__setattr__(self, "repetition_detection", found)
        _check_sampling(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_sampling(p: SamplingParams) -> None:
    """Raise InvalidRequestError naming the first field that is out of range."""
    budget = p.thinking_token_budget
    if budget is not None and type(budget) is not int:
        name = "thinking_token_budget"
        raise InvalidRequestError(f"{name} must be a whole number, got {budget!r}", name)
    for name, bounds in _BOUNDS:
        value = getattr(p, name)
        if value is not None and value not in bounds:
            raise InvalidRequestError(f"{name} must be {bounds}, got {value}", name)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequestError(
            f"min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens})", "min_tokens"
        )
    if p.stop:
        _check_stops(p.stop)
    for token, bias in (p.logit_bias or {}).items():
        if token < 0 or not -100.0 <= bias <= 100.0:
            raise InvalidRequestError(
                f"logit_bias[{token}] must be a token id with a bias in [-100, 100], got {bias}",
                "logit_bias",
            )


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop has {len(stops)} strings, at most {MAX_STOPS} fit", "stop")
    sizes = [len(text.encode(errors="replace")) for text in stops]
    for index, size in enumerate(sizes):
        if not size:
            raise InvalidRequestError(f"stop[{index}] must not be empty", "stop")
        if size > MAX_STOP_BYTES:
            raise InvalidRequestError(
                f"stop[{index}] has {size} bytes, at most {MAX_STOP_BYTES} fit", "stop"
            )
    if sum(sizes) > MAX_STOPS_BYTES:
        raise InvalidRequestError(
            f"stop has {sum(sizes)} bytes in all, at most {MAX_STOPS_BYTES} fit", "stop"
        )


_BOUNDS: list[tuple[str, Bounds]] = [
    (spec.name, bounds)
    for spec in fields(SamplingParams)
    if (bounds := spec.metadata["bounds"]) is not None
]


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position; index 0 is the token that was taken, then the k best."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # 1-based rank of the token that was taken


@dataclass(slots=True)
class StepResult:
    """What the runner made of a batch; every list runs parallel to the batch's items."""

    token_ids: list[list[int]]  # [] while a prompt is still being computed; accepted drafts first
    logprobs: list[list[TokenLogprobs] | None] | None = None  # None when no item asked
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by item index
    draft_ids: list[list[int]] | None = None  # guesses of what comes next, to be verified
    errors: dict[int, str] = field(default_factory=dict)  # why items cannot go on, by index


@dataclass(slots=True)
class EngineStats:
    """Counters since start, and gauges now."""

    num_waiting: int = 0
    num_running: int = 0
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0  # held by running requests; cached but free blocks do not count
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of requests that began here, cached ones included
    num_output_tokens: int = 0
    num_steps: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    num_receiving: int = 0  # requests whose KV comes from another engine
    num_leases: int = 0  # prompts whose KV is held for another engine
    num_leases_expired: int = 0
    num_kv_blocks_received: int = 0
    kv_read_s: float = 0.0  # time in which they were copied
    num_kv_blocks_slid: int = 0  # of sliding layers, freed behind their window
    num_branch_points: int = 0  # inside cached prefixes, where sliding layers' windows are kept
    num_rebalances: int = 0  # times that experts were moved between ranks
    num_expert_bytes_moved: int = 0
    rebalance_s: float = 0.0  # time spent on that, steps waiting
    rank_imbalance: float = 0.0  # busiest rank over mean in the last window; 0: not counted
    rank_imbalance_before: float = 0.0  # the same in the window that led to the last move
    num_drafted: list[int] = field(default_factory=list)  # verified drafts by their position
    num_accepted: list[int] = field(default_factory=list)  # of these, those that were right
    num_budgets_spent: int = 0  # of reasoning, by requests
    num_loops_ended: int = 0  # requests that a repetition ended
    step_sums: list[float] = field(default_factory=list)  # of routing/step_rates.py
    num_images_encoded: int = 0
    num_image_hits: int = 0  # images whose features were here when a request needed them
    num_patches_encoded: int = 0
    num_gpus: int = 0  # or, on CPU, processes that compute
    gpu_s: float = 0.0  # time that has passed, times GPUs
    gpu_idle_s: float = 0.0  # of it, without a request to compute
    num_loading: int = 0  # requests whose KV comes back from a tier
    tiers: dict[str, float] = field(default_factory=dict)  # of kv/tiers/offloading.py
    # Of other tasks than text. What only grows ends as Prometheus has it: _total. Names may have
    # labels: `lookups_total{tier="device"}`.
    figures: dict[str, float] = field(default_factory=dict)


_COUNTERS = ("_total", "_bucket", "_count", "_sum")


def is_counter(name: str) -> bool:
    """True for a figure that adds up over the workers that come one after another."""
    return name.partition("{")[0].endswith(_COUNTERS)


_BY_NAME = ("num_finished", "tiers", "figures")
_BY_POSITION = ("num_drafted", "num_accepted", "step_sums")
_RATIOS = ("rank_imbalance", "rank_imbalance_before")
_SHARED = ("disk_blocks",)  # engines of a host count the same folder


def add_stats(a: EngineStats, b: EngineStats) -> EngineStats:
    """The sums of two engines' stats; of ratios and of what they share the larger one."""
    other = (*_BY_NAME, *_BY_POSITION)
    names = [name for name in EngineStats.__dataclass_fields__ if name not in other]
    sums: dict[str, Any] = {name: getattr(a, name) + getattr(b, name) for name in names}
    sums |= {name: max(getattr(a, name), getattr(b, name)) for name in _RATIOS}
    for name in _BY_POSITION:
        pairs = zip_longest(getattr(a, name), getattr(b, name), fillvalue=0)
        sums[name] = [sum(counts) for counts in pairs]
    for name in _BY_NAME:
        sums[name] = dict(getattr(a, name))
        for key, num in getattr(b, name).items():
            before = sums[name].get(key, 0)
            sums[name][key] = max(before, num) if key in _SHARED else before + num
    return EngineStats(**sums)


def no_room(num_prompt_tokens: int, max_model_len: int) -> str:
    """The sentence about a prompt that fills the context or more.

    Clients cut or summarise a conversation by these words, which are OpenAI's and Anthropic's.
    """
    is_full = num_prompt_tokens == max_model_len  # without a token for the answer
    return (
        f"This model's maximum context length is {max_model_len} tokens; the prompt is too long: "
        f"{num_prompt_tokens} tokens > {max_model_len - is_full} maximum"
    )
