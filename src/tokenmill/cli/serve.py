"""tokenmill serve, and the worker process behind it."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokenmill import console
from tokenmill.cli.serve_rank import (
    RANK_ONLY,
    RANK_SETTINGS,
    is_ranking_model,
    load_rank_worker,
    serve_rank,
)
from tokenmill.cli.serve_video import (
    VIDEO_ONLY,
    VIDEO_SETTINGS,
    is_video_model,
    load_video_worker,
    serve_video,
)
from tokenmill.console import fetch
from tokenmill.core.config import (
    GPU_MEMORY_SHARE,
    ModelConfig,
    ParallelConfig,
    PoolConfig,
    RouterConfig,
    ServerConfig,
    Setup,
)
from tokenmill.core.flags import setting
from tokenmill.core.gpus import check_device, visible_gpus
from tokenmill.core.images import VisionConfig
from tokenmill.core.kv import SHM, choose_connectors
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    PARALLEL,
    POOL,
    ROUTER,
    SCHEDULER,
    SERVER,
    VISION,
    Settings,
    SettingsError,
    by_key,
    only,
    read_value,
    settings_of,
    without,
)
from tokenmill.settings.options import command

if TYPE_CHECKING:
    from tokenmill.engine.build import BuiltEngine
    from tokenmill.vision.loader import ImageLoader
    from tokenmill.workers.messages import ModelFacts

ENGINE_PANELS = {
    "Model": MODEL,
    "KV cache": CACHE,
    "Scheduler": SCHEDULER,
    "Execution": EXECUTION,
    "Ranks": PARALLEL,
}
COMMON = (  # the flags of serve's --help
    *("task", "host", "port", "api-key", "api-key-file", "served-model-name", "max-concurrency"),
    *("workers", "prefill", "decode", "router", "tp", "device", "dtype", "random-weights"),
    *("max-model-len", "kv-cache-memory", "max-num-seqs", "num-threads", "mtp"),
)
ONE_MODEL = ("model", "random-weights")  # what roles may not have of their own
# What is measured, or tested with workers that join, but not served with.
UNSERVED = ("weights-seed", "fused-kernels", "overlap")
FRONT_COMMAND = (sys.executable, "-P", "-m", "tokenmill", "front")


@dataclass(frozen=True, slots=True)
class TaskOption:
    task: Literal["auto", "generate", "rank", "video"] = setting(
        "auto", "What the model does; auto finds out from its folder."
    )


@dataclass(frozen=True, slots=True)
class RoleOptions:
    prefill_set: tuple[str, ...] = setting(
        (),
        "Setting of the prefill workers alone, such as max-num-batched-tokens=2048.",
        repeated=True,
    )
    decode_set: tuple[str, ...] = setting((), "Setting of the decode workers alone.", repeated=True)


IMAGE_ONLY = tuple(setting.key for setting in VISION)  # they say nothing to a model of text alone
# Of the worker alone: what engines of other tasks have beside the settings of a language engine.
JOB_SETTINGS = (*settings_of(TaskOption), *VIDEO_SETTINGS, *RANK_SETTINGS)
JOB_TASKS = {  # whether a model is one, its server, its engine, and the flags that are its own
    "rank": (is_ranking_model, serve_rank, load_rank_worker, RANK_ONLY),
    "video": (is_video_model, serve_video, load_video_worker, VIDEO_ONLY),
}
WORKER_SETTINGS = (*MODEL, *CACHE, *SCHEDULER, *EXECUTION, *PARALLEL, *only(SERVER, "log-level"))

SERVED = {
    "Server": (TaskOption, *SERVER),
    "Ranking": RANK_SETTINGS,
    "Images (for a model that takes images)": VISION,
    "Videos": VIDEO_SETTINGS,
    "Workers": (*POOL, RoleOptions),
    "Router": only(ROUTER, "router"),
    **{name: without(group, *UNSERVED) for name, group in ENGINE_PANELS.items()},
}


def register(app: typer.Typer) -> None:
    command(app, "serve", SERVED, positional="model", common=COMMON)(serve)
    engine = {"Engine": (*WORKER_SETTINGS, *JOB_SETTINGS)}
    command(app, "worker-process", engine, hidden=True)(worker_process)


def serve(settings: Settings) -> None:
    """Serve a model over HTTP with the API of OpenAI.

    tokenmill serve
    tokenmill serve Qwen/Qwen3-0.6B --port 8080 --kv-cache-memory 2GiB
    tokenmill serve ./my-model --host 0.0.0.0 --api-key secret
    tokenmill serve --workers 3 --router kv
    tokenmill serve --prefill 1 --decode 2
    tokenmill serve qwen3-vl-tiny    takes images; its weights are random
    tokenmill serve --workers 8 --fronts 4
    tokenmill serve demo/model --task rank --workers 2
    tokenmill serve Qwen/Qwen3-30B-A3B --ep 4 --redundant-experts 4 --rebalance-steps 500
    tokenmill serve ./Wan2.2-T2V-A14B-Diffusers --task video --workers 2

    Then, for example:

    curl http://127.0.0.1:8000/v1/chat/completions \\
      -H "Content-Type: application/json" \\
      -d '{"messages": \\[{"role": "user", "content": "Hello!"}]}'

    http://127.0.0.1:8000/dashboard is a live dashboard with a chat box.

    Ctrl-C or SIGTERM lets running requests finish, then stops.
    """
    config = settings.build(ServerConfig)
    set_log_level(config.log_level)
    model = settings.build(ModelConfig).model
    _check_joining(settings)
    task = task_of(settings, model)
    for name, (_, serve_task, _, own) in JOB_TASKS.items():
        if task == name:
            serve_task(settings, config)
            return
        if given := [key for key in own if key in settings]:
            raise SettingsError(f"--{given[0]} needs --task {name}")
    device, share = settings.get("device"), settings.get("share-gpus")
    pool = settings.build(PoolConfig, device=device, share_gpus=share)
    router = settings.build(RouterConfig)
    _check_kv_events(settings, pool)
    common = _roles(settings, pool)
    roles = [_own(common, key) for key in ("decode-set", "prefill-set")]
    ranks, prefill_ranks = (role.build(ParallelConfig).num_ranks for role in roles)
    pool = replace(pool, ranks=ranks, prefill_ranks=prefill_ranks)
    if share:
        _check_gpu_shares(roles, pool)
    if pool.workers and pool.ray_address is None:  # else workers compute on other machines
        check_device(device)
    path = fetch(model)
    pool = _with_terms(pool, settings, path)
    if max(ranks, prefill_ranks) > 1:
        _check_ranks(path, roles)
    from tokenmill.api.front_server import serve_fronts
    from tokenmill.api.server import serve as run_server
    from tokenmill.text.tokenizer import load_tokenizer

    name = config.served_model_name or model_name(model)

    def on_listening(url: str, facts: ModelFacts) -> None:
        tokens = f"{facts.kv_tokens} tokens"
        tokens += " on each rank" if roles[0].get("attention-dp") else ""
        logging.getLogger(__name__).info(
            f"{name} ({facts.dtype}, context {facts.max_model_len}, KV cache of {tokens}) "
            f"is served at {url}/v1; {url}/docs describes it"
        )
        logging.getLogger(__name__).info(f"dashboard: {url}/dashboard")
        if defaults := tokenizer.sampling_defaults(config.generation_config):
            told = ", ".join(f"{key} {value}" for key, value in defaults.items())
            logging.getLogger(__name__).info(
                f"generation_config.json: {told} where calls say nothing (--generation-config)"
            )
        if config.api_keys or config.api_key_file:
            whose = "shared by all keys" if config.share_prefix_cache else "apart for each key"
            logging.getLogger(__name__).info(f"cached prefixes are {whose} (--share-prefix-cache)")

    tokenizer = load_tokenizer(path, config.chat_template)
    vision = settings.build(VisionConfig)
    images = image_loader(path, vision)
    if images is None:
        _refuse_image_flags(roles)
    commands = [worker_command(role, path) for role in roles]
    if config.fronts > 1:
        serve_fronts(
            *(commands[0], FRONT_COMMAND, tokenizer, config, name, on_listening, pool, router),
            *(commands[1], vision, str(path)),
        )
        return
    run_server(
        *(commands[0], tokenizer, config, name, on_listening, pool, router),
        *(commands[1], images),
    )


def _check_kv_events(settings: Settings, pool: PoolConfig) -> None:
    if pool.kv_events is not None and settings.get("attention-dp"):
        raise SettingsError("--kv-events does not go with --attention-dp: give one of them")


def task_of(settings: Settings, model: str) -> str:
    task = str(settings.get("task"))
    if task != "auto":
        return task
    return next((name for name, (fits, *_) in JOB_TASKS.items() if fits(model)), "generate")


def _check_joining(settings: Settings) -> None:
    """Refuse flags that do not go with workers that join, or need them."""
    from tokenmill.workers.joining.protocol import link_host, read_token, split_address

    listen = settings.get("join-listen")
    if listen is None:
        if settings.get("workers") == 0:
            raise SettingsError("--workers 0 needs --join-listen: else no worker ever comes")
        if "token-file" in settings:
            raise SettingsError("--token-file needs --join-listen: it is for workers that join")
        return
    for key in ("prefill", "decode"):
        if settings.get(key):
            raise SettingsError(
                f"--join-listen does not go with --{key}: workers that join do all of a request"
            )
    split_address(listen, "--join-listen")
    read_token(settings.get("token-file"))
    if settings.get("fronts") > 1:
        link_host(listen)


def _with_terms(pool: PoolConfig, settings: Settings, path: Path) -> PoolConfig:
    """The pool with what workers that join are told: settings, and what tells their model."""
    if pool.join_listen is None:
        return pool
    keys = {setting.key for setting in WORKER_SETTINGS}
    model = settings.get("model")
    model = str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model
    own = {key: value for key, value in settings.values.items() if key in keys} | {"model": model}
    return replace(pool, join_settings=own, join_model=identity_of(settings, path))


def identity_of(settings: Settings, path: Path) -> dict[str, str]:
    """What tells a model from others that clients may take it for."""
    from tokenmill.models.checkpoints.weights_digest import model_identity

    config = settings.build(ModelConfig)
    return model_identity(path, random_weights=config.random_weights, seed=config.seed)


def _refuse_image_flags(roles: list[Settings]) -> None:
    """What was given for images, by any source, is an error where the model takes none."""
    for key in IMAGE_ONLY:
        if any(key in role for role in roles):
            raise SettingsError(f"--{key}: the model takes no images; leave the flag out")


def image_loader(path: Path, config: VisionConfig) -> ImageLoader | None:
    """What loads the images of calls, for a model that takes some."""
    from tokenmill.vision.loader import ImageLoader
    from tokenmill.vision.processor import check_pillow, load_processor

    processor = load_processor(path)
    if processor is None:
        return None
    check_pillow()
    return ImageLoader(processor, config)


def worker_process(
    settings: Settings,
    address: Annotated[str, typer.Option("--address", help="Socket of the API process.")],
) -> None:
    """Run an engine for the API process that listens at an address."""
    from tokenmill.workers.socket_folder import end_with_listener
    from tokenmill.workers.worker_process import run_worker, send_failure

    end_with_listener(address)
    set_log_level(settings.get("log-level"))
    run: Callable[..., bool]
    try:
        if (task := settings.get("task")) in JOB_TASKS:
            engine, facts = JOB_TASKS[task][2](settings)
            run = partial(run_worker, engine, facts=facts)
        else:
            run = build_worker(settings, settings.setup())
    except Exception as error:
        send_failure(address, error)
        if os.environ.get("TOKENMILL_TRACEBACK") == "1":
            raise
        raise typer.Exit(1) from None
    run(address)


def build_worker(settings: Settings, setup: Setup) -> Callable[..., bool]:
    """Build an engine; the result runs it as the worker of an address."""
    from tokenmill.workers.worker_process import run_worker

    warnings: list[str] = []
    built = _build(setup, warnings.append)

    def run(address: str, leave: Callable[[], None] | None = None) -> bool:
        built.engine.warm_up()
        facts = _facts(built, settings.get("max-queue"), warnings)
        return run_worker(built.engine, address, facts, built.engine.kv, leave)

    return run


def _check_ranks(path: Path, roles: list[Settings]) -> None:
    """Refuse what cannot be divided before many processes are started for it."""
    from tokenmill.models.checkpoints.shards import plan_layout
    from tokenmill.models.checkpoints.weights import read_spec
    from tokenmill.parallel import Ranks

    for role in roles:
        config = role.build(ParallelConfig)
        plan_layout(read_spec(path), config, Ranks(0, config.num_ranks))


def worker_command(settings: Settings, path: Path) -> list[str]:
    given = settings | {"model": str(path)}
    # -P: a folder named tokenmill in the working directory is not the package.
    command = [sys.executable, "-P", "-m", "tokenmill", "worker-process"]
    return [*command, *given.flags(WORKER_SETTINGS)]


def _roles(settings: Settings, pool: PoolConfig) -> Settings:
    """The settings of the workers, checked for a pool with prefill and decode workers."""
    if not pool.prefill and not pool.decode:
        for key in ("prefill-set", "decode-set"):
            if key in settings:
                raise SettingsError(f"--{key} needs --prefill and --decode")
        return settings
    if not pool.prefill or not pool.decode:
        given, missing = ("prefill", "decode") if pool.prefill else ("decode", "prefill")
        raise SettingsError(f"--{given} needs --{missing}: prefill workers only compute prompts")
    if "workers" in settings:
        raise SettingsError("give --workers or --prefill and --decode, not both")
    return settings | {"kv-connector": _connector(settings, pool)}


def _connector(settings: Settings, pool: PoolConfig) -> str:
    """How KV moves: workers cannot know that all of them run on this machine, so they are told."""
    asked = str(settings.values.get("kv-connector", "auto"))
    names = choose_connectors(asked, _on_gpu(settings), one_host=pool.ray_address is None)
    return SHM if names == (SHM,) else asked


def _on_gpu(settings: Settings) -> bool:
    return settings.get("device") != "cpu" and _num_gpus() > 0


def _num_gpus() -> int:
    return len(visible_gpus())


def _own(settings: Settings, key: str) -> Settings:
    """The settings with those that a role has of its own, given as KEY=VALUE."""
    known = by_key(without(WORKER_SETTINGS, *UNSERVED))
    own: dict[str, Any] = {}
    for item in settings.get(key):
        name, _, value = item.partition("=")
        if name not in known or not value:
            raise SettingsError(
                f"--{key} must be SETTING=VALUE of an engine, such as max-num-seqs=64, got {item!r}"
            )
        if name in ONE_MODEL:
            raise SettingsError(f"--{key} {name}: prefill and decode workers have the same model")
        own[name] = read_value(known[name], value, f"--{key} {name}")
    return settings | own


def _gpu_part(settings: Settings) -> float:
    """The part of this machine's GPUs that a worker runs on; its ranks may share them."""
    num_gpus = max(1, _num_gpus())
    return min(settings.build(ParallelConfig).num_ranks, num_gpus) / num_gpus


