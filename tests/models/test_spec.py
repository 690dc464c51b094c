"""ModelSpec against transformers' own reading of the same config, and its formulas by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenmill.core.specs.quantization import QuantizationSpec
from tokenmill.core.specs.rope import RopeSpec
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.models import spec_of

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
}
QWEN3_14B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VARIANTS: list[tuple[type[PretrainedConfig], dict[str, Any]]] = [
    (LlamaConfig, {}),
    (LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": None}),
    (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    (MistralConfig, {"sliding_window": 7}),
    (MistralConfig, {"sliding_window": None}),
    (Qwen2Config, {"tie_word_embeddings": True}),
    (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    (Qwen3Config, {"head_dim": 24}),
    (Qwen3Config, {"attention_bias": True, "head_dim": 8}),
]


def saved(config: PretrainedConfig) -> dict[str, Any]:
    """What save_pretrained would write."""
    model_class = type(AutoModelForCausalLM.from_config(config))
    config.architectures = [model_class.__name__]
    return config.to_diff_dict()


def spec_with(**changes: Any) -> ModelSpec:
    return spec_of(LLAMA_31_8B | changes)


@pytest.mark.parametrize(("config_class", "changes"), VARIANTS)
def test_spec_agrees_with_transformers(
    config_class: type[PretrainedConfig], changes: dict[str, Any]
) -> None:
    config = config_class(**(SMALL | changes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        spec = spec_of(saved(config))
    attention = model.model.layers[0].self_attn
    assert spec.num_params() == model.num_parameters()
    assert spec.q_size == attention.q_proj.out_features
    assert spec.kv_size == attention.k_proj.out_features
    assert spec.head_dim == attention.head_dim
    assert spec.attention_bias == (attention.k_proj.bias is not None)
    assert spec.output_bias == (attention.o_proj.bias is not None)
    assert spec.mlp_bias == (model.model.layers[0].mlp.up_proj.bias is not None)
    assert spec.qk_norm == hasattr(attention, "q_norm")
    assert spec.rms_eps == config.rms_norm_eps
    assert spec.max_position == config.max_position_embeddings
    assert spec.tie_embeddings == config.tie_word_embeddings
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.bos_token_id == config.bos_token_id


@pytest.mark.parametrize(
    "config_class",
    [
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
        Gemma3TextConfig,
    ],
)
def test_absent_keys_take_transformers_defaults(config_class: type[PretrainedConfig]) -> None:
    sizes = {key: SMALL[key] for key in SMALL if key != "num_key_value_heads"}
    sizes |= {"num_attention_heads": 32, "hidden_size": 128}
    config = config_class(**sizes)
    raw = sizes | {"model_type": config.model_type}
    spec = spec_of(raw)
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 128 // 32)
    assert spec.max_position == config.max_position_embeddings
    assert spec.sliding_window == getattr(config, "sliding_window", None)
    assert spec.rms_eps == config.rms_norm_eps
    assert spec.bos_token_id == config.bos_token_id
    assert list(spec.eos_token_ids) == [id for id in [config.eos_token_id] if id is not None]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
def test_qwen_windows_follow_layer_types(changes: dict[str, Any]) -> None:
    config = Qwen2Config(**(SMALL | changes))
    spec = spec_of(SMALL | changes | {"architectures": ["Qwen2ForCausalLM"]})
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    assert spec.layer_windows == tuple(windows[kind] for kind in config.layer_types)
    assert spec.sliding_window == (8 if any(spec.layer_windows) else None)


def test_mistral_window_covers_every_layer() -> None:
    spec = spec_of(SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": 9})
    assert spec.layer_windows == (9, 9, 9)


def test_old_and_new_rope_formats_read_the_same() -> None:
    params = LLAMA_31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    new = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope")}
    expected = RopeSpec(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert spec_of(LLAMA_31_8B).rope == expected
    assert spec_of(new | {"rope_parameters": params}).rope == expected
    legacy = {"type": "linear", "factor": 2.5}
    assert spec_with(rope_scaling=legacy).rope == RopeSpec(500000.0, "linear", 2.5)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"factor": None},
        {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    ],
)
def test_yarn_attention_factor_agrees_with_transformers(extra: dict[str, Any]) -> None:
    params = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512} | extra
    config = LlamaConfig(
        **SMALL, max_position_embeddings=2048, rope_parameters=params | {"rope_theta": 10000.0}
    )
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = spec_with(rope_scaling=params, max_position_embeddings=2048).rope
    assert rope.attention_factor == pytest.approx(attention_factor)
    assert (rope.factor, rope.original_max_position) == (4.0, 512)
    assert (rope.beta_fast, rope.beta_slow) == (
        extra.get("beta_fast", 32.0),
        extra.get("beta_slow", 1.0),
    )
    assert rope.truncate == extra.get("truncate", True)


def test_num_params_of_llama_31_8b() -> None:
    # 32 layers x (2*4096*4096 + 2*4096*1024 + 3*4096*14336 + 2*4096) + 2*128256*4096 + 4096
    assert spec_with().num_params() == 8_030_261_248
    assert spec_with().weight_bytes(2) == 16_060_522_496
    assert spec_with(tie_word_embeddings=True).num_params() == 7_504_924_672


def test_num_params_of_qwen3_14b() -> None:
    # 40 layers x (2*5120*5120 + 2*5120*1024 + 3*5120*17408 + 2*5120 + 2*128)
    # + 2*151936*5120 + 5120: 14.77B
    spec = spec_of(QWEN3_14B)
    assert spec.num_params() == 14_768_307_200
    assert spec.weight_bytes(2) == 29_536_614_400


def test_storage_does_not_change_the_model() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    spec = spec_with(quantization_config=fp8)
    assert spec.quantization == QuantizationSpec("fp8", "block", (128, 128))
    assert replace(spec, quantization=None) == spec_with()
    assert spec.num_params() == spec_with().num_params()


def test_kv_bytes_per_token() -> None:
    # keys and values x 32 layers x 8 heads x 128 x 2 bytes; 70B has 80 layers, 405B has 126
    assert spec_with().kv_bytes_per_token(2) == 131_072
    assert (
        spec_with(
            num_hidden_layers=80, num_attention_heads=64, hidden_size=8192
        ).kv_bytes_per_token(2)
        == 327_680
    )
    assert spec_with(num_hidden_layers=126).kv_bytes_per_token(2) == 516_096


def test_flops_per_token() -> None:
    # 2 x (32 x 218,103,808 + 128256 x 4096) for the matrices; 4 x 32 x 128 per position and layer
    assert spec_with().flops_per_token(0) == 15_009_316_864
    assert spec_with().flops_per_token(1000) == 15_009_316_864 + 524_288_000
    window = spec_with(architectures=["MistralForCausalLM"], sliding_window=100)
    assert window.flops_per_token(1000) - window.flops_per_token(0) == 52_428_800


def test_token_ids_and_dtype() -> None:
    spec = spec_with()
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.bos_token_id == 128000
    assert spec.dtype == "bfloat16"
    assert spec_with(dtype="float16").dtype == "float16"
    assert spec_with(eos_token_id=None).eos_token_ids == ()


def test_remote_code_is_not_a_reason_to_run_anything() -> None:
    assert spec_with(auto_map={"AutoModelForCausalLM": "evil.Model"}) == spec_with()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: GPT2LMHeadModel is not supported"),
        ({"architectures": None, "model_type": "phi3"}, "architectures: model_type 'phi3'"),
        ({"hidden_act": "gelu"}, "hidden_act: only 'silu' is supported, got 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method: 'gptq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only 1.0"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor: expected a positive number, got None"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "fast": 1}}, "rope_scaling.fast: not"),
        ({"vocab_size": None}, "vocab_size: expected a positive integer, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive integer, got 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide"),
        ({"hidden_size": 4097}, "hidden_size: 4097 is not a multiple of num_attention_heads 32"),
        ({"head_dim": 15}, "head_dim: rotary embedding needs an even size, got 15"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype: expected one of float32, bfloat16, float16"),
        ({"sliding_window": 4096}, "sliding_window: LlamaForCausalLM has none"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 32 entries"),
        ({"layer_types": ["chunked"] * 32}, r"layer_types\[0\]: expected one of"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types: has sliding_attention but"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 32},
            "layer_types: MistralForCausalLM gives every layer sliding_window 4096",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "attention_bias": True},
            "attention_bias: MistralForCausalLM has False, got True",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "attention_bias": False},
            "attention_bias: Qwen2ForCausalLM has True, got False",
        ),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_with(**changes)


R1: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
}
YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "topk_method: only 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: only 1"),
        ({"n_group": 7}, "n_group: 7 groups"),
        ({"topk_group": 9}, "topk_group: 9 of 8"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok: 300 of 256"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: expected num_attention_heads 128"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: rotary"),
        ({"attention_bias": True}, "attention_bias: DeepseekV3ForCausalLM has False"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: expected"),
        ({"n_shared_experts": -1}, "n_shared_experts: expected"),
        ({"rope_scaling": YARN | {"factor": 4, "mscale_all_dim": "1"}}, "mscale_all_dim: expected"),
        ({"rope_scaling": YARN | {"beta_fast": "32"}}, "beta_fast: expected a positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling: expected an object, got 'yarn'"),
    ],
)
def test_errors_of_experts_and_latents_name_the_field(
    changes: dict[str, Any], message: str
) -> None:
    assert spec_of(R1).kv_bytes_per_token(2) == 70_272
    with pytest.raises(ModelLoadError, match=message):
        spec_of(R1 | changes)


def test_what_yarn_leaves_out() -> None:
    """theta of the other format, the context that it reaches, and a factor that follows from it."""
    longer = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    saved = {key: value for key, value in QWEN3_14B.items() if key != "rope_theta"}
    saved |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    for config in (QWEN3_14B, saved):
        spec = spec_of(config | {"rope_scaling": longer})
        assert (spec.rope.theta, spec.max_position) == (1e6, 131_072)
    assert spec_of(QWEN3_14B).max_position == 40_960
    specs = [
        spec_of(R1 | {"max_position_embeddings": 163_840, "rope_scaling": yarn})
        for yarn in (YARN, YARN | {"factor": 40})
    ]
    assert specs[0].mla == specs[1].mla and specs[0].mla is not None
    assert specs[0].softmax_scale == specs[1].softmax_scale
    assert specs[0].softmax_scale == pytest.approx(0.135234, abs=1e-6)


@pytest.mark.parametrize("none", [0, None])
def test_experts_without_a_shared_one(none: int | None) -> None:
    moe = spec_of(R1 | {"n_shared_experts": none}).moe
    assert moe is not None and moe.shared_size == 0
