"""How many files, and so connections, a process may have open."""

from __future__ import annotations

import resource

MAX_FILES = 65_536


def raise_file_limit() -> None:
    """Allow MAX_FILES, or as many as the system grants: the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_open_files() -> int:
    """The limit that holds now."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft
