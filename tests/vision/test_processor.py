"""Images to patches, compared with transformers' processor bit by bit."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from tokenmill.core.images import ImageInput
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import ImageError, ModelLoadError
from tokenmill.engine.images import normalised
from tokenmill.vision import processor as processor_module
from tokenmill.vision.processor import ImageProcessor, PixelLimits, load_processor
from vision.pictures import file_of, photo

PUBLISHED: dict[str, Any] = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "image_token_id": 7,
    "vision_config": {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2},
}
NO_LIMIT = 10**9
VISION = VisionSpec(1, 64, 64, 2, 3, 16, 2, 2, 64, 8, (), (4, 2, 2), 7, 8, 9)


def folder(path: Path, config: Any, preprocessor: Any = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if preprocessor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


@pytest.fixture
def qwen(tmp_path: Path) -> ImageProcessor:
    processor = load_processor(folder(tmp_path, CONFIG, PUBLISHED))
    assert processor is not None
    return processor


def reference(image: Image.Image, settings: dict[str, Any]) -> tuple[np.ndarray, list[int]]:
    made = Qwen2VLImageProcessorPil(**settings)(images=[image], return_tensors="np")
    return made["pixel_values"], made["image_grid_thw"][0].tolist()


def as_seen(image: ImageInput) -> bytes:
    """The pixels that a worker gives to the encoder."""
    return normalised(image, VISION, torch.device("cpu")).numpy().tobytes()


def assert_same(processor: ImageProcessor, data: bytes, settings: dict[str, Any]) -> None:
    image = processor.process(data, processor.limits, NO_LIMIT, NO_LIMIT)
    pixels, grid = reference(Image.open(BytesIO(data)), settings)
    assert list(image.grid) == grid
    assert as_seen(image) == np.ascontiguousarray(pixels).tobytes()
    assert 8 * len(image.data) == pixels.nbytes
    assert image.num_tokens(processor.merge) * processor.merge**2 == len(pixels)


@pytest.mark.parametrize("size", [(1000, 1000), (64, 64), (37, 411), (901, 33), (320, 256)])
def test_patches_equal_transformers(qwen: ImageProcessor, size: tuple[int, int]) -> None:
    assert_same(qwen, file_of(photo(*size), "PNG"), PUBLISHED)


def test_a_mean_by_channel_equals_transformers(tmp_path: Path) -> None:
    """The class defaults: CLIP's mean and deviation, which differ by channel."""
    settings = {"patch_size": 16, "min_pixels": 4096, "max_pixels": 30_000}
    processor = load_processor(folder(tmp_path, CONFIG, settings))
    assert processor is not None and processor.limits == PixelLimits(4096, 30_000)
    assert_same(processor, file_of(photo(300, 200), "PNG"), settings)


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"quality": 80}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "L", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("WEBP", "RGB", {"quality": 70}),
        ("PNG", "RGBA", {}),
        ("PNG", "LA", {}),
        ("PNG", "P", {"transparency": 3}),
        ("PNG", "1", {}),
        ("GIF", "P", {"transparency": 5}),
    ],
)
def test_files_are_decoded_as_transformers_does(
    qwen: ImageProcessor, kind: str, mode: str, options: dict[str, Any]
) -> None:
    image = photo(90, 70).convert(mode)
    if "A" in mode:
        image.putalpha(Image.linear_gradient("L").resize((90, 70)))
    assert_same(qwen, file_of(image, kind, **options), PUBLISHED)


def test_of_an_animation_the_first_frame_counts(qwen: ImageProcessor) -> None:
    frames = [photo(80, 64, seed).convert("P") for seed in range(3)]
    for kind in ("GIF", "WEBP"):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert_same(qwen, data, PUBLISHED)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotates(qwen: ImageProcessor, orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo.jpg"
    photo(96, 40).save(path, exif=exif)
    image = qwen.process(path.read_bytes(), qwen.limits, NO_LIMIT, NO_LIMIT)
    pixels, grid = reference(load_image(str(path)), PUBLISHED)
    assert list(image.grid) == grid
    assert as_seen(image) == np.ascontiguousarray(pixels).tobytes()


def test_sizes_equal_transformers() -> None:
    random = np.random.default_rng(3)
    for _ in range(2000):
        height, width = (int(2 ** random.uniform(0, 13)) for _ in range(2))
        low = int(2 ** random.uniform(10, 17))
        limits = PixelLimits(low, low * int(2 ** random.uniform(1, 8)))
        try:
            wanted = smart_resize(height, width, 32, limits.low, limits.high)
        except ValueError:
            with pytest.raises(ImageError, match="200 times"):
                processor_module.smart_resize(height, width, 32, limits)
            continue
        assert processor_module.smart_resize(height, width, 32, limits) == wanted


def test_the_same_pixels_have_the_same_hash_and_others_do_not(qwen: ImageProcessor) -> None:
    first, second = photo(64, 64), photo(64, 64)
    second.putpixel((5, 5), (0, 0, 0))

    def content_hash(data: bytes, limits: PixelLimits) -> bytes:
        return qwen.process(data, limits, NO_LIMIT, NO_LIMIT).content_hash

    png = content_hash(file_of(first, "PNG"), qwen.limits)
    assert png == content_hash(file_of(first, "WEBP", lossless=True), qwen.limits)
    assert png != content_hash(file_of(second, "PNG"), qwen.limits)
    assert png != content_hash(file_of(first, "PNG"), PixelLimits(4096, 4096))


def test_an_image_over_the_context_is_not_decoded(qwen: ImageProcessor) -> None:
    broken = file_of(photo(1000, 1000), "PNG")[:500]
    with pytest.raises(ImageError, match=r"961 tokens.*context has 960"):
        qwen.process(broken, qwen.limits, NO_LIMIT, 960)


def test_models_without_vision_have_no_processor(tmp_path: Path) -> None:
    assert load_processor(folder(tmp_path, {"model_type": "qwen3"})) is None
    assert load_processor(tmp_path / "model.gguf") is None


def test_a_folder_without_preprocessor_config_is_as_published(
    tmp_path: Path, qwen: ImageProcessor
) -> None:
    (tmp_path / "bare").mkdir()
    assert load_processor(folder(tmp_path / "bare", CONFIG)) == qwen


def test_contradictions_are_named(tmp_path: Path, qwen: ImageProcessor) -> None:
    with pytest.raises(ModelLoadError, match="different patch sizes"):
        load_processor(folder(tmp_path, CONFIG, PUBLISHED | {"patch_size": 14}))
    with pytest.raises(ModelLoadError, match="pixels: they have at least"):
        qwen.with_limits(50_000, 40_000)
    with pytest.raises(ModelLoadError, match="pixels: they have at least"):
        qwen.with_limits(None, 100)
    assert qwen.with_limits(None, 30_000).limits == PixelLimits(30_000, 30_000)
