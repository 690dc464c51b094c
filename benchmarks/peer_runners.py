"""One peer in a process of its own: reads one JSON line per task, answers with one JSON line.

`python benchmarks/peer_runners.py NAME MODEL FACTS`, with what the peer has installed alone. Every
runner switches prefix caches off, decodes greedily and goes on past the end-of-text token.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

Prompts = list[list[int]]
Facts = dict[str, Any]  # threads, dtype, random, gpu
SLOT_TOKENS = 256  # llama.cpp rounds its slots up to this; wider ones than needed slow it down


class Runner(Protocol):
    def generate(self, prompts: Prompts, lens: list[int]) -> tuple[float, list[int]]:
        """Seconds that the peer took, and the number of new tokens of each prompt."""


def _load_torch_model(model: Path, num_threads: int) -> Any:
    """The checkpoint as a transformers model in fp32."""
    import torch
    import transformers

    torch.set_num_threads(num_threads)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(model)}
    if model.suffix == ".gguf":
        where = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    return transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


def _save_as_folder(model: Path, num_threads: int, folder: str) -> None:
    """Write a checkpoint as a Hugging Face folder with fp32 weights and its tokenizer."""
    import transformers

    loaded = _load_torch_model(model, num_threads)
    if hasattr(loaded.config, "quantization_config"):  # a GGUF file leaves its mark
        del loaded.config.quantization_config
        loaded.hf_quantizer = None
    loaded.save_pretrained(folder)
    is_gguf = model.suffix == ".gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(model.parent if is_gguf else model), gguf_file=model.name if is_gguf else None
    )
    tokenizer.save_pretrained(folder)


class TransformersRunner:
    """transformers in fp32: generate() over one padded batch."""

    def __init__(self, model: Path, facts: Facts) -> None:
        self._model = _load_torch_model(model, facts["threads"])

    def generate(self, prompts: Prompts, lens: list[int]) -> tuple[float, list[int]]:
        import torch

        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=lens[0],
                min_new_tokens=lens[0],
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - begin
        return seconds, [out.shape[1] - ids.shape[1]] * out.shape[0]


class LlamaCppRunner:
    """llama.cpp's server inside this process, on the GGUF file as it is."""

    def __init__(self, model: Path, facts: Facts) -> None:
        _need_gguf(model)
        self._model = model
        self._num_threads = facts["threads"]
        self._servers: dict[tuple[int, int], Any] = {}

    def _server(self, num_slots: int, slot_tokens: int) -> Any:
        """A server whose slots fit the task; its context is split evenly over the slots."""
        import xllamacpp

        key = (num_slots, slot_tokens)
        if key not in self._servers:
            params = xllamacpp.CommonParams()
            params.model.path = str(self._model)
            params.n_parallel = num_slots
            params.n_ctx = num_slots * slot_tokens
            params.cpuparams.n_threads = self._num_threads
            params.cpuparams_batch.n_threads = self._num_threads
            params.cache_ram_mib = 0
            self._servers[key] = xllamacpp.Server(params)
        return self._servers[key]

    def generate(self, prompts: Prompts, lens: list[int]) -> tuple[float, list[int]]:
        needed = len(prompts[0]) + lens[0] + 1
        server = self._server(len(prompts), -(-needed // SLOT_TOKENS) * SLOT_TOKENS)

        def complete(prompt: list[int]) -> int:
            answer = server.handle_completions(
                {
                    "prompt": prompt,
                    "max_tokens": lens[0],
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_prompt": False,
                }
            )
            if "usage" not in answer:
                raise RuntimeError(f"llama.cpp answered {answer}")
            return int(answer["usage"]["completion_tokens"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            begin = time.perf_counter()
            counts = list(pool.map(complete, prompts))
            return time.perf_counter() - begin, counts


class OpenVinoRunner:
    """OpenVINO GenAI's continuous batching; it reads GGUF files directly."""

    def __init__(self, model: Path, facts: Facts) -> None:
        import openvino_genai

        _need_gguf(model)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 4096
        self._pipeline = openvino_genai.LLMPipeline(
            str(model), "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=facts["threads"]
        )

    def generate(self, prompts: Prompts, lens: list[int]) -> tuple[float, list[int]]:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = lens[0]
        config.ignore_eos = True
        config.do_sample = False
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        begin = time.perf_counter()
        result = self._pipeline.generate(inputs, config)
        return time.perf_counter() - begin, [len(tokens) for tokens in result.tokens]


class CTranslate2Runner:
    """CTranslate2 in int8, converted from the transformers model."""

    def __init__(self, model: Path, facts: Facts) -> None:
        import ctranslate2
        import transformers

        with tempfile.TemporaryDirectory() as folder:
            _save_as_folder(model, facts["threads"], folder)
            converted = folder + "/ctranslate2"
            converter = ctranslate2.converters.TransformersConverter(folder)
            converter.convert(converted, quantization="int8")
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            self._generator = ctranslate2.Generator(
                converted, compute_type="int8", inter_threads=1, intra_threads=facts["threads"]
            )

    def generate(self, prompts: Prompts, lens: list[int]) -> tuple[float, list[int]]:
        tokens = [self._tokenizer.convert_ids_to_tokens(prompt) for prompt in prompts]
        begin = time.perf_counter()
        results = self._generator.generate_batch(
            tokens,
            max_length=lens[0],
            min_length=lens[0],
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
        )
        return time.perf_counter() - begin, [len(r.sequences_ids[0]) for r in results]


class VllmRunner:
    """vLLM at its defaults on a GPU; its CPU build in fp32."""

    def __init__(self, model: Path, facts: Facts) -> None:
        import vllm

        self._folder = tempfile.TemporaryDirectory()
        kinds: dict[str, Any] = {"enable_prefix_caching": False}
        if facts["random"]:
            config = json.loads(model.read_text()) | {"torch_dtype": "bfloat16"}
            (Path(self._folder.name) / "config.json").write_text(json.dumps(config))
            kinds |= {"load_format": "dummy", "skip_tokenizer_init": True}
        else:
            _save_as_folder(model, facts["threads"], self._folder.name)
        if not facts["gpu"]:
            kinds |= {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096}
        if facts["dtype"] == "fp8":
            kinds |= {"quantization": "fp8", "kv_cache_dtype": "fp8"}
        self._llm = vllm.LLM(self._folder.name, **kinds)

    def generate(self, prompts: Prompts, lens: list[int]) -> tuple[float, list[int]]:
        import vllm

        sampling = [
            vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lens
        ]
        inputs = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        begin = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        return time.perf_counter() - begin, [len(o.outputs[0].token_ids) for o in outputs]


RUNNERS: dict[str, Callable[[Path, Facts], Runner]] = {
    "transformers": TransformersRunner,
    "llama.cpp": LlamaCppRunner,
    "openvino": OpenVinoRunner,
    "ctranslate2": CTranslate2Runner,
    "vllm": VllmRunner,
}


def _need_gguf(model: Path) -> None:
    if model.suffix != ".gguf":
        raise ValueError(f"this peer needs a GGUF file, and {model.name} is not one")


def main(name: str, model: str, facts: str) -> None:
    """Load the peer, say so, then serve tasks until stdin ends."""
    # Libraries print to stdout; the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    try:
        runner = RUNNERS[name](Path(model), json.loads(facts))
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            task = json.loads(line)
            seconds, counts = runner.generate(task["prompts"], task["lens"])
            print(json.dumps({"seconds": seconds, "num_tokens": counts}), file=answers)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
