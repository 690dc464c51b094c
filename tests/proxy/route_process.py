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
    backends = {k: tuple(v) if isinstance(v, list) else v for k, v in options["route"].items()}
    config = ServerConfig(**options["config"])
    set_log_level(config.log_level)
    parts = config, RouteConfig(**backends), RouterConfig(**options["router"])
    route(*parts, make_tokenizer(), lambda url, pool: print(url, flush=True))


if __name__ == "__main__":
    main()
