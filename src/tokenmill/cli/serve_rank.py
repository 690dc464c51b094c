"""tokenmill serve --task rank, and its worker process."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.cli.rank import load_ranking_model
from tokenmill.core.config import PoolConfig, ServerConfig
from tokenmill.core.specs.hstu import ARCHITECTURE
from tokenmill.settings import (
    MODEL,
    POOL,
    SCHEDULER,
    SERVER,
    Settings,
    SettingsError,
    only,
)
from tokenmill.settings.shared import RankBatches, RankTables

if TYPE_CHECKING:
    from tokenmill.core.requests import Engine
    from tokenmill.ranking.model import RankingModel
    from tokenmill.workers.messages import ModelFacts
    from tokenmill.workers.placement import WorkerPlacement
    from tokenmill.workers.pool import WorkerPool

# Settings of SERVER and POOL that servers of ranking and video models refuse.
TEXT_SERVER_ONLY = frozenset(
    (
        *("fronts", "tool-parser", "reasoning-parser", "chat-template", "template-date"),
        "generation-config",
        *("otlp-endpoint", "prefill", "decode", "remote-prefill-tokens"),
        *("join-listen", "token-file", "kv-events"),
    )
)
LATENCY_MS = 80.0  # that a request may take, queue and step: batches are made so that it holds
RANK_SETTINGS = only(RankTables, "table")
RANK_ONLY = tuple(setting.key for setting in RANK_SETTINGS)
_DEVICE = ("device", "share-gpus")
_MODEL = ("model", "dtype", *_DEVICE, "num-threads", "random-weights")
_TAKEN = {s.key for s in (*SERVER, *POOL)} - TEXT_SERVER_ONLY | {
    *_MODEL,
    *RANK_ONLY,
    "task",
    "max-queue",
}
WORKER_SETTINGS = (
    *only(MODEL, *_MODEL),
    *only((*SERVER, *SCHEDULER), "log-level", "max-queue"),
    *RANK_SETTINGS,
)


def is_ranking_model(model: str) -> bool:
    """True for a folder whose config.json is a ranking model's."""
    path = Path(model).expanduser() / "config.json"
    try:
        return bool(json.loads(path.read_bytes()).get("architectures") == [ARCHITECTURE])
    except (OSError, ValueError, AttributeError):
        return False


def serve_rank(settings: Settings, config: ServerConfig) -> None:
    """Serve POST /v1/rank for the model that the settings name."""
    from tokenmill.api.ranking.rank_routes import describe, make_rank_service
    from tokenmill.api.server import serve_pool
    from tokenmill.workers.pool import WorkerPool

    for key in sorted(set(settings.values) - _TAKEN):
        raise SettingsError(f"--{key} has no effect with --task rank: leave it out")
    if "model" not in settings:
        raise SettingsError("--task rank needs a model: examples/rank_train.py writes a small one")
    name = config.served_model_name or Path(settings.get("model")).expanduser().resolve().name
    device, share = (settings.get(key) for key in _DEVICE)
    pool = settings.build(PoolConfig, device=device, share_gpus=share)

    def on_listening(url: str, facts: ModelFacts) -> None:
        log = logging.getLogger(__name__)
        log.info(
            f"{name} ({describe(facts.about)}) is served at {url}/v1/rank; {url}/docs describes it"
        )
        log.info(f"dashboard: {url}/dashboard")

    def make_pool(placement: WorkerPlacement) -> WorkerPool:
        spawn = placement.spawner(_worker_command(settings))
        return WorkerPool(spawn, pool, host=placement.host)

    make_service = partial(make_rank_service, name, settings.get("max-queue"))
    serve_pool(config, pool, make_pool, make_service, on_listening)


def _worker_command(settings: Settings) -> list[str]:
    own = {"model": str(Path(settings.get("model")).expanduser())}
    # -P: a folder named tokenmill in the working directory is not the package.
    command = [sys.executable, "-P", "-m", "tokenmill", "worker-process", "--task=rank"]
    return [*command, *(settings | own).flags(WORKER_SETTINGS)]


def load_rank_worker(settings: Settings) -> tuple[Engine, ModelFacts]:
    """The engine of a worker, and what the API has to know of it."""
    from tokenmill.ranking.engine import RankingEngine
    from tokenmill.ranking.policy import BatchLimits
    from tokenmill.workers.messages import ModelFacts

    model = load_ranking_model(settings)
    limits = BatchLimits(
        max_batch_tokens=RankBatches().max_batch_tokens,
        max_queue_requests=settings.get("max-queue"),
        latency_ms=LATENCY_MS,
    )
    engine = RankingEngine(model, limits)
    if engine.on_gpu:
        engine.warm_up()
    return engine, ModelFacts(about=facts_of(model))


def facts_of(model: RankingModel) -> dict[str, Any]:
    spec = model.spec
    return {
        "dtype": model.dense.type_name,
        "device": model.dense.device.type,
        "scaling_seqlen": spec.scaling_seqlen,
        "num_items": spec.num_items,
        "num_users": spec.num_users,
        "num_categories": spec.num_categories,
        "max_seq_len": spec.max_seq_len,
        "max_candidates": spec.max_candidates,
        "num_tasks": spec.num_tasks,
    }
