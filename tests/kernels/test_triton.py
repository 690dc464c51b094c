"""The Triton kernels against the torch references: interpreted on CPU, compiled where a GPU is."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from interpreted import run_checks

KERNELS = {
    "triton_parity": (
        "rms_norm",
        "norm_pair",
        "act_and_mul",
        "quantize_rows",
        "matmul",
        "batch_invariance",
        "matmul_parts",
        "skinny_matmul",
        "scale_product",
        "place_tokens",
        "drafts",
        "copy_blocks",
        "unpack",
        "rope_and_cache",
        "spread_keys",
        "spread_own_bits",
        "paged_attention",
        "sinks",
        "attention_own_bits",
        "layers",
    ),
    "triton_moe_parity": (
        "route",
        "sort_by_expert",
        "experts",
        "mxfp4",
        "biased_experts",
        "experts_own_bits",
        "latent_cache",
        "latent_attention",
    ),
    "triton_hstu_parity": (
        *("attention", "history_alone", "norm_uvqk", "gate_output", "gate_rows"),
        *("input_rows", "swish_norm"),
    ),
    "triton_encoder_parity": (
        "layer_norm",
        "rotate_heads",
        "segment_attention",
        "hopper_segments",
        "segment_bits",
        "encoder",
    ),
    "triton_wan_parity": (
        "norm_modulate",
        "add_and_norm",
        "round_rows",
        "norm_rotate",
        "norm_silu",
        "hopper_attention",
        "transformer",
    ),
    "triton_prefill_parity": ("prompts", "drawn_prompts", "neighbours"),
    "triton_gated_parity": ("gated", "drawn_gated"),
    "triton_embedding_parity": ("lookup", "write"),
    "triton_sampling_parity": (
        *("argmax", "not_finite", "sample", "ties", "capacity", "adjust", "masks"),
    ),
}


DEADLY = """
import os
CHECKS = {
    "dies": lambda _: os.kill(os.getpid(), 9),
    "fails": lambda _: 1 / 0,
    "passes": lambda _: None,
}
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What went wrong, by module and check."""
    folder = tmp_path_factory.mktemp("deadly")
    (folder / "deadly_parity.py").write_text(DEADLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        return run_checks([*KERNELS, "deadly_parity"])


@pytest.mark.parametrize("module", KERNELS)
def test_every_check_is_listed(module: str, faults: dict[str, dict[str, str]]) -> None:
    assert set(faults[module]) == set(KERNELS[module])


@pytest.mark.parametrize(
    ("module", "kernel"), [(module, name) for module, names in KERNELS.items() for name in names]
)
def test_triton_matches_reference(
    module: str, kernel: str, faults: dict[str, dict[str, str]]
) -> None:
    assert not faults[module][kernel], faults[module][kernel]


def test_a_check_that_dies_is_told(faults: dict[str, dict[str, str]]) -> None:
    found = faults["deadly_parity"]
    assert found["dies"].endswith("code -9") and "ZeroDivisionError" in found["fails"]
    assert found["passes"] == ""
