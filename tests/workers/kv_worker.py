"""A worker process with a tiny model whose KV moves; run as a script."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from kv.host_ipc import on_the_host
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.worker_process import run_worker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--connector", required=True)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    with on_the_host():
        run(args)


def run(args: argparse.Namespace) -> None:
    built = build_engine(
        resolve_setup(
            Setup(
                ModelConfig(args.model, "fp32", "cpu", random_weights=True, num_threads=1),
                CacheConfig(args.block_size, num_blocks=256, connector=args.connector),
                SchedulerConfig(max_num_batched_tokens=args.budget, max_num_seqs=16),
                ExecutionConfig(fused_kernels=False),
            )
        )
    )
    kv = built.engine.kv
    assert kv is not None
    facts = ModelFacts(
        max_model_len=built.max_model_len,
        vocab_size=built.spec.vocab_size,
        num_kv_blocks=built.num_blocks,
        block_size=built.block_size,
        dtype=built.dtype,
        kv=kv.address,
    )
    run_worker(built.engine, args.address, facts, kv)


if __name__ == "__main__":
    main()
