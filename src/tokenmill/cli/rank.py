"""tokenmill rank."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tokenmill import console
from tokenmill.core.config import ModelConfig
from tokenmill.core.flags import count, setting
from tokenmill.core.types import InvalidRequestError
from tokenmill.settings import Settings, SettingsError
from tokenmill.settings.options import command
from tokenmill.settings.shared import RankBatches, RankTables

if TYPE_CHECKING:
    from tokenmill.ranking.model import RankingModel

_NO_HURRY = 3.6e6  # ms: batches are as large as their tokens allow


@dataclass(frozen=True, slots=True)
class RankOptions:
    model: str | None = setting(
        None, "Folder of a ranking model; examples/rank_train.py writes one."
    )
    top_k: int | None = setting(None, "Answer with the K best candidates, best first.", count(1))
    dtype: Literal["auto", "fp32", "bf16", "fp8"] = setting(
        "auto",
        "Type of the products; auto: bf16 on a GPU, else fp32. fp8 rounds those of the layers.",
    )
    compare_dtype: Literal["fp32", "bf16"] | None = setting(
        None,
        "Score every line in this type too, and print how far scores and quality are apart.",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("cpu", "Where the model runs.")


PANELS = {"Ranking": (RankOptions, RankBatches), "Tables": RankTables}


def register(app: typer.Typer) -> None:
    command(app, "rank", PANELS)(rank)


def rank(
    settings: Settings,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Requests, a JSON object a line; - is stdin.")
    ],
) -> None:
    """Score each line's candidates for its user; answers go to stdout, a line each.

    tokenmill rank demo/requests.jsonl --model demo/model --top-k 3

    A line has user_id, history {item_ids, category_ids, actions} and
    candidates {item_ids, category_ids}; with candidates.labels the quality is
    printed too. A wrong line is answered by its error, and the exit status is 1.
    """
    from tokenmill.ranking.engine import RankingEngine
    from tokenmill.ranking.lines import LINES_AT_ONCE, LineRanker
    from tokenmill.ranking.model_files import table_paths
    from tokenmill.ranking.policy import BatchLimits

    model = load_ranking_model(settings)
    tokens = settings.get("max-batch-tokens")
    limits = BatchLimits(tokens, max_queue_requests=LINES_AT_ONCE, latency_ms=_NO_HURRY)
    other = _compared(settings, model)
    ranker = LineRanker(
        RankingEngine(model, limits),
        settings.values.get("top-k"),
        None if other is None else RankingEngine(other, limits),
    )
    start = time.perf_counter()
    with ExitStack() as stack:
        lines = sys.stdin if file == "-" else stack.enter_context(open(file, encoding="utf-8"))
        try:
            for answer in ranker.answers(lines):
                sys.stdout.write(json.dumps(answer) + "\n")
        except UnicodeDecodeError as wrong:
            problem = f"byte {wrong.object[wrong.start]:#x} is not UTF-8"
            raise InvalidRequestError(f"{file}: {problem}; requests are lines of JSON") from None
    for sentence in ranker.report(time.perf_counter() - start - ranker.compared_s):
        console.note(sentence)
    for sentence in ranker.comparison():
        console.note(f"against {settings.get('compare-dtype')}: {sentence}")
    for name in table_paths(settings.get("table"), settings.get("cache-rows")):
        console.note(f"table {name}: {model.stores[name].stats()}")
    model.close()
    if ranker.num_failed:
        raise typer.Exit(1)


def _compared(settings: Settings, model: RankingModel) -> RankingModel | None:
    """The model in the type of --compare-dtype, over the same tables."""
    from tokenmill.ranking.model_files import load_beside

    if (dtype := settings.get("compare-dtype")) is None:
        return None
    chunk = settings.get("candidate-chunk")
    return load_beside(model, Path(settings.get("model")), dtype, candidate_chunk=chunk)


def load_ranking_model(settings: Settings) -> RankingModel:
    from tokenmill.ranking.model import limit_threads
    from tokenmill.ranking.model_files import (
        choose_device,
        choose_dtype,
        load_model,
        random_model,
        table_paths,
    )
    from tokenmill.ranking.spec_file import read_spec

    if "model" not in settings:
        raise SettingsError("--model DIR is needed: examples/rank_train.py writes a small one")
    device = choose_device(settings.values.get("device", "cpu"))
    dtype, folder = choose_dtype(settings.get("dtype"), device), Path(settings.get("model"))
    levers = {"candidate_chunk": settings.values.get("candidate-chunk")}
    rows = settings.values.get("cache-rows", 0)
    tables = table_paths(settings.get("table"), rows)
    if settings.values.get("random-weights"):
        seed = ModelConfig().seed
        model = random_model(read_spec(folder), dtype, device, seed, tables, rows, **levers)
    else:
        model = load_model(folder, dtype, device, tables, rows, **levers)
    limit_threads(model.spec, settings.values.get("num-threads"))
    return model
