"""Load on a pool while its workers and fronts are killed and stopped at random; what became of it.

Beside that its router is renewed now and then, which rebuilds its index from the workers' dumps.
A front that is killed takes the connections with it that it has; the kernel says which these are.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from api.sim import MODEL
from api.sim_server import GENEROUS_S, SimServer

JSON = {"content-type": "application/json"}
PAUSE_S = (1.0, 4.0)  # between two blows: the start of a worker is what a blow costs
TABLE_READS = 3  # the kernel's table of connections is read in parts: one reading may lack a row
LONG = "the lazy dog jumps over the quick brown fox " * 6
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
# (prompt, fields): the script of the simulated engine, and what the front makes of it.
CALLS: list[tuple[str, dict[str, Any]]] = [
    (LONG + "count: 60", {}),
    ("count: 25", {"n": 2}),
    (LONG + "count: 300", {"stop": ["lazy dog.The quick brown fox jumps over the lazy"]}),
    (LONG + "count: 40", {"logprobs": True, "top_logprobs": 2}),
    (LONG + "count: 90", {"temperature": 0.9, "seed": 3, "max_tokens": 70}),
    ("say: 3141592653589793238462643383279502", {"guided_regex": "[0-9]{34}"}),
    (LONG + 'say: {"x": 12345678901234}', {"guided_json": SCHEMA}),
]


@dataclass
class Report:
    """Figures of a run."""

    requests: int = 0
    refused: int = 0  # answered 429 or 503 before they began, and sent again
    left: int = 0  # by their client
    kills: int = 0
    front_kills: int = 0
    cut: int = 0  # streams over connections of fronts that were killed
    hangs: int = 0
    new_routers: int = 0
    lost: int = 0  # broken off, or shorter than undisturbed
    duplicated: int = 0  # longer than undisturbed, or ended twice
    changed: int = 0  # any other difference from the undisturbed answer
    worst_gap_s: float = 0.0
    migrations: int = 0
    transfers: int = 0
    failed_transfers: int = 0
    preemptions: int = 0
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Connected:
    """A connection: the client's port, and the time in which it was made."""

    port: int = 0
    began_s: float = field(default_factory=time.monotonic)
    until_s: float = math.inf


def stream(
    server: SimServer, call: dict[str, Any], leave_after: int = 0, made: Connected | None = None
) -> tuple[Any, float]:
    """The answer of a streamed call, joined, and its longest gap; None: refused."""
    connection = http.client.HTTPConnection(*server.address, timeout=GENEROUS_S)
    try:
        connection.connect()
        if made is not None:
            made.port, made.until_s = connection.sock.getsockname()[1], time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(call), JSON)
        response = connection.getresponse()
        if response.status in (429, 503):
            return None, 0.0
        assert response.status == 200, response.read()
        choices: dict[int, dict[str, Any]] = {}
        usage, gap, last, done, count = None, 0.0, time.monotonic(), False, 0
        for line in response:
            if not line.strip():
                continue
            now = time.monotonic()
            gap, last = max(gap, now - last), now
            count += 1
            if leave_after and count > leave_after:
                return "left", gap
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                done = True
                break
            event = json.loads(data)
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for part in event["choices"]:
                choice = choices.setdefault(
                    part["index"], {"text": "", "logprobs": [], "finish": []}
                )
                choice["text"] += part["delta"].get("content") or ""
                choice["logprobs"] += (part.get("logprobs") or {}).get("content") or []
                if part.get("finish_reason"):
                    choice["finish"].append(part["finish_reason"])
        assert done, "the stream was broken off"
        counts = usage and (usage["prompt_tokens"], usage["completion_tokens"])
        return {"choices": choices, "usage": counts}, gap
    finally:
        connection.close()


def body(prompt: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def _is_a(role: str, pid: int) -> bool:
    """False for a child that has not become the program of its role yet."""
    try:
        return role in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False


def _wait_for_state(pid: int, states: str) -> None:
    """Until the kernel says so: Z once it has closed its sockets, T once it runs no more."""
    while True:
        try:
            stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        except OSError:
            stats = []
        if all(stat.rpartition(")")[2].split()[0] in states for stat in stats):
            return
        time.sleep(0.001)


def _sockets(pid: int, server_port: int) -> list[tuple[int, bool]]:
    """The sockets at the server's port that a front has: the client's port, and if it has it.

    False: nobody has accepted the connection yet. The client's port of a listener is 0.
    """
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(path))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")} | {"0"}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        (int(row[2].partition(":")[2], 16), row[9] != "0")
        for row in rows
        if int(row[1].partition(":")[2], 16) == server_port and row[9] in inodes
    ]


def ports_of(pid: int, server_port: int) -> set[int]:
    """The clients' ports of all connections that a front has, or nobody has accepted yet."""
    return {port for port, _ in _sockets(pid, server_port)} - {0}


def listens(pid: int, server_port: int) -> bool:
    """Whether a front accepts connections already."""
    return (0, True) in _sockets(pid, server_port)


