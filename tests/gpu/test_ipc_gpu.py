"""KV that moves between two processes on one GPU, from device to device."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from benchmarks.kv_transfer import Pair, measure
from gpu.ipc_checks import check_bits, check_killed_peer
from gpu.setups import CONFIG, Checkpoints
from tokenmill.models.checkpoints.weights import open_checkpoint


@pytest.mark.parametrize("name", ["moves", "moves-windows", "moves-fp8"])
def test_two_engines_give_the_bits_of_one(name: str, checkpoints: Checkpoints) -> None:
    check_bits(name, checkpoints, "cuda")


def test_a_killed_peer_costs_its_requests_alone(checkpoints: Checkpoints) -> None:
    check_killed_peer(checkpoints, "cuda")


def test_rate_against_a_copy(
    checkpoints: Checkpoints, record_property: Callable[[str, object], None]
) -> None:
    """All blocks have the numbers that the other process wrote; the rates are printed."""
    spec = open_checkpoint(checkpoints["qwen3"]).spec
    assert spec.num_layers == CONFIG["num_hidden_layers"]
    report = measure(Pair("cuda-ipc", spec, 64, 4096), 5)
    record_property("figures", report)
    print(json.dumps(report))
    assert report["device"] == "cuda" and report["ratio"] > 0
