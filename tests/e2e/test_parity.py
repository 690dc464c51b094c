"""The default model's real weights against transformers: logits, greedy tokens, perplexity."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from driver import Answer, complete
from gguf_reads import one_read
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89] * 4 + [15, 16, 17, 31, 33, 100, 127, 128, 129, 200]
LENGTHS += [600]
MAX_NUM_BATCHED_TOKENS = 256  # the longest prompt comes in three chunks
LOGIT_TOLERANCE = 1e-3
SUBJECTS = ("the sea", "a small village", "prime numbers", "the history of bread", "deep snow")
OPENINGS = ("Explain", "Write a story about", "def describe():  #", "Q: What is", "Once, near")


def _text(source: random.Random) -> str:
    words = [
        f"{source.choice(OPENINGS)} {source.choice(SUBJECTS)} {source.randrange(10**6)}"
        f"{source.choice(['.', '?', chr(10), ', and then'])} "
        for _ in range(400)
    ]
    return "".join(words)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    source = random.Random(11)
    return [tokenizer.encode(_text(source))[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> PreTrainedModel:
    with one_read():
        model = AutoModelForCausalLM.from_pretrained(
            smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
        )
    return model.eval()


@pytest.fixture(scope="module")
def fp32(smollm2_path: Path) -> BuiltEngine:
    return build(smollm2_path, "fp32")


def build(path: Path, dtype: str) -> BuiltEngine:
    return build_engine(
        resolve_setup(
            Setup(
                ModelConfig(model=str(path), dtype=dtype),
                CacheConfig(num_blocks=800),
                SchedulerConfig(max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
            )
        )
    )


@torch.inference_mode()
def _reference_logits(model: PreTrainedModel, token_ids: list[int], last: int) -> torch.Tensor:
    """Logits that predict the last `last` tokens of a sequence."""
    out = model(torch.tensor([token_ids[:-1]]), logits_to_keep=last)
    return out.logits[0]


def _check_greedy(logits: torch.Tensor, answer: Answer) -> int:
    """Tokens follow the reference until a near tie; returns how many were compared."""
    for i, token in enumerate(answer.token_ids):
        best = int(logits[i].argmax())
        if token != best:
            assert logits[i, best] - logits[i, token] < LOGIT_TOLERANCE
            return i
    return len(answer.token_ids)


def test_greedy_tokens_and_logprobs_match_transformers(
    fp32: BuiltEngine, prompts: list[list[int]], reference: PreTrainedModel
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
    answers = complete(fp32.engine, prompts, greedy)
    assert len(prompts) >= 50
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = _reference_logits(reference, prompt + answer.token_ids, len(answer.token_ids))
        expected = logits.log_softmax(-1)
        same = _check_greedy(logits, answer)
        compared += same
        for row, entry in list(zip(expected, answer.logprobs, strict=True))[:same]:
            ids = torch.tensor(entry.token_ids)
            torch.testing.assert_close(
                torch.tensor(entry.logprobs), row[ids], atol=LOGIT_TOLERANCE, rtol=0
            )
    assert compared > 0.95 * 12 * len(prompts)


def test_logits_match_transformers(
    fp32: BuiltEngine,
    prompts: list[list[int]],
    reference: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every logit of a prompt, through the model itself."""
    model = fp32.engine._runner.model
    captured: list[torch.Tensor] = []
    hidden_to_logits = model.logits

    def capture(hidden: torch.Tensor) -> torch.Tensor:
        captured.append(hidden_to_logits(hidden))
        return captured[-1]

    monkeypatch.setattr(model, "logits", capture)
    prompt = prompts[LENGTHS.index(600)][:300]  # two chunks
    asks = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    complete(fp32.engine, [prompt], asks)
    found = torch.cat(captured)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < LOGIT_TOLERANCE


def test_int8_perplexity_is_within_two_percent(
    fp32: BuiltEngine, smollm2_path: Path, tokenizer: Tokenizer
) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = tokenizer.encode(text)[:1200]
    asks = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    perplexity = {}
    for dtype, built in (("fp32", fp32), ("int8", build(smollm2_path, "int8"))):
        (answer,) = complete(built.engine, [token_ids], asks)
        assert answer.prompt_logprobs is not None
        scores = [entry.logprobs[0] for entry in answer.prompt_logprobs if entry is not None]
        assert len(scores) == len(token_ids) - 1
        perplexity[dtype] = float(torch.tensor(scores).mean().neg().exp())
    assert abs(perplexity["int8"] / perplexity["fp32"] - 1) < 0.02, perplexity
