"""A router's process with the simulated servers' tokenizer: `-m proxy.route_process` in tests/."""

from __future__ import annotations

import json
import sys

from api.sim import make_tokenizer
from tokenmill.cli.serve import set_log_level
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.proxy.proxy_fronts import route_fronts, run_route_front
from tokenmill.proxy.proxy_server import route

ARGV = (sys.executable, "-m", "proxy.route_process")


def main() -> None:
    if sys.argv[1] == "--join":
        run_route_front(sys.argv[2], lambda setup: (make_tokenizer(), None))
        return
    options = json.loads(sys.argv[1])
    options["route"]["backends"] = tuple(options["route"]["backends"])
    config = ServerConfig(**options["config"])
    set_log_level(config.log_level)
    parts = config, RouteConfig(**options["route"]), RouterConfig(**options["router"])
    if config.fronts > 1:
        route_fronts(ARGV, *parts, lambda url, pool: print(url, flush=True))
        return
    route(*parts, make_tokenizer(), lambda url, pool: print(url, flush=True))


if __name__ == "__main__":
    main()
