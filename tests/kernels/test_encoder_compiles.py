"""The attention of a vision encoder, compiled for Hopper without one."""

from triton.compiler import ASTSource

from hopper_compiler import compiled_for_hopper
from tokenmill.kernels.gpu import segments


def test_attention_of_images_compiles_and_fits() -> None:
    """Heads of 72 channels, as all published encoders have; no register goes to local memory."""
    low, high = segments.split_channels(72)
    keys, warps, stages = segments.TILE
    types = {"qkv": "*bf16", "out": "*bf16"} | dict.fromkeys(
        ("stride", "out_stride", "size"), "i32"
    )
    types |= {"low_rows": f"tensordesc<bf16[{keys}, {low}]>"}
    types |= {"high_rows": f"tensordesc<bf16[{keys}, {high}]>"}
    constants = {
        "DIM": 72, "LOW": low, "HIGH": high, "ROWS": segments.TILE_ROWS, "KEYS": keys, "TMA": True,
        "STAGES": stages, "EARLY": True,
    }  # fmt: skip
    compiled = compiled_for_hopper(
        segments.segment_kernel,
        types,
        constants,
        ("stride", "out_stride", "size"),
        ASTSource,
        warps,
    )
    assert "st.local" not in compiled.asm["ptx"]
