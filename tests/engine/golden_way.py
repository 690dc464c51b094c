"""One way to run the golden tests, in a process of its own: `golden_way.py FOLDER [without-numba]`.

FOLDER holds tiny models by name. Prints what each answers as a line of JSON, then runs the tests.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
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


def main() -> int:
    if "without-numba" in sys.argv:
        sys.modules["numba"] = None  # type: ignore[assignment]
    sys.path.append(str(TESTS))
    import pytest
    import torch

    from tokenmill.kernels import cpu_kernels

    facts = {
        "compiled": cpu_kernels(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "library_bits": library_bits(),
        "answers": answers(Path(sys.argv[1])),
    }
    print(json.dumps(facts), flush=True)
    if "answers-only" in sys.argv:
        return 0
    files = [str(TESTS / "engine" / name) for name in FILES]
    selected = f"({SELECTED}) and not gemma3"
    selected = selected if cpu_kernels() else f"{selected} and not int8"
    return int(pytest.main([*files, "-k", selected, "-p", "no:cacheprovider"]))


if __name__ == "__main__":
    sys.exit(main())
