"""vLLM on the requests of qwen3_vl_gpu.py: Qwen3-VL-30B-A3B with dummy weights on one GPU.

    PYTHONPATH=VLLM_SITE:src python scripts/qwen3_vl_peer.py

Lengths, image sizes, tokens out and their order are those of `qwen3_vl_gpu.py`.
vLLM is at its defaults but for what would answer from a cache (prefixes, processed images) and for
videos, of which it is told that none come. Its processor turns one image of each size into patches;
the inputs of a request are these with its own noise, name, text and place, and are made before the
time begins, as ours get them ready (`render_s`): on one core the processor takes a second an image.
Lines say what is done, and after how many seconds (`at_s`). Two lines with samples/s:
with vLLM's own dummy weights, by which all tokens choose few experts, and with weights drawn as
ours are. The model's folder is made here, so that nothing is downloaded: its tokenizer knows the
special tokens and single bytes. `--check` makes it, loads it with transformers and ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import re
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from qwen3_vl_requests import SAMPLES, WARM_UP, Work
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import tokenmill.bench
from tokenmill.core.requests import Request
from tokenmill.models import spec_of

BEGIN = time.monotonic()
SHAPE = Path(tokenmill.bench.__path__[0]) / "shapes" / "qwen3-vl-30b-a3b.json"
SPECIAL = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
    "<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655, "<|video_pad|>": 151656,
}  # fmt: skip
PATCHES = {
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
}  # fmt: skip
IMAGES = PATCHES | {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VIDEOS = PATCHES | {
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "video_processor_type": "Qwen3VLVideoProcessor",
}
TOKENIZER = {
    "tokenizer_class": "Qwen2Tokenizer", "model_max_length": 262144, "bos_token": None,
    "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None,
}  # fmt: skip


def make_folder(folder: Path) -> None:
    """What vLLM reads of a model with dummy weights."""
    config = json.loads(SHAPE.read_text())
    _tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "config.json": config | {"dtype": "bfloat16"},
        "preprocessor_config.json": IMAGES,
        "video_preprocessor_config.json": VIDEOS,
        "tokenizer_config.json": TOKENIZER | {"processor_class": "Qwen3VLProcessor"},
        "generation_config.json": {"eos_token_id": 151645, "pad_token_id": 151643},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def _tokenizer() -> Tokenizer:
    """Single bytes, and the special tokens under the ids that the config names."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)} | SPECIAL
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return tokenizer


def prompt_of(request: Request, seed: int) -> dict[str, Any]:
    """The same prompt for vLLM: one placeholder, and an image of noise of the same size."""
    (span,) = request.task.images
    _, rows, columns = span.image.grid
    pixels = np.random.default_rng(seed).integers(0, 256, (16 * rows, 16 * columns, 3), np.uint8)
    ids = request.task.prompt_token_ids
    short = [*ids[: span.offset], SPECIAL["<|image_pad|>"], *ids[span.end :]]
    return {"prompt_token_ids": short, "multi_modal_data": {"image": Image.fromarray(pixels)}}


def draw_as_ours(model: Any) -> int:
    """Draw weights as `--random-weights` does; returns how many tensors there were."""
    layers = 48
    output = re.compile(r".*layers\..*\.(o_proj|down_proj)\..*|.*layers\..*w2_weight")
    count = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            count += 1
            if re.search(r"norm\d?\.weight$", name):
                weight.fill_(1.0)
                continue
            deviation = 0.02
            if "visual" not in name and name.endswith("embed_tokens.weight"):
                deviation = min(1.0, 0.02 * math.sqrt(weight.shape[1]))
            elif "visual" not in name and output.fullmatch(name):
                deviation /= math.sqrt(2 * layers)
            weight.normal_(0.0, deviation)
    return count


def with_own_image(made: dict[str, Any], request: Request, name: str) -> dict[str, Any]:
    """Processed inputs of an image of the same size, as those of a request with another image."""
    (span,), (item,) = request.task.images, made["mm_kwargs"]["image"]
    (place,) = made["mm_placeholders"]["image"]
    assert place.length == span.num_tokens
    pixels = item["pixel_values"]
    noise = replace(pixels, data=torch.empty_like(pixels.data).uniform_(-1, 1))
    own = type(item)({**item, "pixel_values": noise})
    return {
        **made,
        "prompt_token_ids": list(request.task.prompt_token_ids),
        "mm_kwargs": type(made["mm_kwargs"])({"image": [own]}),
        "mm_hashes": {"image": [f"{name}-image-0"]},
        "mm_placeholders": {"image": [replace(place, offset=span.offset)]},
    }