def _difference(wanted: Any, got: Any) -> str:
    """Which kind of fault a wrong answer is."""
    choices = [(wanted["choices"].get(i), choice) for i, choice in got["choices"].items()]
    if any(len(choice["finish"]) > 1 for _, choice in choices):
        return "duplicated"
    for want, choice in choices:
        lengths = len((want or choice)["text"]), len(choice["text"])
        if lengths[0] != lengths[1]:
            return "lost" if lengths[1] < lengths[0] else "duplicated"
    return "changed"


class Chaos:
    """Clients that compare every answer with the undisturbed one, and a killer."""

    def __init__(self, server: SimServer, seed: int) -> None:
        self.report = Report()
        self._server = server
        self._seed = seed
        with ThreadPoolExecutor(len(CALLS)) as pool:
            answers = pool.map(lambda call: stream(server, body(*call)), CALLS)
            self._expected = [answer for answer, _ in answers]
        self._lock = threading.Lock()
        self._end_s = 0.0
        self._cut: set[int] = set()  # ports of connections of fronts that were killed
        self._cut_s: list[tuple[float, float]] = []  # when connections went to a stopped front

    def run(self, duration_s: float, num_clients: int) -> Report:
        self._end_s = time.monotonic() + duration_s
        seeds = range(self._seed, self._seed + num_clients)
        clients = [threading.Thread(target=self._client, args=(seed,)) for seed in seeds]
        for client in clients:
            client.start()
        self._kill()
        for client in clients:
            client.join()
        view = self._server.call("GET", "/workers").json
        for name in ("migrations", "transfers", "failed_transfers"):
            setattr(self.report, name, view[name])
        self.report.preemptions = int(self._server.metric("num_preemptions_total"))
        self.report.worst_gap_s = round(self.report.worst_gap_s, 2)
        return self.report

    def _client(self, seed: int) -> None:
        source = random.Random(seed)
        while time.monotonic() < self._end_s:
            number = source.randrange(len(CALLS))
            leave_after = source.randrange(1, 20) if source.random() < 0.1 else 0
            call = body(*CALLS[number])
            if source.random() < 0.5:
                call["cache_salt"] = str(source.random())  # nothing of it is cached
            made = Connected()
            try:
                answer, gap = stream(self._server, call, leave_after, made)
            except (AssertionError, OSError, http.client.HTTPException) as error:
                self._broken(made, f"{CALLS[number]}: {error!r}")
                continue
            with self._lock:
                self.report.worst_gap_s = max(self.report.worst_gap_s, gap)
                self.report.refused += answer is None
                self.report.requests += answer is not None
                self.report.left += answer == "left"
            if answer is None:
                time.sleep(0.05)
            elif answer not in ("left", self._expected[number]):
                kind = _difference(self._expected[number], answer)
                self._fault(kind, f"{CALLS[number]}: {answer}")

    def _kill(self) -> None:
        source = random.Random(self._seed)
        while time.monotonic() < self._end_s:
            time.sleep(source.uniform(*PAUSE_S))
            if source.random() < 0.2:
                self._server.call("POST", "/workers/router", {}, JSON)
                self.report.new_routers += 1
                continue
            fronts = self._fronts()
            if len(fronts) > 1 and source.random() < 0.4:
                self._kill_front(source.choice(fronts))
                continue
            pids = [pid for pid in self._server.worker_pids() if _is_a("worker", pid)]
            if not pids:
                continue
            hang = source.random() < 0.25
            os.kill(source.choice(pids), signal.SIGSTOP if hang else signal.SIGKILL)
            self.report.kills += not hang
            self.report.hangs += hang

    def _fronts(self) -> list[int]:
        """The fronts that accept connections: the last of them is never killed."""
        pids = [pid for pid in self._server.worker_pids() if _is_a("front", pid)]
        return [pid for pid in pids if listens(pid, self._server.address[1])]

    def _kill_front(self, pid: int) -> None:
        """Kill a front; once it has stopped it accepts nothing more."""
        began_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        with self._lock:
            _wait_for_state(pid, "TZX")
            for _ in range(TABLE_READS):
                self._cut |= ports_of(pid, self._server.address[1])
            os.kill(pid, signal.SIGKILL)
            _wait_for_state(pid, "ZX")  # until then the kernel gives it connections
            self._cut_s.append((began_s, time.monotonic()))
            self.report.front_kills += 1

    def _broken(self, made: Connected, what: str) -> None:
        """A stream broke off: its front was killed, or it is lost."""
        with self._lock:
            was_cut = made.port in self._cut or any(
                made.began_s <= last and first <= made.until_s for first, last in self._cut_s
            )
            self.report.cut += was_cut
        if not was_cut:
            self._fault("lost", what)

    def _fault(self, kind: str, what: str) -> None:
        with self._lock:
            setattr(self.report, kind, getattr(self.report, kind) + 1)
            self.report.faults.append(what[:2000])
