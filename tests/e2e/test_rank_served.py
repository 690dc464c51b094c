"""tokenmill serve --task rank with a tiny model: scores, bad input, limits, and killed workers."""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from playwright.sync_api import expect

from open_ports import descendants, elsewhere
from pages import Opened, open_browser
from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.__main__ import run
from tokenmill.api.ranking.rank_body import LONG_BODY_BYTES
from tokenmill.ranking.metrics import rank_metrics
from tokenmill.ranking.model_files import load_model, save_model
from tokenmill.ranking.request_json import read_request
from tokenmill.ranking.stores.table_folder import TableFolder

SPEC = replace(TINY, scaling_seqlen=64)
MSGPACK, JSON = "application/msgpack", "application/json"
KEY = "secret"
GENEROUS_S = 180.0
LABELS = [[1, 0, 0, 1, 1, 0], [0, 1, 1, 0]]
# A quick run of Server takes five seconds of load; a few queries are enough here.
SHORT = """
import json
import sys
from pathlib import Path

import msgspec

from tokenmill.bench.commands.mlperf import PANELS, run_of
from tokenmill.bench.mlperf import runs, loadgen_tests
from tokenmill.settings import Settings, defaults_of

runs.QUICK_DURATION_MS = 200
settings = Settings(json.loads(sys.argv[1]), defaults_of(*PANELS.values()))
logs = Path(sys.argv[2])
done = loadgen_tests.execute(settings, run_of(settings), settings.get("test-mode"), logs)
print(msgspec.json.encode(done.report).decode())
"""


def user(history: int, candidates: int, number: int = 1) -> dict[str, Any]:
    request = tiny_request(history, candidates, SPEC, number)
    return {
        "request_id": f"user-{number}",
        "user_id": request.user_id,
        "history": {
            "item_ids": request.item_ids.tolist(),
            "category_ids": request.category_ids.tolist(),
            "actions": request.actions.tolist(),
        },
        "candidates": {
            "item_ids": request.candidate_ids.tolist(),
            "category_ids": request.candidate_category_ids.tolist(),
        },
    }


USERS = [user(30, 6), user(12, 4, 2), user(50, 24, 3), user(3, 1, 4)]


