"""A sampling parameter is declared once: the API, the command line and workers follow."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import msgspec
import pytest

from api.sim import make_tokenizer
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.api.protocol.requests import SAMPLING_FIELDS, CompletionRequest
from tokenmill.core.config import ServerConfig
from tokenmill.core.types import InvalidRequestError, SamplingParams
from tokenmill.settings import SAMPLING
from tokenmill.workers.link import ModelFacts

# Those that a call has in another form; prepare.py makes them.
MADE = {"n", "max_tokens", "logit_bias", "logprobs", "prompt_logprobs", "structured", "reasoning"}
REPETITION = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 2}
OTHER: dict[str, Any] = {
    "seed": 7,
    "stop": ["x"],
    "stop_token_ids": [1],
    "repetition_detection": REPETITION,
}


def another(name: str) -> Any:
    """A value that is allowed and not the default."""
    spec = SamplingParams.__dataclass_fields__[name]
    if name in OTHER:
        return OTHER[name]
    if isinstance(spec.default, bool):
        return not spec.default
    low, high = spec.metadata["bounds"].low, spec.metadata["bounds"].high
    return next(v for v in (1, 0.5, 2) if low < v <= high and v != spec.default)


def test_every_parameter_is_in_calls_by_its_name_or_made() -> None:
    direct = {spec.name for spec in SAMPLING_FIELDS}
    assert direct | MADE == {spec.name for spec in fields(SamplingParams)}
    assert not direct & MADE


@pytest.mark.parametrize("name", [spec.name for spec in SAMPLING_FIELDS])
def test_a_call_sets_it(name: str) -> None:
    value = another(name)
    body = msgspec.json.encode({"prompt": "a", "max_tokens": 4, name: value})
    call = msgspec.json.decode(body, type=CompletionRequest)
    tokenizer = make_tokenizer()
    facts = ModelFacts(64, tokenizer.vocab_size, 8, 16, "none")
    job = asyncio.run(Preparer(tokenizer, lambda: facts, ServerConfig()).completion(call))
    found = getattr(job.requests[0].task.sampling, name)
    found = asdict(found) if is_dataclass(found) else found
    assert found == (tuple(value) if isinstance(value, list) else value)
    again = msgspec.msgpack.decode(
        msgspec.msgpack.encode(job.requests[0].task.sampling), type=SamplingParams
    )
    assert again == job.requests[0].task.sampling


def test_the_model_says_what_a_call_leaves_out() -> None:
    tokenizer = make_tokenizer()
    tokenizer._sampling_defaults = {"temperature": 0.6, "top_k": 20}
    facts = ModelFacts(64, tokenizer.vocab_size, 8, 16, "none")

    def sampling(generation_config: Any, **given: Any) -> SamplingParams:
        call = msgspec.convert({"prompt": "a", "max_tokens": 4, **given}, CompletionRequest)
        config = ServerConfig(generation_config=generation_config)
        job = asyncio.run(Preparer(tokenizer, lambda: facts, config).completion(call))
        return job.requests[0].task.sampling

    assert sampling("auto") == SamplingParams(max_tokens=4, temperature=0.6, top_k=20)
    assert sampling("auto", temperature=0) == SamplingParams(max_tokens=4, temperature=0, top_k=20)
    assert sampling("none") == SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    "spec", [s for s in SAMPLING_FIELDS if s.metadata["bounds"]], ids=lambda s: s.name
)
def test_calls_and_python_have_the_same_bounds(spec: Any) -> None:
    wrong = spec.metadata["bounds"].low - 1
    with pytest.raises(InvalidRequestError, match=f"{spec.name} must be"):
        SamplingParams(**{spec.name: wrong})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"prompt": "a", spec.name: wrong}, CompletionRequest)


def test_flags_are_named_after_their_parameters() -> None:
    assert {setting.field for setting in SAMPLING} <= {spec.name for spec in fields(SamplingParams)}
    for setting in SAMPLING:
        assert setting.key == setting.field.replace("_", "-")
