"""Wan beside diffusers and transformers, at tiny shapes in fp32."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from tokenmill.core.specs.wan import TINY, VaeSpec, WanTransformerSpec
from tokenmill.layers.linear import ComputeType
from tokenmill.models.wan.umt5_encoder import TextEncoder, encoder_tensors
from tokenmill.models.wan.wan_transformer import WanTransformer, transformer_tensors
from tokenmill.models.wan.wan_vae import LatentTiles, VideoDecoder, decoder_tensors
from tokenmill.video.unipc import ScheduleName, UniPC, make_schedule

TYPES: tuple[ComputeType, ...] = ("fp32", "bf16", "fp8")
TEXT = 24  # tokens of a padded prompt
# What diffusers 0.35.2, which MLPerf pins, has for 20 steps and a shift of 3.
MLPERF_TIMESTEPS = (
    *(999, 982, 963, 944, 922, 899, 874, 847, 817, 785),
    *(749, 710, 666, 617, 562, 499, 428, 345, 249, 136),
)
MLPERF_SIGMAS = {0: 0.9996664524078369, 9: 0.7853399515151978, 19: 0.1362396627664566, 20: 0.0}


def reference_transformer(spec: WanTransformerSpec, seed: int) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    fields = asdict(spec)
    fields["num_attention_heads"] = fields.pop("num_heads")
    fields["attention_head_dim"] = fields.pop("head_dim")
    fields["rope_max_seq_len"] = fields.pop("max_positions")
    return WanTransformer3DModel(**fields).eval()


def ours(reference: WanTransformer3DModel, spec: WanTransformerSpec) -> WanTransformer:
    state = reference.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == transformer_tensors(spec)
    return WanTransformer(spec, state, "fp32", "cpu")


def reference_vae(spec: VaeSpec) -> AutoencoderKLWan:
    torch.manual_seed(3)
    fields = asdict(spec)
    fields["temperal_downsample"] = list(fields.pop("temporal_downsample"))
    fields["dim_mult"] = list(fields["dim_mult"])
    return AutoencoderKLWan(**fields).eval()


@pytest.mark.parametrize("cross_attn_norm", [True, False])
@torch.inference_mode()
def test_the_transformer_is_that_of_diffusers(cross_attn_norm: bool) -> None:
    spec = replace(TINY.transformer, cross_attn_norm=cross_attn_norm)
    reference = reference_transformer(spec, 0)
    model = ours(reference, spec)
    latents, text = torch.randn(spec.in_channels, 3, 8, 6), torch.randn(2, TEXT, spec.text_dim)
    expected = reference(latents.expand(2, -1, -1, -1, -1), torch.tensor([899, 899]), text).sample
    kv = model.text_kv(text)
    torch.testing.assert_close(model(latents, 899, kv), expected, rtol=0, atol=1e-5)
    again = [model(latents, 899, model.text_kv(part[None]))[0] for part in text]
    torch.testing.assert_close(torch.stack(again), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_fp8_linears_stay_near() -> None:
    spec = TINY.transformer
    state = reference_transformer(spec, 0).state_dict()
    latents, text = torch.randn(spec.in_channels, 2, 4, 4), torch.randn(2, TEXT, spec.text_dim)
    exact, narrow, rounded = (
        model(latents, 499, model.text_kv(text))
        for model in (WanTransformer(spec, state, dtype, "cpu") for dtype in TYPES)
    )
    errors = [((part - exact).norm() / exact.norm()).item() for part in (narrow, rounded)]
    assert 0 < errors[0] < 0.02 and errors[0] < errors[1] < 0.1


@torch.inference_mode()
def test_the_text_encoder_is_that_of_transformers() -> None:
    spec = TINY.text
    torch.manual_seed(1)
    config = UMT5Config(
        vocab_size=spec.vocab_size,
        d_model=spec.hidden_size,
        d_kv=spec.head_dim,
        d_ff=spec.ffn_dim,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
    )
    reference = UMT5EncoderModel(config).eval()
    state = {name: t for name, t in reference.state_dict().items() if "embed_tokens" not in name}
    assert {name: tuple(t.shape) for name, t in state.items()} == encoder_tensors(spec)
    length, ids = 320, torch.randint(0, spec.vocab_size, (300,))  # far beyond the last bucket
    padded = torch.nn.functional.pad(ids, (0, length - len(ids)))[None]
    mask = (torch.arange(length) < len(ids)).long()[None]
    expected = reference(padded, mask).last_hidden_state[0] * mask[0, :, None]
    embeddings = TextEncoder(spec, state, "fp32", "cpu")(ids.tolist(), length)
    torch.testing.assert_close(embeddings, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tiles", [None, LatentTiles(size=6, stride=4)], ids=["whole", "tiles"])
@torch.inference_mode()
def test_the_video_decoder_is_that_of_diffusers(tiles: LatentTiles | None) -> None:
    spec = replace(TINY.vae, base_dim=4, dim_mult=(1, 2, 2, 2))
    reference = reference_vae(spec)
    state = reference.state_dict()
    shapes = {name: tuple(state[name].shape) for name in decoder_tensors(spec)}
    assert shapes == decoder_tensors(spec)
    if tiles:
        size, stride = tiles.size * 8, tiles.stride * 8
        reference.enable_tiling(size, size, stride, stride)
    latents = torch.randn(spec.z_dim, 3, 8, 10)
    mean, std = (
        torch.tensor(values).view(-1, 1, 1, 1) for values in (spec.latents_mean, spec.latents_std)
    )
    expected = reference.decode((latents * std + mean)[None]).sample[0].transpose(0, 1)
    pieces = list(VideoDecoder(spec, state, "cpu").frames(latents, tiles))
    assert [len(piece) for piece in pieces] == [1, 4, 4]
    assert expected.std() > 0.05
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-4)


def scheduler(name: ScheduleName, num_steps: int = 20) -> UniPCMultistepScheduler:
    """diffusers' solver; MLPerf's levels are given to it, since its own are newer."""
    made = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    if name == "mlperf":
        set_timesteps = made.set_timesteps

        def older(num_inference_steps: int, device: object = None) -> None:
            set_timesteps(num_inference_steps, device)
            schedule = make_schedule("mlperf", num_inference_steps, 3.0)
            made.sigmas = torch.tensor(schedule.sigmas)
            made.timesteps = torch.tensor(schedule.timesteps)

        made.set_timesteps = older
    return made


def test_the_timesteps_of_both_schedules() -> None:
    older, newer = make_schedule("mlperf", 20, 3.0), make_schedule("diffusers", 20, 3.0)
    assert older.timesteps == MLPERF_TIMESTEPS
    assert {index: older.sigmas[index] for index in MLPERF_SIGMAS} == MLPERF_SIGMAS
    reference = scheduler("diffusers")
    reference.set_timesteps(20)
    assert list(newer.timesteps) == reference.timesteps.tolist()
    assert sum(t >= 875 for t in older.timesteps) == 6
    assert sum(t >= 875 for t in newer.timesteps) == 7
    torch.testing.assert_close(torch.tensor(newer.sigmas), reference.sigmas, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mlperf", "diffusers"])
@torch.inference_mode()
def test_twenty_steps_with_guidance_and_two_experts(name: ScheduleName) -> None:
    spec = TINY.transformer
    references = [reference_transformer(spec, seed) for seed in (5, 6)]
    vae = reference_vae(TINY.vae)
    pipeline = WanPipeline(None, None, vae, scheduler(name), *references, boundary_ratio=0.875)
    pipeline.set_progress_bar_config(disable=True)
    latents, text = torch.randn(1, 16, 2, 4, 4), torch.randn(2, TEXT, spec.text_dim)
    expected = pipeline(
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=20,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        latents=latents,
        prompt_embeds=text[:1],
        negative_prompt_embeds=text[1:],
        output_type="latent",
    ).frames[0]
    experts = [ours(reference, spec) for reference in references]
    keys = [expert.text_kv(text) for expert in experts]
    schedule = make_schedule(name, 20, 3.0)
    solver, x = UniPC(schedule), latents[0]
    for t in schedule.timesteps:
        low = int(t < 875)
        wanted, unwanted = experts[low](x, t, keys[low])
        x = solver.step(unwanted + (4.0, 3.0)[low] * (wanted - unwanted), x)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-4)
