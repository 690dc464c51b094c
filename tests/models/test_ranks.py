"""Models divided over ranks: one rank's answer; and what cannot be divided."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from light_processes import light_processes, print_to
from tiny_models import SMALL, VARIANTS, make_model, save, tame
from tokenmill.core.config import ParallelConfig
from tokenmill.core.types import ModelLoadError
from tokenmill.layers import experts
from tokenmill.layers.experts import RoutedExperts
from tokenmill.models import spec_of
from tokenmill.models.checkpoints.shards import plan_layout
from tokenmill.parallel import ALONE, Layout, Ranks

TIMEOUT_S = 300
SIZE = 4
VOCAB_SIZE = 67  # which SIZE does not divide
MODELS = ("deepseek-v3", "gemma3", "gpt-oss", "llama-bias", "mixtral", "qwen3-moe")
UNEVEN = {"tp": 4, "num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48}


def test_ranks_give_the_answer_of_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in MODELS:
        save(tame(make_model(name, vocab_size=VOCAB_SIZE), 0.3), tmp_path / name)
    ranks = []
    outputs = [tmp_path_factory.mktemp("output") / "lines" for _ in range(SIZE)]
    for rank, output in enumerate(outputs):
        arguments = [str(rank), str(SIZE), str(tmp_path)]
        given = ((str(output), str(output)), "models.rank_checks", arguments, {})
        ranks.append(light_processes().Process(target=print_to, args=given, daemon=True))
        ranks[-1].start()
    deadline = time.monotonic() + TIMEOUT_S
    for process in ranks:
        process.join(deadline - time.monotonic())
    told = "\n".join(output.read_text() for output in outputs)
    assert [process.exitcode for process in ranks] == [0] * SIZE, told


def test_results_in_parts_travel_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's experts in MXFP4 leave them for a few rows."""
    layer, results = RoutedExperts(2, "fp32", "cpu", ALONE), torch.randn(3, 6, 8)
    monkeypatch.setattr(experts, "apply_experts", lambda *_: results)
    sent = layer.dispatch(torch.randn(3, 8).bfloat16(), torch.tensor([[0, 1], [1, 0], [0, 1]]))
    back = layer.combine(sent)
    whole = (results[0] + results[1] + results[2]).bfloat16()
    assert back.dtype == torch.bfloat16 and torch.equal(back[sent.order], whole)


def test_few_rows_are_padded_and_the_host_hears_of_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x = RoutedExperts(3, "fp32", "cpu", ALONE), torch.randn(3, 8)
    monkeypatch.setattr(torch.Tensor, "tolist", pytest.fail)
    monkeypatch.setattr(torch.Tensor, "item", pytest.fail)
    room = layer.room(5, 2)
    sent = layer.dispatch(x, torch.tensor([[2, 1], [1, 2], [2, 0]]), room)
    monkeypatch.undo()
    assert room == 10 and sent.sent == sent.received == [10] and layer.room(4096, 8) is None
    assert sent.slots.tolist() == [0, 1, 1, 2, 2, 2] + [0] * 4
    assert sent.places is not None and torch.equal(
        sent.rows.wait()[sent.places], x[sent.order // 2]
    )
    assert layer.num_rows.tolist() == [1, 2, 3]


def test_copies_of_an_expert_take_turns_with_one_token_in_a_step() -> None:
    layer = RoutedExperts(2, "fp32", "cpu", Layout(num_slots=4))
    for _ in range(4):
        layer.dispatch(torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.int32))
    assert layer.num_rows.tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize(
    ("variant", "config", "reason"),
    [
        ("llama", {"tp": 3}, "--tp 3 does not divide the 4 attention heads"),
        ("llama", {"ep": 2}, "--ep 2: LlamaForCausalLM has no experts, use --tp"),
        ("llama", {"tp": 4, "intermediate_size": 50}, "--tp 4 does not divide the intermediate_si"),
        (
            "llama",
            {"tp": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 48},
            "4 KV heads",
        ),
        ("llama", {"redundant_experts": 2, "tp": 2}, "--redundant-experts needs a model with exp"),
        ("mixtral", {"ep": 8}, "--ep 8: the model has 6 experts in a layer"),
        ("mixtral", {"ep": 2, "tp": 4}, "--tp 4 must be 1 or as many as --ep 2"),
        ("mixtral", {"ep": 2, "tp": 2, "attention_dp": True}, "--attention-dp needs --ep of 2"),
        ("mixtral", {"attention_dp": True}, "--attention-dp needs --ep of 2"),
        ("mixtral", {"ep": 2, "redundant_experts": 7}, "--redundant-experts 7: with 6 on each of"),
        ("mixtral", {"redundant_experts": 2}, "--redundant-experts needs a model with experts"),
        ("mixtral", {"ep": 0}, "ep must be 1 or more, got 0"),
        ("mixtral", {"ep": 2, "nodes": 0}, "nodes must be 1 or more, got 0"),
        ("mixtral", {"ep": 2, "rebalance_steps": -1}, "rebalance_steps must be 0 or more, got -1"),
        ("mixtral", {"rebalance_steps": 5}, "--rebalance-steps needs a model with experts and --"),
        ("llama", {"rebalance_steps": 5, "tp": 2}, "--rebalance-steps needs a model with experts"),
        ("mixtral", {"ep": 2, "rebalance_layers": 1}, "rebalance_layers needs --rebalance-steps"),
        ("mixtral", {"ep": 2, "nodes": 2}, "nodes needs --rebalance-steps"),
        (
            "mixtral",
            {"ep": 3, "nodes": 2, "rebalance_steps": 5},
            "nodes 2 does not divide 3",
        ),
        ("mixtral", {"ep": 2, "timeout_iters": 50}, "--adp-timeout-iters needs --attention-dp"),
        (
            "mixtral",
            {"ep": 2, "attention_dp": True, "batching_wait_iters": 10},
            "batching_wait_iters needs --adp-timeout-iters of 1 or more",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(variant: str, config: dict[str, Any], reason: str) -> None:
    config_class, own = VARIANTS[variant]
    changes = {key: value for key, value in config.items() if key in SMALL}
    spec = spec_of(config_class(**(SMALL | own | changes)).to_dict())
    parallel = ParallelConfig(**{key: config[key] for key in config.keys() - changes.keys()})
    with pytest.raises(ModelLoadError) as error:
        plan_layout(spec, parallel, Ranks(0, parallel.num_ranks))
    assert reason in str(error.value)
