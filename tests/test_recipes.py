"""The recipes: every TOML sets what the command it names takes; the others are parsed, too."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import grafana_dashboard
import pytest
import typer
import yaml

from kube_shapes import problems
from tokenmill.cli.app import app
from tokenmill.settings import load

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
TOMLS = sorted(RECIPES.glob("*.toml"))
METRIC = re.compile(r"tokenmill_\w+")


def command_of(words: list[str]) -> Any:
    """The command that the words begin with, and the words that are left."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: path.stem)
def test_a_recipe_sets_what_its_command_takes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    program, *words = shlex.split(text.splitlines()[0].removeprefix("# "))
    command, left = command_of(words)
    assert (program, left) == ("tokenmill", ["--config", f"recipes/{path.name}"])
    taken = {name for option in command.params for name in option.opts + option.secondary_opts}
    keys = tomllib.loads(text)
    unknown = [key for key in keys if f"--{key}" not in taken]
    assert keys and not unknown, f"{command.name} does not take {unknown}"
    values = load({}, command.callback.taken, config=path, environ={}).values
    assert values.keys() == keys.keys()  # and each could be read


def test_the_page_names_every_recipe() -> None:
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)]+)\)", page))
    assert linked == {path.name for path in RECIPES.iterdir()} - {"README.md"}
    for path in TOMLS:
        said = [
            line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line[0] == "#"
        ]
        assert f"| {' '.join(said[1:])} |" in page, f"recipes/README.md says else of {path.name}"


def test_the_kuberay_manifest_serves_by_the_cluster() -> None:
    documents = list(yaml.safe_load_all((RECIPES / "kuberay.yaml").read_text(encoding="utf-8")))
    claim, cluster, service = documents
    assert (cluster["kind"], service["kind"]) == ("RayCluster", "Service")
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    words = shlex.split(head["args"][0])
    command, left = command_of(words[words.index("tokenmill") + 1 :])
    context = command.make_context("serve", list(left))
    assert command.name == "serve" and "--ray-address" in left and context.params
    assert left[left.index("--placement") + 1] == "ray"
    assert left[left.index("--device") + 1] == "cuda"  # GPUs whose pods have not joined yet
    assert head["readinessProbe"]["httpGet"] == head["startupProbe"]["httpGet"]
    (ports,) = [port for port in head["ports"] if port["name"] == "api"]
    assert ports["containerPort"] == service["spec"]["ports"][0]["port"] == 8000
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    (ray,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert cluster["spec"]["rayVersion"] == ray
    for group in cluster["spec"]["workerGroupSpecs"]:
        (worker,) = group["template"]["spec"]["containers"]
        mounts = [mount["mountPath"] for mount in worker["volumeMounts"]]
        assert mounts == [mount["mountPath"] for mount in head["volumeMounts"]]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
        (volume,) = group["template"]["spec"]["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


MANIFESTS = sorted(RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_has_what_kubernetes_takes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(text))
    assert [problem for document in documents for problem in problems(document)] == []
    made = set(re.findall(r"--from-literal=([\w-]+)=", text.partition("apiVersion")[0]))
    assert (
        set(re.findall(r"\bkey: ([\w-]+)", text)) == made
    )  # of the Secret that it says how to make
    probed = [container for container in containers(documents) if container.get("ports")]
    assert probed and all({"startupProbe", "readinessProbe"} <= c.keys() for c in probed)
    labels = [d["spec"]["template"]["metadata"]["labels"] for d in of_kind(documents, "Deployment")]
    for service in of_kind(documents, "Service"):
        selector = service["spec"]["selector"]
        assert selector in labels or any("/" in key for key in selector)
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        assert targets <= {port["name"] for c in probed for port in c["ports"]}


def of_kind(documents: list[Any], kind: str) -> list[Any]:
    return [document for document in documents if document["kind"] == kind]


def containers(value: Any) -> list[Any]:
    """All containers of manifests, wherever they are."""
    if isinstance(value, list):
        return [found for item in value for found in containers(item)]
    if isinstance(value, dict):
        return value.get("containers", []) + containers(list(value.values()))
    return []


def test_wrong_manifests_are_found() -> None:
    (cluster,) = of_kind(
        list(yaml.safe_load_all((RECIPES / "kuberay.yaml").read_text())), "RayCluster"
    )
    head = cluster["spec"]["headGroupSpec"]
    head["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    head["rayStartParams"]["num-cpus"] = 0
    del cluster["spec"]["workerGroupSpecs"][0]["minReplicas"]
    assert problems(cluster) == [
        "RayCluster.spec.headGroupSpec.rayStartParams.num-cpus: expected str, got 0",
        "RayCluster.spec.headGroupSpec.template.spec.containers[0]: readynessProbe is not known",
        "RayCluster.spec.workerGroupSpecs[0]: minReplicas is missing",
    ]


def test_the_dockerfile_copies_what_is_there_and_serves() -> None:
    text = (RECIPES / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    for names in re.findall(r"^COPY (.+)$", text, re.M):
        assert all((ROOT / name).exists() for name in names.split()[:-1])
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", text, re.M)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = {
        name for names in re.findall(r"^COPY (.+)$", text, re.M) for name in names.split()[:-1]
    }
    assert copied == {line[1:] for line in ignored if line[0] == "!"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (entry,), (arguments,) = (
        re.findall(rf"^{key} (\[.+\])$", text, re.M) for key in ("ENTRYPOINT", "CMD")
    )
    command, left = command_of(json.loads(arguments))
    assert json.loads(entry) == ["tokenmill"]
    assert command.name == "serve" and command.make_context("serve", list(left)).params


def test_the_compose_file_serves_by_the_dockerfile() -> None:
    """On CPUs, and with the profile cuda on GPUs; nobody is served without a key."""
    text = (RECIPES / "Dockerfile").read_text(encoding="utf-8")
    services = yaml.safe_load((RECIPES / "compose.yml").read_text(encoding="utf-8"))["services"]
    assert "profiles" not in services["server"] and services["cuda"]["profiles"] == ["cuda"]
    for name, service in services.items():
        build = service["build"]
        assert ((RECIPES / build["context"]).resolve(), build["dockerfile"]) == (
            *(ROOT, "recipes/Dockerfile"),
        )
        for argument, value in build.get("args", {}).items():
            assert f"ARG {argument}=" in text and f"  {value}) " in text
        (volume,) = (each.partition(":")[2] for each in service["volumes"])
        assert f"install -d -o mill {volume} " in text
        command, left = command_of(service["command"])
        assert command.name == "serve" and command.make_context("serve", left[1:]).params
        assert service["ports"] == ["127.0.0.1:8000:8000"] and "EXPOSE 8000" in text
        assert service["environment"]["TOKENMILL_API_KEY"].startswith("${TOKENMILL_API_KEY:?"), name


def test_the_grafana_dashboard_is_fresh_and_has_every_metric() -> None:
    text = grafana_dashboard.DASHBOARD.read_text(encoding="utf-8")
    assert text == grafana_dashboard.render(), "run python scripts/grafana_dashboard.py"
    page = grafana_dashboard.METRICS.read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `(tokenmill_\w+)`", page, re.M))
    panels = [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]
    named = [name for p in panels for t in p["targets"] for name in METRIC.findall(t["expr"])]
    assert {name.removesuffix("_bucket") for name in named} == known
    assert len({panel["id"] for panel in panels}) == len(panels) == len(known)