@dataclass
class Server:
    url: str
    pid: int

    def call(
        self, body: Any, path: str = "/v1/rank", method: str = "POST", **headers: str
    ) -> tuple[int, Any]:
        """Status and decoded answer; dictionaries are sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        known = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        sent = known | {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=GENEROUS_S) as answer:
                content = answer.read()
                if answer.headers["content-type"] == MSGPACK:
                    return answer.status, msgspec.msgpack.decode(content)
                is_json = answer.headers["content-type"] == "application/json"
                is_json = is_json and bool(content)  # a HEAD has none
                return answer.status, json.loads(content) if is_json else content.decode()
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    def scores(self, users: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
        status, answer = self.call({"users": users, **fields})
        assert status == 200, answer
        found: list[dict[str, Any]] = answer["results"]
        return found

    def view(self) -> Any:
        """What the server knows by itself: /workers would wait for workers that stand still."""
        return self.call(None, "/dashboard/data", "GET")[1]

    def workers(self) -> list[int]:
        return [
            int(pid)
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ]

    @contextmanager
    def stopped(self) -> Iterator[list[int]]:
        """All workers stand still while the block runs."""
        pids = self.workers()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield pids
        finally:
            for pid in pids:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGCONT)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    model = tiny_model(SPEC)
    save_model(model, path)
    rows = model.stores["user"].lookup(torch.arange(SPEC.num_users))
    TableFolder.create(path.with_name("users"), rows).close()
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Two workers, which share the users' table in the memory of the first."""
    flags = ("--port", "0", "--workers", "2", "--api-key", KEY)
    command = [sys.executable, "-P", "-m", "tokenmill", "serve", str(folder), *flags]
    command += ["--table", f"user={folder.with_name('users')}"]
    limits = ("--max-queue", "6", "--max-body-size", "1MiB")
    with subprocess.Popen([*command, *limits], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            line = next(line for line in lines if "/v1/rank" in line)
            assert "tiny (float32 on cpu" in line and "scaling_seqlen 64" in line
            assert elsewhere(descendants(process.pid)) == set()
            yield Server(line.split(" is served at ")[1].split("/v1/rank")[0], process.pid)
        finally:
            process.terminate()
            process.stderr.close()
    assert process.returncode == 0


def test_scores_are_those_of_tokenmill_rank(
    server: Server, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, model = [], load_model(folder)
    for one in USERS:
        file = tmp_path / "request.jsonl"
        file.write_text(json.dumps(one), encoding="utf-8")
        assert run(["rank", str(file), "--model", str(folder)]) == 0
        printed.append(line := json.loads(capsys.readouterr().out))
        (found,) = server.scores([one])
        (exact,) = model.score([read_request(one, "x")])
        assert np.array_equal(np.array(found["scores"], np.float32), exact[:, 0])
        assert [round(score, 6) for score in found["scores"]] == line["scores"]
        assert found["request_id"] == line["request_id"]
        assert (found["scaling_seqlen"], found["depends_on_batch"]) == (64, False)
    together = server.scores(USERS)
    assert [each["index"] for each in together] == [0, 1, 2, 3]
    for found, line in zip(together, printed, strict=True):
        np.testing.assert_allclose(found["scores"], line["scores"], atol=2e-6)


def test_the_answer_says_how_scores_came_and_top_k_has_the_items(server: Server) -> None:
    status, answer = server.call({"users": USERS[:2], "model": "tiny", "top_k": 3})
    assert (status, answer["object"], answer["model"]) == (200, "rank", "tiny")
    assert answer["scaling_seqlen"] == "fixed"
    assert answer["usage"] == {"num_users": 2, "num_candidates": 10, "num_tokens": 54}
    whole = server.scores(USERS[:1])[0]["scores"]
    best = answer["results"][0]
    assert best["scores"] == sorted(whole, reverse=True)[:3]
    items = USERS[0]["candidates"]["item_ids"]
    assert [whole[items.index(item)] for item in best["item_ids"]] == best["scores"]


@pytest.mark.parametrize("content_type", [MSGPACK, "application/x-msgpack; charset=x"])
def test_msgpack_and_bytes_give_the_same_scores(server: Server, content_type: str) -> None:
    expected = server.scores(USERS[:1])[0]["scores"]
    packed = json.loads(json.dumps(USERS[0]))
    for part in ("history", "candidates"):
        for name, ids in packed[part].items():
            packed[part][name] = np.array(ids, "<i8").tobytes()
    body = msgspec.msgpack.encode({"users": [packed], "binary": True})
    status, answer = server.call(body, content_type=content_type)
    assert status == 200, answer
    assert np.frombuffer(answer["results"][0]["scores"], "<f4").tolist() == expected
    plain = msgspec.msgpack.encode({"users": USERS[:1]})
    _, in_json = server.call(plain, content_type=content_type, accept="application/json")
    assert in_json["results"][0]["scores"] == expected
    packed["history"]["item_ids"] = base64.b64encode(packed["history"]["item_ids"]).decode()
    mixed = USERS[0] | {
        "history": USERS[0]["history"] | {"item_ids": packed["history"]["item_ids"]}
    }
    _, answer = server.call({"users": [mixed]}, accept=MSGPACK)
    assert answer["results"][0]["scores"] == expected


@pytest.mark.parametrize("in_msgpack", [True, False])
def test_a_long_body_is_read_elsewhere_and_alike(server: Server, in_msgpack: bool) -> None:
    names = ["x" * LONG_BODY_BYTES, "y", "", None]
    users = [each | {"request_id": name} for each, name in zip(USERS, names, strict=True)]
    encode, kind = (msgspec.msgpack.encode, MSGPACK) if in_msgpack else (msgspec.json.encode, JSON)
    body = encode({"users": users, "top_k": 2})
    assert len(body) > LONG_BODY_BYTES
    status, answer = server.call(body, content_type=kind)
    assert status == 200 and answer["usage"]["num_candidates"] == 35
    found = answer["results"]
    assert [each["request_id"] for each in found] == names
    for mine, plain in zip(found, server.scores(USERS, top_k=2), strict=True):
        assert mine["scores"] == pytest.approx(plain["scores"], rel=1e-5)
        assert mine["item_ids"] == plain["item_ids"]
    assert len(descendants(server.pid)) > 1 + len(server.workers()), "one is for bodies"
    users[1] = wrong("history", "weights", None, [])["users"][1]
    status, error = server.call(encode({"users": users}), content_type=kind)
    assert (status, error["param"]) == (400, "users[1].history.weights")


def wrong(part: str, name: str, at: int | None, value: Any) -> dict[str, Any]:
    """The second of two users with one value that is not right."""
    bad = json.loads(json.dumps(USERS[1]))
    owner = bad[part] if part else bad
    if at is None:
        owner[name] = value
    else:
        owner[name][at] = value
    return {"users": [USERS[0], bad]}


WRONG: list[tuple[Any, str, str]] = [
    (wrong("history", "item_ids", 3, 64), "history.item_ids[3]", "64 is unknown"),
    (wrong("candidates", "item_ids", 1, 10**12), "candidates.item_ids[1]", "is unknown"),
    (wrong("history", "category_ids", 2, 4), "history.category_ids[2]", "4 is unknown"),
    (wrong("history", "actions", 0, 32), "history.actions[0]", "32 is unknown"),
    (wrong("", "user_id", None, 8), "user_id", "8 is unknown"),
    (wrong("history", "item_ids", 3, -1), "history.item_ids[3]", "-1 is not valid"),
    (wrong("history", "item_ids", 3, 1.5), "history.item_ids[3]", "1.5 is not valid"),
    (wrong("history", "item_ids", 3, True), "history.item_ids[3]", "true is not valid"),
    (wrong("history", "item_ids", 3, "7"), "history.item_ids[3]", "'7' is not valid"),
    (wrong("history", "item_ids", 3, 2**63), "history.item_ids[3]", "is not valid"),
    (wrong("history", "item_ids", 3, math.nan), "history.item_ids[3]", "NaN and Infinity"),
    (wrong("", "query_time", None, math.inf), "query_time", "NaN and Infinity"),
    (wrong("history", "item_ids", None, []), "history.item_ids", "the history is empty"),
    (wrong("candidates", "item_ids", None, []), "candidates.item_ids", "no candidate"),
    (wrong("candidates", "item_ids", None, [1] * 25), "candidates.item_ids", "the most are 24"),
    (wrong("history", "actions", None, [1]), "history.actions", "expected 12 values"),
    (wrong("history", "item_ids", None, "AAAA"), "history.item_ids", "3 bytes are no whole"),
    (wrong("history", "weights", None, []), "history.weights", "unknown or unsupported field"),
    (wrong("candidates", "labels", None, []), "candidates.labels", "unknown or unsupported"),
]


@pytest.mark.parametrize(("body", "field", "message"), WRONG)
def test_wrong_users_are_named_with_field_and_index(
    server: Server, body: Any, field: str, message: str
) -> None:
    status, error = server.call(body)
    assert (status, error["param"]) == (400, f"users[1].{field}")
    assert message in error["message"]
    assert error["message"].startswith(error["param"])


def test_wrong_calls_are_refused(server: Server) -> None:
    packed = msgspec.msgpack.encode(wrong("history", "item_ids", 3, math.nan))
    for body, headers, status, text in (
        ({"users": []}, {}, 400, "a list of at least 1"),
        ({"users": USERS, "top_k": 0}, {}, 400, "top_k: 0"),
        ({"users": USERS, "topk": 1}, {}, 400, "did you mean 'top_k'"),
        ({"users": USERS, "timeout": 0}, {}, 400, "timeout: 0"),
        ({"users": USERS, "binary": True}, {}, 400, "Accept: application/msgpack"),
        ({"users": USERS, "model": "other"}, {}, 404, "this server has 'tiny'"),
        ({"users": USERS * 2}, {}, 400, "8 answers; the most are 6 (--max-queue)"),
        (b"{", {}, 400, "not valid JSON"),
        (b"\xc1", {"content_type": MSGPACK}, 400, "not valid msgpack"),
        (packed, {"content_type": MSGPACK}, 400, "users[1].history.item_ids[3]: NaN"),
        (b" " * 2**21, {}, 413, "larger than 1048576 bytes"),
        ({"users": USERS}, {"authorization": "Bearer x"}, 401, "wrong API key"),
    ):
        found, error = server.call(body, **headers)
        assert (found, text in error["message"]) == (status, True), (found, error)


def test_a_full_queue_a_late_answer_and_a_client_that_leaves(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool, server.stopped():
        first = pool.submit(server.scores, USERS)
        until(lambda: server.view()["num_open"] == 4)
        status, error = server.call({"users": USERS[:3]})
        assert (status, error["code"]) == (429, "queue_full")
        status, error = server.call({"users": USERS[:1], "timeout": 0.01})
        assert (status, error["code"], error["param"]) == (408, "deadline", "timeout")
        gone = http.client.HTTPConnection(server.url.removeprefix("http://"))
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        gone.request("POST", "/v1/rank", json.dumps({"users": USERS[:2]}), headers)
        until(lambda: server.view()["num_open"] == 6)
        gone.close()
        until(lambda: server.view()["num_open"] == 4)
    assert len(first.result()) == 4


def loadgen(server: Server, folder: Path, tmp_path: Path, mode: str, **more: str) -> Any:
    """The report of LoadGen over the first users, whose labels are LABELS."""
    file, logs = tmp_path / "requests.jsonl", tmp_path / "logs"
    samples = [
        one | {"candidates": one["candidates"] | {"labels": truth}}
        for one, truth in zip(USERS, LABELS, strict=False)
    ]
    file.write_text("\n".join(map(json.dumps, samples)), encoding="utf-8")
    values = {"benchmark": "dlrm-v3", "quick": True, "quick-samples": 2, "model": str(folder)}
    values |= {"dataset": str(file), "url": server.url, "api-key": [KEY], "max-in-flight": 4}
    values |= {"target-qps": 100.0, "test-mode": mode, **more}
    logs.mkdir()
    command = [sys.executable, "-P", "-c", SHORT, json.dumps(values), str(logs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["num_failed"], report["url"]) == (0, f"{server.url}/v1/rank")
    return report


def test_requests_of_a_killed_worker_are_answered_by_another(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    """While it starts again the other one answers LoadGen's accuracy run."""
    expected = [each["scores"] for each in server.scores(USERS)]
    with concurrent.futures.ThreadPoolExecutor() as pool, server.stopped() as pids:
        answers = pool.submit(server.scores, USERS)
        until(lambda: all(worker["num_open"] for worker in server.view()["workers"]))
        os.kill(pids[0], signal.SIGKILL)
    found = [each["scores"] for each in answers.result()]
    for scores, known in zip(found, expected, strict=True):
        np.testing.assert_allclose(scores, known, atol=2e-6)
    report = loadgen(server, folder, tmp_path, "accuracy")
    metrics = rank_metrics(list(map(np.array, expected[:2])), list(map(np.array, LABELS)))
    told = [report["accuracy"][name] for name in ("ne", "accuracy", "gauc")]
    assert told == pytest.approx(metrics, abs=1e-3)
    until(lambda: all(worker["state"] == "ready" for worker in server.view()["workers"]))
    view = server.view()
    assert view["migrations"] >= 1 and view["num_open"] == 0
    assert sum(worker["restarts"] for worker in view["workers"]) == 1


def test_loadgen_drives_the_server_under_its_limit(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    report = loadgen(server, folder, tmp_path, "performance", scenario="Server")
    assert report["limits_ms"] == {"latency": 80} and report["metric"]["value"] > 0


def test_operations_are_those_of_every_server(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.call(None, "/health", "HEAD")[0] == 200
    text = server.call(None, "/metrics", "GET")[1]
    for name in (
        "tokenmill_rank_call_seconds_count",
        "tokenmill_rank_batch_tokens_bucket",
        "tokenmill_rank_num_waiting",
        'tokenmill_rank_embedding_keys_total{model_name="tiny",table="item",tier="device"}',
        'tokenmill_rank_embedding_keys_total{model_name="tiny",table="user",tier="host"}',
        'tokenmill_worker_up{model_name="tiny",worker="w1"} 1.0',
    ):
        assert name in text
    assert server.call(None, "/v1/models", "GET")[1]["data"][0]["id"] == "tiny"
    schema = server.call(None, "/openapi.json", "GET")[1]
    content = schema["paths"]["/v1/rank"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/json", MSGPACK}
    assert "RankCall" in server.call(None, "/docs", "GET")[1]
    assert run(["status", "--url", server.url]) == 0
    shown = capsys.readouterr()
    assert "w1" in shown.out and "requests open" in shown.err


def test_the_page_shows_batches_tables_and_workers(server: Server) -> None:
    server.scores(USERS)
    with open_browser() as browser, Opened(browser, f"{server.url}/dashboard", 1280) as opened:
        page = opened.page
        page.fill("#key", KEY)
        page.click("#key-form button")
        expect(page.locator("#model")).to_have_text("tiny")
        expect(page.locator("#tables")).to_contain_text("100 % device")
        expect(page.locator("#workers .worker")).to_have_count(2)
        expect(page.locator("#tiles")).to_contain_text("A batch, mean")
        expect(page.locator("#charts figure")).to_have_count(4)
        expect(page.locator("#counts")).to_contain_text("Ended: done")
        assert opened.said == [] and page.title() == "tiny · tokenmill"
        assert all(asked.startswith((server.url, "data:")) for asked in opened.asked)


def test_flags_that_mean_nothing_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--max-num-seqs", "8"], "--max-num-seqs has no effect with --task rank"),
        (["--prefill", "1", "--decode", "1"], "--decode has no effect with --task rank"),
        (["--task", "generate", "--table", "item=x"], "--table needs --task rank"),
    ):
        assert run(["serve", str(folder), *flags]) != 0
        assert message in capsys.readouterr().err
