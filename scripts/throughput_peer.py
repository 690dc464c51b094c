"""tokenmill and vLLM on the same requests, one after the other on one GPU, both at their defaults.

    python scripts/throughput_peer.py --vllm-site DIR --rows 14b,8b-fp8

Weights are random on both sides, prefix caches are off, and all requests arrive at once: they are
those of `tokenmill bench throughput --lengths`, token by token. A row is one model, type and one or
more workloads; vLLM starts once for a row, and is imported while tokenmill runs. DIR is a folder,
or a list of them, that vLLM and what it needs can be imported from; without it vLLM is imported
from where this Python has it.

Every figure is printed as soon as it is known. A side that fails or takes longer than --seconds is
named with the end of its output, and the next one runs. The last line is one JSON object: of each
workload our output tokens/s, the share of the ceiling, vLLM's tokens/s, and our rate over vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenmill.bench
from tokenmill.bench.workload import Cell, make_cells, make_prompts
from tokenmill.core.bench_config import BenchConfig

SHAPES = Path(tokenmill.bench.__path__[0]) / "shapes"
SOURCE = Path(tokenmill.__path__[0]).parent
# FlashInfer's sampler would be compiled first. In one process vLLM's own errors are seen here.
VLLM_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
VLLM_ENV |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PEER = '{"peer": '  # how the lines of vLLM's process begin


@dataclass(frozen=True)
class Workload:
    lengths: str
    num_prompts: int
    output_len: int | None = None

    @property
    def flags(self) -> list[str]:
        """Those of `tokenmill bench throughput`."""
        flags = ["--lengths", self.lengths, "--num-prompts", str(self.num_prompts)]
        return flags + (["--output-len", str(self.output_len)] if self.output_len else [])

    @property
    def name(self) -> str:
        out = f", {self.output_len} out" if self.output_len else ""
        return f"{self.num_prompts} of {self.lengths}{out}"

    def cell(self) -> Cell:
        """The requests, as the command makes them."""
        config = BenchConfig(
            lengths=self.lengths, num_prompts=self.num_prompts, output_len=self.output_len
        )
        return make_cells(config)[0]


@dataclass(frozen=True)
class Row:
    model: str
    workloads: tuple[Workload, ...]
    fp8: bool = False  # weights and KV cache


UNIFORM = (Workload("uniform:100-1024", 256),)
MLPERF = Workload("llama3.1-8b", 2000, 128)
ROWS = {
    "8b": Row("llama3.1-8b", (MLPERF,)),
    "8b-fp8": Row("llama3.1-8b", (MLPERF, Workload("uniform:1000-1000", 1000, 1000)), fp8=True),
    "0.6b": Row("qwen3-0.6b", UNIFORM),
    "14b": Row("qwen3-14b", UNIFORM),
    "30b-a3b": Row("qwen3-30b-a3b", (Workload("uniform:1024-1024", 1024, 1024),)),
}


def main() -> None:
    args = _arguments()
    if args.peer:
        run_vllm(ROWS[args.peer])
        return
    found: dict[str, Any] = {}
    for name in args.rows:
        row = ROWS[name]
        vllm = start_vllm(name, args.vllm_site)
        ours = {work.name: our_rate(row, work, args.seconds) for work in row.workloads}
        theirs = vllm_rates(vllm, args.seconds)
        found[name] = {work: compare(ours[work], theirs.get(work)) for work in ours}
        say(row=name, **found[name])
    say(benchmark="throughput-peer", weights="random", rows=found)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def our_rate(row: Row, work: Workload, seconds: float) -> dict[str, Any] | None:
    """Output tokens/s of `tokenmill bench throughput`, and the ceiling that it prints."""
    command = [sys.executable, "-m", "tokenmill", "bench", "throughput", "--random-weights"]
    command += ["--device", "cuda", "--model", row.model, "--json-only", *work.flags]
    command += ["--dtype", "fp8", "--kv-cache-dtype", "fp8"] if row.fp8 else ["--dtype", "bf16"]
    lines = Process(command, dict(os.environ)).output(seconds)
    reports = [line for line in lines if line[:1] == "{"]
    if not reports:
        return None
    (cell,) = json.loads(reports[-1])["cells"].values()
    ours = cell["tokenmill"]
    figures = {"tok_s": ours["output_tok_s"], "ceiling_tok_s": ours["ceiling_tok_s"]}
    say(side="tokenmill", model=row.model, work=work.name, **figures)
    return figures


def start_vllm(name: str, site: str) -> Process:
    """A process that has vLLM imported, or is about to, and then waits to be asked for output."""
    env = dict(os.environ) | VLLM_ENV
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [site, str(SOURCE)]))
    return Process([sys.executable, __file__, "--peer", name], env)


def vllm_rates(vllm: Process, seconds: float) -> dict[str, float]:
    """Output tokens/s of vLLM by workload, as far as it came."""
    rows = [json.loads(line) for line in vllm.output(seconds) if line.startswith(PEER)]
    return {row["work"]: row["tok_s"] for row in rows if "work" in row}


class Process:
    """A command under way, which may wait for a line of input before it begins."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._command = command
        self._out = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=self._out, stderr=subprocess.STDOUT
        )

    def output(self, seconds: float) -> list[str]:
        """The lines that it prints; where it fails, its last words are printed here."""
        try:
            self._child.communicate(b"\n", timeout=seconds)
            why = f"ended with status {self._child.returncode}"
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            why = f"took more than {seconds:g} s"
        with self._out:
            self._out.seek(0)
            lines = self._out.read().splitlines()
        if self._child.returncode != 0:
            say(failed=" ".join(self._command[1:5]), why=why, end="\n".join(lines)[-3500:])
        return [line for line in lines if line.strip()]


