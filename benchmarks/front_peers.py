"""The HTTP front beside vLLM's: CPU time of a token and of a request, in one run."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import frontend
from benchmarks.front_client import FrontLoad
from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.console import fetch
from tokenmill.core.flags import count, setting
from tokenmill.text.tokenizer import load_tokenizer

# streams, tokens of each, tokens per second that the engine offers
LOADS = ((128, 200, 5_000), (128, 400, 80_000), (1000, 30, 5_000))
FIGURES = ("tok_s", "tokens_per_chunk", "us_per_token", "us_per_request")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Options:
    vllm_python: str = setting("python", "A Python that has vLLM, in an environment of its own.")
    model: str = setting("smollm2", "Model whose tokenizer both servers have.")
    rounds: int = setting(1, "Times that each load runs on both.", count(1))


def run(options: Options) -> Report:
    """Calls of the frontend's benchmark to our server and to vLLM's, in turns.

    vLLM's server runs over an engine core that only counts tokens, and ours over a simulated engine
    in a process of its own, whose messages it decodes.

    python -m benchmarks.front_peers --vllm-python VENV/bin/python
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        word = write_model(Path(folder), options.model)
        for num_streams, num_tokens, offered in LOADS * options.rounds:
            step_ms = 1000 * num_streams / offered
            ours = frontend.Options(
                model=options.model,
                num_streams=(num_streams,),
                stream_tokens=num_tokens,
                step_ms=step_ms,
            )
            file = str(Path(__file__).with_name("vllm_front.py"))
            vllm = [options.vllm_python, file, folder, f"{step_ms:g}", str(word)]
            sides = (
                ("tokenmill", frontend.simulated_server(ours)), ("vllm", frontend.started(vllm)),
            )  # fmt: skip
            for name, server in sides:
                with server as (url, pid):
                    client = FrontLoad(url, frontend.NAME)
                    point = frontend.measure(client, num_streams, num_tokens, pid)
                row = {"server": name, "streams": num_streams, "offered_tok_s": offered}
                rows.append(row | {key: point[key] for key in FIGURES})
                console.note(str(rows[-1]))
    return {"rows": rows}


def show(report: Report) -> None:
    rows = [["server", "streams", "offered", "tok/s", "tokens/event", "us/token", "us/request"]]
    for row in report["rows"]:
        figures = [f"{row[key]:.1f}" for key in FIGURES]
        rows.append([row["server"], str(row["streams"]), str(row["offered_tok_s"]), *figures])
    console.print_table(rows)


def write_model(folder: Path, model: str) -> int:
    """A model folder with our tokenizer and no weights; returns the id of a word."""
    tokenizer = load_tokenizer(fetch(model))
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.named_tokens}
    named["chat_template"] = tokenizer.chat_template or ""
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = CONFIG | {"vocab_size": tokenizer.vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    return tokenizer.encode(" word")[0]


BENCHMARK = Benchmark("front_peers", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
