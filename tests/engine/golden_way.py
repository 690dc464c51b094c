"""Ways to run the golden tests, each in a fork that has computed nothing: `golden_way.py FOLDER`.

FOLDER holds tiny models by name. stdin is a JSON object: for each way, what its environment has
beside this one's, and its flags (answers-only, without-numba). A way writes into FOLDER.NAME what
each model answers as a line of JSON, then what its tests print. The exit codes are printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SELECTED = (
    "transformers_tokens or without_drafts or padding_ends or penalties_changes"
    " or (golden_answer and True-True-40)"
)
FILES = ("test_golden.py", "test_golden_families.py", "test_golden_mtp.py")


def library_bits() -> str:
    """A digest of a product and a softmax of torch: it differs between instruction sets."""
    import numpy as np
    import torch

    x = torch.from_numpy(np.random.default_rng(0).standard_normal((37, 301)))
    parts = (x @ x.T, x.float() @ x.float().T, x.float().softmax(-1))
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def answers(folder: Path) -> dict[str, Any]:
    """Token ids and log-probabilities of each model's answers, some greedy and some drawn."""
    from driver import build, complete
    from tokenmill.core.types import SamplingParams

    source = random.Random(3)
    prompts = [[source.randrange(64) for _ in range(n)] for n in (1, 17, 33, 70)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    drawn = SamplingParams(
        temperature=1.0, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=2,
        repetition_penalty=1.1,
    )  # fmt: skip
    params = [greedy, drawn, greedy, greedy]
    found = {}
    for model in sorted(folder.iterdir()):
        for dtype in ("fp32", "int8"):
            built = build(model, dtype, chunked=True, prefix_cache=True, num_blocks=400)
            done = complete(built.engine, prompts, params)
            found[f"{model.name} {dtype}"] = [
                [answer.token_ids, [entry.logprobs for entry in answer.logprobs]] for answer in done
            ]
    return found


def run_tests() -> int:
    import pytest

    from tokenmill.kernels import cpu_kernels

    files = [str(TESTS / "engine" / name) for name in FILES]
    selected = f"({SELECTED}) and not gemma3"
    selected = selected if cpu_kernels() else f"{selected} and not int8"
    return int(pytest.main([*files, "-k", selected, "-p", "no:cacheprovider", "-rA"]))


def run_way(folder: Path, flags: list[str]) -> int:
    import torch

    if "without-numba" in flags:
        sys.modules["numba"] = None  # type: ignore[assignment]
    from tokenmill.kernels import cpu_kernels

    facts = {
        "compiled": cpu_kernels(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "library_bits": library_bits(),
        "answers": answers(folder),
    }
    print(json.dumps(facts), flush=True)
    return 0 if "answers-only" in flags else run_tests()


def fork_way(folder: Path, name: str, settings: dict[str, str], flags: list[str]) -> int:
    """The exit code of a way. torch and its libraries read the settings when they first compute."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = os.open(folder.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(settings)
    code = 1
    try:
        code = run_way(folder, flags)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    sys.path.append(str(TESTS))
    import torch.distributed.tensor  # noqa: F401  (torch.testing imports it at its first use)

    for name in ("llama", "mixtral", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"):
        import_module(f"transformers.models.{name}.modeling_{name}")
    import_module("tiny_models")
    ways, folder = json.load(sys.stdin), Path(sys.argv[1])
    print(json.dumps({name: fork_way(folder, name, *way) for name, way in ways.items()}))


if __name__ == "__main__":
    main()