def compare(ours: dict[str, Any] | None, theirs: float | None) -> dict[str, Any]:
    """What is known of a workload; None where a side has no figure."""
    tok_s = ours and ours["tok_s"]
    return {
        "tokenmill_tok_s": tok_s,
        "of_ceiling": tok_s and ours and round(tok_s / ours["ceiling_tok_s"], 3),
        "vllm_tok_s": theirs and round(theirs, 1),
        "ratio": tok_s and theirs and round(tok_s / theirs, 3),
    }


def run_vllm(row: Row) -> None:
    """In vLLM's process: one start when asked to, then every workload after a short warm-up."""
    import vllm

    if not sys.stdin.readline():
        sys.exit("nobody waits for vLLM's figures any more")
    say(peer="vllm", version=vllm.__version__)
    config = json.loads((SHAPES / f"{row.model}.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(config | {"torch_dtype": "bfloat16"})
        (Path(folder) / "config.json").write_text(text)
        llm = _start_vllm(folder, row.fp8)
        for work in row.workloads:
            cell = work.cell()
            _generate(llm, cell.warmup(), config["vocab_size"])
            count, seconds = _generate(llm, cell, config["vocab_size"])
            assert count == cell.num_output_tokens, f"{count} of {cell.num_output_tokens} tokens"
            say(peer="vllm", work=work.name, seconds=seconds, tok_s=count / seconds)


def _start_vllm(folder: str, fp8: bool) -> Any:
    from vllm import LLM

    begin = time.perf_counter()
    kinds = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if fp8 else {}
    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True,
        enable_prefix_caching=False, **kinds,
    )  # fmt: skip
    say(peer="vllm", start_s=_since(begin))
    return llm


def _generate(llm: Any, cell: Cell, vocab_size: int) -> tuple[int, float]:
    """Output tokens of all requests, and the seconds that they took."""
    from vllm import SamplingParams, TokensPrompt

    prompts = make_prompts(cell, 0, 0, vocab_size)
    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in cell.output_lens
    ]
    begin = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return sum(len(each.outputs[0].token_ids) for each in outputs), _since(begin)


def _since(begin: float) -> float:
    return round(time.perf_counter() - begin, 3)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, by commas")
    parser.add_argument("--vllm-site", default="", help="what vLLM is imported from")
    parser.add_argument("--seconds", type=float, default=400.0, help="of one process, at most")
    parser.add_argument("--peer", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rows = args.rows.split(",")
    if unknown := sorted(set(args.rows) - set(ROWS)):
        parser.error(f"--rows: {unknown[0]} is none of {', '.join(ROWS)}")
    return args


if __name__ == "__main__":
    main()
