"""tokenmill worker: a worker that joins the pool of a running server."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import typer

from tokenmill.cli.serve import (
    ENGINE_PANELS,
    WORKER_SETTINGS,
    build_worker,
    identity_of,
    set_log_level,
)
from tokenmill.console import fetch
from tokenmill.core.flags import setting
from tokenmill.core.gpus import check_device
from tokenmill.core.types import TokenmillError
from tokenmill.settings import POOL, SERVER, Settings, by_key, only
from tokenmill.settings.options import command


@dataclass(frozen=True, slots=True)
class JoinOption:
    join: str | None = setting(
        None,
        "HOST:PORT of the server, as its --join-listen; by default LWS_LEADER_ADDRESS, port 7001.",
    )


JOINING = (JoinOption, *only(POOL, "token-file", "wait-s"), *only(SERVER, "log-level"))


def register(app: typer.Typer) -> None:
    command(app, "worker", {"Joining": JOINING, **ENGINE_PANELS}, positional="model")(worker)


def worker(settings: Settings) -> None:
    """Start a worker that joins the pool of a running server.

    tokenmill serve MODEL --workers 0 --join-listen 10.0.0.1:7001 --token-file join-token
    tokenmill worker --join 10.0.0.1:7001 --token-file join-token    on each other machine

    Model and settings are those of the server's workers, unless they are given here.
    Ctrl-C or SIGTERM lets running requests finish or go on at other workers, then stops.
    """
    from tokenmill.workers.joining.joiner import Membership
    from tokenmill.workers.joining.protocol import join_address, read_token
    from tokenmill.workers.worker_process import send_failure

    set_log_level(settings.get("log-level"))
    check_device(settings.get("device"))
    token, where = read_token(settings.get("token-file")), join_address(settings.get("join"))
    membership = Membership(where, token, settings.get("wait-s"))
    own = settings.values.items()
    ours = {setting.key: None for setting in WORKER_SETTINGS}
    own_values = {key: value for key, value in own if key in ours}
    given = Settings(_plain(membership.settings) | own_values, settings.defaults)
    try:
        check_device(given.get("device"))
        path = fetch(given.get("model"))
        given = given | {"model": str(path)}
        membership.check_model(identity_of(given, path))
        run = build_worker(given, given.setup())
    except Exception as error:
        send_failure(membership.address, error)
        raise
    logging.getLogger(__name__).info("joined the pool at %s", where)
    if not run(membership.address, membership.leave):
        raise TokenmillError(f"the server at {where} is gone, or has given this worker up")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as they were before they became JSON."""
    table = by_key(WORKER_SETTINGS)
    return {key: tuple(v) if table[key].repeated else v for key, v in values.items()}
