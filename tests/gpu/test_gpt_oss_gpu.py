"""GPT-OSS on a GPU: its kernels at full size against the references, and tiny models in engines."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from attention_batches import paged_attention_reference
from driver import Answer, complete
from gpu.setups import SETUPS, Checkpoints, prompts
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.kernels import MODE, attention, moe
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.gpu import moe as gpu_moe
from tokenmill.kernels.matmul import PackedWeight
from tokenmill.kernels.moe import PackedExperts, Routing
from tokenmill.kernels.rows import ClampedSwiGLU

Build = Callable[[str], BuiltEngine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
SIZE, EXPERTS, TOP_K = 2880, 32, 4  # of the 20b; the 120b has the same matrices
HEADS, KV_HEADS, DIM, BLOCK, WINDOW = 64, 8, 64, 64, 128
SWIGLU = ClampedSwiGLU()
Pair = tuple[PackedExperts, PackedExperts]


@pytest.fixture(scope="module")
def stored() -> Pair:
    """Gate with up, and down, as a checkpoint has them."""
    torch.manual_seed(0)
    found = []
    for n in (2 * SIZE, SIZE):
        shape = (EXPERTS, n, SIZE // 32)
        codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(117, 122, shape, dtype=torch.uint8, device="cuda")
        bias = torch.randn(EXPERTS, n, device="cuda").bfloat16()
        found.append(PackedExperts(EXPERTS, codes, scales, n, SIZE, bias=bias))
    return found[0], found[1]


@pytest.fixture(scope="module")
def packed(stored: Pair) -> Pair:
    """The same as the engine keeps them."""
    found = []
    for weight in stored:
        own = PackedExperts(EXPERTS)
        assert weight.data is not None and weight.scales is not None and weight.bias is not None
        for expert in range(EXPERTS):
            own.put_mxfp4(expert, weight.data[expert], weight.scales[expert])
            own.put_bias(expert, weight.bias[expert])
        found.append(own)
    return found[0], found[1]


def inputs(tokens: int, one_expert: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    x = (torch.randn(tokens, SIZE, device="cuda") * SIZE**-0.5).bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, dim=1)[1].int()
    if one_expert:
        ids[:, 0] = 7
    return x, ids


def applied(x: torch.Tensor, ids: torch.Tensor, packed: Pair) -> torch.Tensor:
    """A row per choice; those of few tokens come in parts."""
    found = gpu_moe.apply_experts(x, ids, *packed, SWIGLU)
    return found.sum(0) if found.dim() == 3 else found


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounding to bfloat16 between the products and at the end costs 2^-9 each."""
    assert (found.float() - expected).norm() < 1e-2 * expected.norm()


