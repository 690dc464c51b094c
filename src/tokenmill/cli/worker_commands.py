"""tokenmill status | scale | drain: the workers of a running server."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tokenmill import console
from tokenmill.cli.chat.remote_chat import RemoteError
from tokenmill.core.keys.run_folder import find_own_server
from tokenmill.settings import POOL, Settings, SettingsError, only
from tokenmill.settings.options import command
from tokenmill.settings.shared import JsonOption, ServerAddress

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600  # a new worker may have to load its model, an old one to finish its requests
TIER_KEYS = re.compile(r'embedding_keys_total\{table="(?P<table>\w+)",tier="(?P<tier>\w+)"\}')
COUNTS = ("workers", "prefill", "decode")
COLUMNS = (
    ("worker", "name"),
    ("pid", "pid"),
    ("state", "state"),
    ("role", "role"),
    ("run", "num_running"),
    ("wait", "num_waiting"),
    ("tok/s in", "prompt_tokens_per_s"),
    ("tok/s out", "tokens_per_s"),
    ("routed", "routed"),
    ("failures", "failures"),
)


JOB_COLUMNS = (
    ("worker", "name"),
    ("pid", "pid"),
    ("state", "state"),
    ("open", "num_open"),
    ("answered", "ended"),
    ("busy", "busy"),
    ("routed", "routed"),
    ("failures", "failures"),
)


def register(app: typer.Typer) -> None:
    panels = {"Server": ServerAddress, "Output": JsonOption}
    command(app, "status", panels)(status)
    command(app, "scale", {"Workers": only(POOL, *COUNTS), **panels})(scale)
    command(app, "drain", panels)(drain)


def status(settings: Settings) -> None:
    """Show the workers of a running server.

    tokenmill status
    tokenmill status --json
    tokenmill status --url http://10.0.0.1:8000 --control-token secret
    """
    _show(call_server(settings, "/workers"), settings)


def scale(settings: Settings) -> None:
    """Change the number of workers of a running server; no request is lost.

    tokenmill scale --workers 2
    tokenmill scale --decode 3
    """
    counts = {key: settings.get(key) for key in COUNTS if key in settings}
    if not counts:
        raise SettingsError("give a number of workers: --workers, --prefill or --decode")
    _show(call_server(settings, "/workers/scale", counts), settings)


def drain(
    settings: Settings,
    worker: Annotated[str, typer.Argument(help="Its name, as tokenmill status shows it.")],
) -> None:
    """Take a worker out of the pool of a running server once its requests are done.

    tokenmill drain w1
    """
    _show(call_server(settings, "/workers/drain", {"worker": worker}), settings)


def call_server(
    settings: Settings, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a running server answers; RemoteError says why there is no answer."""
    url = (settings.get("url") or URL).rstrip("/").removesuffix("/v1") + path
    headers, token = {"Content-Type": "application/json"}, settings.get("control-token")
    if token is None and (found := find_own_server(url)) is not None:
        url, token = found
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=TIMEOUT_S
        ) as response:
            view: dict[str, Any] = json.load(response)
            return view
    except urllib.error.HTTPError as error:
        raise RemoteError(f"{url}: {_message(error)}") from None
    except (OSError, ValueError) as error:
        raise RemoteError(f"{url}: {getattr(error, 'reason', error)}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


def _handovers(view: dict[str, Any]) -> str:
    """What became of prompts that prefill workers computed."""
    return (
        f"{view['transfers']} prompts went from prefill to decode workers, "
        f"{view['failed_transfers']} more were lost on the way"
    )


def _images(counts: dict[str, Any]) -> str:
    """What became of the images of calls."""
    refused = ", ".join(f"{count} by {stage}" for stage, count in counts["refused"].items())
    return (
        f"{counts['images']} images ({counts['tokens']} tokens): {counts['decoded']} decoded, "
        f"{counts['fetched']} fetched, {sum(counts['refused'].values())} refused"
        + (f" ({refused})" if refused else "")
        + f"; {counts['encoded']} encoded ({counts['patches']} patches), "
        f"{counts['encoder_hits']} found encoded"
    )


def _balance(rates: dict[str, Any]) -> str:
    """Do the two sides keep up with each other."""
    fitting = f"{rates['fitting_prefill']}:{rates['fitting_decode']}"
    starving = f"{rates['starving']} starves, " if rates["starving"] else ""
    return (
        f"prefill {rates['prefill_busy']:.0%} busy, decode {rates['decode_busy']:.0%}: {starving}"
        f"prefill:decode of {fitting} would fit"
    )


def _show(view: dict[str, Any], settings: Settings) -> None:
    if settings.get("json"):
        console.print_json(view, settings.get("json"))
        return
    of_jobs = "task" in view
    columns = JOB_COLUMNS if of_jobs else COLUMNS
    rows = [[title for title, _ in columns]]
    rows += [[_cell(worker[name]) for _, name in columns] for worker in view["workers"]]
    console.print_table(rows)
    for line in job_notes_of(view) if of_jobs else notes_of(view):
        console.note(line)


def _front(front: dict[str, Any]) -> str:
    restarts = f", restarted {front['restarts']} times" if front["restarts"] else ""
    return (
        f"front {front['name']} is {front['state']}: {front['url']}, process {front['pid']}, "
        f"{front['num_open']} calls{restarts}"
    )


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def notes_of(view: dict[str, Any]) -> Iterator[str]:
    """Lines below the table of workers: failures and what the router does."""
    yield (
        f"router {view['router']}, {view['num_open']} requests open, "
        f"{view['migrations']} went on at another worker"
    )
    yield from map(_front, view["fronts"])
    yield from _of_workers(view)
    if view["rates"] or view["transfers"] or view["failed_transfers"]:
        yield _handovers(view)
    if view["rates"]:
        yield _balance(view["rates"])
    if view.get("images") and view["images"]["images"]:
        yield _images(view["images"])


def _of_workers(view: dict[str, Any]) -> Iterator[str]:
    for worker in view["workers"]:
        for warning in worker["warnings"]:
            yield f"{worker['name']} warns: {warning}"
        if worker["failures"]:
            again = f"was restarted {worker['restarts']} times"
            if worker.get("role") == "backend":
                again = f"was down and came back {worker['returns']} times"
            yield f"{worker['name']} {again}; its last failure: {worker['last_failure']}"


def job_notes_of(view: dict[str, Any]) -> Iterator[str]:
    """Lines below the table of workers that answer jobs: queue, latency, tables, failures."""
    yield (
        f"{view['model']} ({view['task']}): {view['num_open']} requests open, "
        f"{view['answered']} answered, {view['migrations']} went on at another worker"
    )
    if latency := view["latency_ms"]:
        parts = ", ".join(f"{name} {latency[name]:.1f} ms" for name in ("p50", "p90", "p99"))
        yield f"latency of the last minute: {parts}"
    keys: dict[str, dict[str, float]] = {}
    for name, count in view["figures"].items():
        if found := TIER_KEYS.fullmatch(name):
            keys.setdefault(found["table"], {})[found["tier"]] = count
    for table, tiers in keys.items():
        total = sum(tiers.values())
        shares = [f"{count / total:.1%} from {tier}" for tier, count in tiers.items() if total]
        yield f"table {table}: {total:.0f} keys{', ' if shares else ''}{', '.join(shares)}"
    yield from _of_workers(view)
