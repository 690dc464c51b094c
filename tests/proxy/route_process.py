"""A router's process with the simulated servers' tokenizer: `-m proxy.route_process` in tests/."""

from __future__ import annotations

import json
import sys

from api.sim import make_tokenizer
from tokenmill.cli.serve import set_log_level
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.proxy.proxy_server import route


def main() -> None:
    options = json.loads(sys.argv[1])
    options["route"]["backends"] = tuple(options["route"]["backends"])
    config = ServerConfig(**options["config"])
    set_log_level(config.log_level)
    route(
        config,
        RouteConfig(**options["route"]),
        RouterConfig(**options["router"]),
        make_tokenizer(),
        on_listening=lambda url, pool: print(url, flush=True),
    )


if __name__ == "__main__":
    main()