def test_weights_take_four_bits_and_a_quarter(packed: Pair) -> None:
    for weight in packed:
        assert weight.data is not None and weight.data.dtype == torch.int32
        assert weight.num_bytes == EXPERTS * weight.n * (SIZE * 17 // 32 + 2)


@pytest.mark.parametrize(
    ("tokens", "one_expert"),
    [
        (1, False), (3, False), (33, True), (100, False), (256, False), (400, True), (900, True),
        (3000, False), (8192, True),
    ],
)  # fmt: skip
def test_experts(stored: Pair, packed: Pair, tokens: int, one_expert: bool) -> None:
    """Every row is right, and has the same bits each time: nothing is read before it is there."""
    x, ids = inputs(tokens, one_expert)
    expected = moe.apply_experts.reference(x.float(), ids, *stored, SWIGLU)
    found = applied(x, ids, packed)
    assert ((found.float() - expected).norm(dim=1) < 2e-2 * expected.norm(dim=1)).all()
    for _ in range(8):
        assert torch.equal(found, applied(x, ids, packed))


def test_a_graph_takes_other_choices(stored: Pair, packed: Pair) -> None:
    x, ids = inputs(48)
    gpu_moe.apply_experts(x, ids, *packed, SWIGLU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gpu_moe.apply_experts(x, ids, *packed, SWIGLU)
    for shift in (0, 5):
        ids.copy_((ids + shift) % EXPERTS)
        graph.replay()
        assert_near(found, moe.apply_experts.reference(x.float(), ids, *stored, SWIGLU))


def test_a_row_has_its_own_bits(packed: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODE, "batch_invariant", True)
    x, ids = inputs(200)
    together = gpu_moe.apply_experts(x, ids, *packed, SWIGLU).view(200, TOP_K, SIZE)
    for rows in (slice(0, 1), slice(7, 12), slice(50, 180)):
        alone = gpu_moe.apply_experts(x[rows].contiguous(), ids[rows], *packed, SWIGLU)
        assert torch.equal(alone.view(-1, TOP_K, SIZE), together[rows])


def test_launches_of_a_layers_experts(packed: Pair) -> None:
    """Router, choice, sort, two products and the sum; cuBLAS may add up parts of the router's."""
    router = PackedWeight(
        torch.randn(EXPERTS, SIZE, device="cuda").bfloat16(), None, EXPERTS, SIZE, tiled=False
    )
    bias = torch.randn(EXPERTS, device="cuda").bfloat16()

    def run(x: torch.Tensor) -> None:
        logits = moe.router_logits(x, router)
        ids, weights = moe.route(logits, None, Routing(TOP_K), bias)
        moe.add_choices(moe.apply_experts(x, ids, *packed, SWIGLU), weights, x)

    for tokens, most in ((1, 6), (64, 7), (256, 7)):
        x, _ = inputs(tokens)
        run(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(x)
            torch.cuda.synchronize()
        names = {e.key: e.count for e in profile.key_averages() if e.self_device_time_total}
        print(tokens, names)
        assert sum(names.values()) <= most


def attention_batch(query_lens: list[int], contexts: list[int]) -> AttentionBatch:
    lens, starts = np.array(query_lens), np.concatenate([[0], np.cumsum(query_lens)])
    pairs = list(zip(contexts, query_lens, strict=True))
    width = max(-(-(c + q) // BLOCK) for c, q in pairs)
    tables = torch.randperm(len(lens) * width, device="cuda").int().view(-1, width)
    positions = torch.cat([torch.arange(c, c + q) for c, q in pairs]).int().cuda()
    plans = plan_tiles(lens, HEADS // KV_HEADS, KV_HEADS, on_gpu=True)
    return AttentionBatch(
        positions,
        torch.zeros_like(positions),
        torch.from_numpy(starts.astype(np.int32)).cuda(),
        torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        tables,
        torch.arange(len(lens), dtype=torch.int32, device="cuda"),
        tuple(QueryTiles.of(plan, "cuda") for plan in plans),
    )


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("invariant", [False, True])
def test_attention_with_sinks(
    window: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODE, "batch_invariant", invariant)
    torch.manual_seed(1)
    batch = attention_batch([1, 1, 1, 7, 300, 129], [0, 1000, 4095, 130, 0, 700])
    shape = (batch.block_tables.numel(), KV_HEADS, BLOCK, DIM)
    k_cache, v_cache = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    q = (2 * torch.randn(len(batch.positions), HEADS * DIM, device="cuda") * DIM**-0.5).bfloat16()
    sinks = 3 * torch.randn(HEADS, device="cuda")
    found = attention.paged_attention(q, k_cache, v_cache, batch, HEADS, window, sinks)
    wide = (q.float(), k_cache.float(), v_cache.float())
    expected = paged_attention_reference(*wide, batch, HEADS, window, sinks)
    assert_near(found, expected)
    without = paged_attention_reference(*wide, batch, HEADS, window, None)
    assert (expected - without).norm() > 0.1 * expected.norm()


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def scores(built: BuiltEngine) -> np.ndarray:
    """Log-probabilities of the tokens of all prompts."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    answers = complete(built.engine, prompts()[1:], sampling)
    entries = [entry for a in answers for entry in a.prompt_logprobs or [] if entry is not None]
    return np.array([entry.logprobs[0] for entry in entries])


@pytest.mark.parametrize(
    ("name", "checkpoint", "bound"),
    [("gpt-oss", "gpt-oss", 0.03), ("gpt-oss-bf16", "gpt-oss-bf16", 0.03),
     ("gpt-oss-kv-fp8", "gpt-oss", 0.1)],
)  # fmt: skip
def test_scores_follow_the_cpu(
    build: Build, checkpoints: Checkpoints, name: str, checkpoint: str, bound: float
) -> None:
    expected = scores(SETUPS[checkpoint].build(checkpoints, "cpu"))
    error = np.abs(scores(build(name)) - expected).mean()
    print(f"{name}: {error:.5f}")
    assert 0 < error < bound


def test_graphs_and_overlap_give_what_the_plain_loop_gives(build: Build) -> None:
    expected = tokens(complete(build("gpt-oss-plain").engine, prompts(), GREEDY))
    built = build("gpt-oss")
    assert tokens(complete(built.engine, prompts(), GREEDY)) == expected
    assert built.runner.decode.graphs is not None
    assert built.runner.decode.graphs.report.as_json()["decode_steps_without_graph"] == 0


def test_batch_invariance_is_bitwise(build: Build) -> None:
    together = complete(build("gpt-oss-invariant").engine, prompts(), GREEDY)
    alone = build("gpt-oss-invariant").engine
    for prompt, answer in zip(prompts(), together, strict=True):
        (single,) = complete(alone, [prompt], GREEDY)
        assert single.token_ids == answer.token_ids
        assert [x.logprobs for x in single.logprobs] == [x.logprobs for x in answer.logprobs]