def _check_gpu_shares(roles: list[Settings], pool: PoolConfig) -> None:
    """Refuse workers that together ask for more of a GPU than there is."""
    counts = (pool.decode or pool.workers, pool.prefill)
    shares = [role.get("gpu-memory-utilization") or 0.0 for role in roles]
    workers = [count * _gpu_part(role) for count, role in zip(counts, roles, strict=True)]
    total = sum(count * share for count, share in zip(workers, shares, strict=True))
    if total > 1 and _on_gpu(roles[0]) and pool.ray_address is None:
        given = " and ".join(f"{share:g}" for share in sorted({*shares}) if share)
        even = GPU_MEMORY_SHARE / math.ceil(sum(workers))
        raise SettingsError(
            f"--gpu-memory-utilization {given}: {sum(counts)} workers that share GPUs would take "
            f"{total:.0%} of one; give {even:.2f} to each, or leave it out"
        )


def model_name(model: str) -> str:
    """The model name that clients use: the one that was given, or the last part of the path."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def set_log_level(level: str) -> None:
    """Log lines of this level and above, plain, to stderr."""
    logging.basicConfig(level=level.upper(), format="%(message)s", stream=sys.stderr)


def _build(setup: Setup, on_warning: Callable[[str], None]) -> BuiltEngine:
    from tokenmill.engine.build import build_engine
    from tokenmill.engine.choices import resolve_setup
    from tokenmill.text.tokenizer import load_tokenizer

    vocab = load_tokenizer(setup.model.model).grammar_vocab()
    with (
        console.progress("Loading weights", size_in_bytes=True) as loaded,
        console.progress("Capturing CUDA graphs") as captured,
    ):
        return build_engine(resolve_setup(setup), vocab, loaded, captured, on_warning)


def _facts(built: BuiltEngine, max_waiting: int, warnings: list[str]) -> ModelFacts:
    from tokenmill.workers.messages import ModelFacts

    return ModelFacts(
        max_model_len=built.max_model_len,
        vocab_size=built.spec.vocab_size,
        num_kv_blocks=built.num_blocks,
        block_size=built.block_size,
        kv_tokens=built.kv_tokens,
        dtype=built.dtype,
        device=built.device,
        kv=built.engine.kv.address if built.engine.kv is not None else None,
        max_waiting=max_waiting,
        warnings=warnings,
        gpus=built.gpus,
    )
