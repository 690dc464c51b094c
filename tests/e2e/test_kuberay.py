"""The scripts of recipes/kuberay.yaml with a tiny model, and a Ray of two nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import yaml

from tiny_configs import write_config
from tiny_tokenizers import byte_level, save_folder

GENEROUS_S = 180.0
RECIPE = Path(__file__).parents[2] / "recipes" / "kuberay.yaml"
SMALL = {
    "RANDOM_WEIGHTS": "true",
    "DTYPE": "fp32",
    "NUM_THREADS": "1",
    "KV_CACHE_MEMORY": "4MiB",
    "PORT": "0",
    "API_KEY": "sk-0",
}


def test_the_head_serves_by_the_nodes_of_its_cluster(tmp_path: Path) -> None:
    model = save_folder(byte_level(), tmp_path / "tiny", eos_token="<|im_end|>")
    write_config(model, vocab_size=422, hidden_size=64, intermediate_size=96)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (_, cluster, _) = yaml.safe_load_all(RECIPE.read_text(encoding="utf-8"))
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    head, node = (group["template"]["spec"]["containers"][0]["args"][0] for group in groups)
    for name, own in (
        ("/models/Llama-3.1-8B-Instruct", str(model)),
        ("--device cuda", "--device cpu"),  # there is no GPU that Ray could lend
        ("0.0.0.0", "127.0.0.1"),
        (":6379", f":{port}"),
        ("exec tokenmill", f"exec {sys.executable} -P -m tokenmill"),
    ):
        assert name in head
        head = head.replace(name, own)
    start = "ray start --block --num-cpus=0 --object-store-memory=80000000 --disable-usage-stats "
    env = os.environ | {f"TOKENMILL_{name}": value for name, value in SMALL.items()}
    env |= {"POD_IP": "127.0.0.1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    log, folder = tmp_path / "log", tempfile.mkdtemp(prefix="ray")  # of sockets: a short name
    begun: list[subprocess.Popen[bytes]] = []
    try:
        for script, command in (
            (head, f"{start} --head --port={port} --temp-dir={folder} --include-dashboard=false"),
            (f"sleep 3; {node}", f"{start} --address=127.0.0.1:{port}"),
        ):
            with log.open("ab") as file:
                own = env | {"KUBERAY_GEN_RAY_START_CMD": command}
                given = ["/bin/bash", "-c", "--", script]
                out = {"stdout": file, "stderr": file}
                begun.append(subprocess.Popen(given, env=own, start_new_session=True, **out))
        deadline_s = time.monotonic() + GENEROUS_S
        while not (found := re.search(r"served at (http\S+)/v1", log.read_text())):
            assert time.monotonic() < deadline_s and begun[0].poll() is None, log.read_text()
            time.sleep(0.1)
        probed = urllib.request.urlopen(f"{found[1]}/health", timeout=GENEROUS_S)
        assert probed.status == 200
        head_of_call = {"Authorization": f"Bearer {SMALL['API_KEY']}"}
        asked = urllib.request.Request(f"{found[1]}/workers", headers=head_of_call)
        with urllib.request.urlopen(asked, timeout=GENEROUS_S) as answer:
            workers = json.load(answer)["workers"]
        assert [worker["state"] for worker in workers] == ["ready", "ready"]
    finally:
        for process in begun:
            os.killpg(process.pid, signal.SIGTERM)
        for process in begun:
            process.wait(GENEROUS_S)
        shutil.rmtree(folder, ignore_errors=True)
