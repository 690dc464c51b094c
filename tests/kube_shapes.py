"""What Kubernetes, KubeRay and LeaderWorkerSet allow in a manifest: names, types, and what must be.

A key that ends with "!" is required, a set is an enumeration, and a list has one shape for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shape = Any

NAMES = {"any": str}  # names that the author chooses
QUANTITIES = {"cpu": str, "memory": str, "storage": str, "nvidia.com/gpu": str}
PROBE = {
    "httpGet!": {"path": str, "port!": str},
    "periodSeconds": int,
    "failureThreshold": int,
}
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [
        {
            "name!": str,
            "value": str,
            "valueFrom": {
                "fieldRef": {"fieldPath!": {"status.podIP"}},
                "secretKeyRef": {"name!": str, "key!": str},
            },
        }
    ],
    "ports": [{"containerPort!": int, "name": str}],
    "startupProbe": PROBE,
    "readinessProbe": PROBE,
    "resources!": {"requests!": QUANTITIES, "limits!": QUANTITIES},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
POD = {
    "metadata": {"labels": NAMES},
    "spec!": {
        "containers!": [CONTAINER],
        "volumes": [
            {
                "name!": str,
                "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
                "secret": {"secretName!": str, "items": [{"key!": str, "path!": str}]},
            }
        ],
        "securityContext": {"fsGroup": int},
        "terminationGracePeriodSeconds": int,
    },
}
SPECS = {
    ("v1", "PersistentVolumeClaim"): {
        "accessModes!": [{"ReadOnlyMany", "ReadWriteMany"}],
        "resources!": {"requests!": QUANTITIES},
    },
    ("v1", "Service"): {
        "clusterIP": {"None"},
        "publishNotReadyAddresses": bool,
        "selector!": NAMES,
        "ports!": [{"name": str, "port!": int, "targetPort": str}],
    },
    ("apps/v1", "Deployment"): {
        "replicas": int,
        "strategy": {"type!": {"Recreate", "RollingUpdate"}},
        "selector!": {"matchLabels!": NAMES},
        "template!": POD,
    },
    ("ray.io/v1", "RayCluster"): {
        "rayVersion": str,
        "headGroupSpec!": {"rayStartParams": NAMES, "template!": POD},
        "workerGroupSpecs": [
            {
                "groupName!": str,
                "replicas": int,
                "minReplicas!": int,
                "maxReplicas!": int,
                "rayStartParams": NAMES,
                "template!": POD,
            }
        ],
    },
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): {
        "replicas": int,
        "leaderWorkerTemplate!": {
            "size": int,
            "restartPolicy": {"None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"},
            "leaderTemplate": POD,
            "workerTemplate!": POD,
        },
    },
}


def problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with a manifest, each with its place."""
    kind = document.get("apiVersion"), document.get("kind")
    if kind not in SPECS:
        return [f"no shape of {kind}"]
    metadata = {"name!": str, "annotations": NAMES}
    shape = {"apiVersion!": str, "kind!": str, "metadata!": metadata, "spec!": SPECS[kind]}
    return list(_problems(document, shape, str(kind[1])))


def _problems(value: Any, shape: Shape, place: str) -> Iterator[str]:
    if isinstance(shape, set):
        if value not in shape:
            yield f"{place}: expected one of {sorted(shape)}, got {value!r}"
    elif isinstance(shape, type):
        if type(value) is not shape:
            yield f"{place}: expected {shape.__name__}, got {value!r}"
    elif type(value) is not type(shape):
        yield f"{place}: expected {type(shape).__name__}, got {value!r}"
    elif isinstance(shape, list):
        for number, item in enumerate(value):
            yield from _problems(item, shape[0], f"{place}[{number}]")
    else:
        yield from _problems_of_keys(value, shape, place)


def _problems_of_keys(value: dict[str, Any], shape: Shape, place: str) -> Iterator[str]:
    any_key = shape.get("any") if shape is NAMES else None
    known = {key.rstrip("!"): inner for key, inner in shape.items()}
    for key in shape:
        if key.endswith("!") and key[:-1] not in value:
            yield f"{place}: {key[:-1]} is missing"
    for key, item in value.items():
        inner = known.get(key, any_key)
        if inner is None:
            yield f"{place}: {key} is not known"
        else:
            yield from _problems(item, inner, f"{place}.{key}")