class Peer:
    def __init__(self, folder: Path, max_model_len: int) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        begin = time.perf_counter()
        self.llm = LLM(
            model=str(folder),
            dtype="bfloat16",
            load_format="dummy",
            max_model_len=max_model_len,
            enable_prefix_caching=False,
            mm_processor_cache_gb=0,
            limit_mm_per_prompt={"image": 1, "video": 0},
        )
        self._processed: dict[tuple[int, int, int], dict[str, Any]] = {}
        say(start_s=round(time.perf_counter() - begin, 1))

    def _input(self, request: Request, name: str) -> dict[str, Any]:
        """What vLLM makes of a request; its processor sees the first image of each size."""
        grid = request.task.images[0].image.grid
        if grid not in self._processed:
            made = self.llm._preprocess_cmpl([prompt_of(request, 0)])[0]
            assert list(made["prompt_token_ids"]) == request.task.prompt_token_ids
            self._processed[grid] = made
            say(processed=grid)
        return with_own_image(self._processed[grid], request, name)

    def run(self, requests: list[Request], seed: int) -> tuple[float, float]:
        """Seconds until the inputs are ready, and from there until all have ended."""
        begin = time.perf_counter()
        inputs = [self._input(request, f"{seed}-{index}") for index, request in enumerate(requests)]
        ready = time.perf_counter()
        say(inputs=len(inputs), render_s=round(ready - begin, 3))
        engine = self.llm.llm_engine
        for index, (request, made) in enumerate(zip(requests, inputs, strict=True)):
            out = request.task.sampling.max_tokens
            params = self._params(temperature=0.0, max_tokens=out, ignore_eos=True)
            params.detokenize = False
            engine.add_request(f"{seed}-{index}", made, params)
        done = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                done += output.finished
        assert done == len(requests), f"{done} of {len(requests)} ended"
        return ready - begin, time.perf_counter() - ready


def say(**figures: Any) -> None:
    at_s = round(time.monotonic() - BEGIN, 1)
    print(json.dumps({"peer": "vllm", "at_s": at_s, **figures}), flush=True)


def measure(args: argparse.Namespace, folder: Path) -> None:
    """With each kind of weights: a warm-up, then all samples at once."""
    import vllm

    spec = spec_of(json.loads(SHAPE.read_text()))
    assert spec.vision is not None
    work = Work(spec.vision, spec.vocab_size)
    warm = [work.sample(8) for _ in range(WARM_UP)]
    requests = [work.sample() for _ in range(args.samples)]
    peer, rates = Peer(folder, args.max_model_len), {}
    for number, weights in enumerate(args.weights.split(",")):
        if weights == "as-ours":
            say(drawn_tensors=peer.llm.apply_model(draw_as_ours)[0])
        peer.run(warm, 10_000 * number + 5_000)
        render_s, seconds = peer.run(requests, 10_000 * number)
        rates[weights] = round(len(requests) / seconds, 3)
        say(
            version=vllm.__version__,
            weights=weights,
            samples=len(requests),
            prompt_tokens=sum(len(request.task.prompt_token_ids) for request in requests),
            render_s=round(render_s, 3),
            seconds=round(seconds, 3),
            samples_s=rates[weights],
        )
    say(benchmark="qwen3-vl", model="qwen3-vl-30b-a3b", samples_s=rates)


def check(folder: Path) -> None:
    """Load the folder with transformers, and process an image with it."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|vision_start|><|image_pad|><|vision_end|>")["input_ids"]
    assert ids == [151652, 151655, 151653], ids
    print(type(config).__name__, type(tokenizer).__name__, len(tokenizer), ids)
    processor = AutoProcessor.from_pretrained(folder)
    image = Image.fromarray(np.zeros((768, 1024, 3), np.uint8))
    made = processor(text=["a<|vision_start|><|image_pad|><|vision_end|>b"], images=[image])
    print(type(processor).__name__, len(made["input_ids"][0]), made["image_grid_thw"])
    assert list(made["input_ids"][0]).count(151655) == 24 * 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=96, help=f"{SAMPLES} are ours")
    parser.add_argument("--weights", default="dummy,as-ours", help="dummy, as-ours or both")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=330.0, help="after which it is ended")
    parser.add_argument("--check", action="store_true", help="only load the folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    make_folder(folder)
    if args.check:
        check(folder)
        return
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    measure(args, folder)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
