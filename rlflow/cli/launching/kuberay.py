"""A launched run as a RayJob of KubeRay, with its code in a ConfigMap, as one YAML file.

The head holds the devices of the first host, workers those of the others. Pods have no limit of
memory, only a request: what a plan does not count is then no reason to be killed.
"""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rlflow.cli.launching.job import LaunchJob
from rlflow.errors import Finding, UsageError

FILES = "/rlflow/files"
CODE = "/rlflow/code"
SCRIPT = "job.sh"
ARCHIVE = "code.tar.gz"
# A ConfigMap holds a MiB; some of it is for the script and the names.
MOST_ARCHIVE = 1_000_000
LONGEST_NAME = 40
RESOURCES = {"mi300x": "amd.com/gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeSite:
    """What only a user knows of a cluster of Kubernetes; `volumes` are claims and where they go."""

    image: str
    namespace: str | None
    secret: str | None
    volumes: tuple[tuple[str, str], ...]


def read_volumes(said: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Claims and the folders that they are mounted at. Raises UsageError E380 for another form."""
    found = []
    for text in said:
        claim, _, path = text.partition(":")
        if not claim or not path.startswith("/") or path == "/":
            raise UsageError(
                Finding(
                    code="E380",
                    what=f"--volume {text} is no claim and folder",
                    expected="CLAIM:/PATH, a PersistentVolumeClaim and where pods see it",
                    fix="--volume shared:/shared",
                )
            )
        found.append((claim, path.rstrip("/")))
    return tuple(found)


def object_name(text: str) -> str:
    """A name that Kubernetes takes: lower case, digits and dashes, not too long."""
    text = text.lower().replace(".launch", "")
    plain = re.sub(r"[^a-z0-9]+", "-", text).strip("-")[-LONGEST_NAME:]
    return plain.strip("-") if plain[:1].isalpha() else f"r-{plain}".rstrip("-")


def ray_job(job: LaunchJob, site: KubeSite, archive: bytes | None) -> str:
    """The file for `kubectl create`: the ConfigMap, then the RayJob."""
    import yaml

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    # Texts of several lines are written as they are, and what occurs twice is written twice.
    same = {"ignore_aliases": lambda *_: True}
    dumper: Any = type("Dumper", (yaml.SafeDumper,), same)
    dumper.add_representer(str, text)
    name = object_name(job.beside.rpartition("/")[2])
    documents = [_config_map(job, site, archive, name), _job(job, site, archive, name)]
    written = yaml.dump_all(documents, Dumper=dumper, sort_keys=False, width=10**9)
    return "\n".join([*job.described(), written])


def _metadata(site: KubeSite, name: str) -> dict[str, str]:
    return {"name": name} | ({"namespace": site.namespace} if site.namespace else {})


def _config_map(job: LaunchJob, site: KubeSite, archive: bytes | None, name: str) -> dict[str, Any]:
    script = [
        "#!/bin/bash",
        "set -euo pipefail",
        *job.environment(),
        "# A run that has begun goes on, after its newest checkpoint.",
        *job.chosen(),
        f"exec {job.command(chr(34) + '$RAY_ADDRESS' + chr(34))}",
    ]
    packed = {} if archive is None else {ARCHIVE: base64.b64encode(archive).decode()}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(site, name),
        "data": {SCRIPT: "\n".join(script) + "\n"},
        **({"binaryData": packed} if packed else {}),
    }


def _job(job: LaunchJob, site: KubeSite, archive: bytes | None, name: str) -> dict[str, Any]:
    need = job.need
    start = {"num-cpus": str(need.devices * need.threads)}
    workers = {
        "groupName": "workers",
        "replicas": need.hosts - 1,
        "minReplicas": need.hosts - 1,
        "maxReplicas": need.hosts - 1,
        "rayStartParams": start,
        "template": _pod(job, site, "ray-worker", name, unpack=archive is not None),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(site, name),
        "spec": {
            "entrypoint": f"bash {FILES}/{SCRIPT}",
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": job.restarts,
            **({"activeDeadlineSeconds": math.ceil(job.time)} if job.time else {}),
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "headGroupSpec": {
                    "rayStartParams": start,
                    "template": _pod(job, site, "ray-head", name, unpack=archive is not None),
                },
                **({"workerGroupSpecs": [workers]} if need.hosts > 1 else {}),
            },
        },
    }


def _pod(job: LaunchJob, site: KubeSite, role: str, name: str, *, unpack: bool) -> dict[str, Any]:
    need = job.need
    gpus = {RESOURCES.get(need.kind, "nvidia.com/gpu"): need.gpus} if need.gpus else {}
    asked = {"cpu": str(need.cores), "memory": f"{need.gibibytes}Gi", **gpus}
    mounts = [{"name": "files", "mountPath": FILES}, {"name": "code", "mountPath": CODE}]
    claims = [(f"claim-{number}", *claim) for number, claim in enumerate(site.volumes)]
    container = {
        "name": role,
        "image": site.image,
        "env": _variables(job, site),
        "resources": {"requests": asked, **({"limits": gpus} if gpus else {})},
        "volumeMounts": [
            *mounts,
            *({"name": volume, "mountPath": path} for volume, _, path in claims),
        ],
        **({"workingDir": job.code} if unpack else {}),
    }
    unpacked = {
        "name": "code",
        "image": site.image,
        "command": ["tar", "-xzf", f"{FILES}/{ARCHIVE}", "-C", CODE],
        "volumeMounts": mounts,
    }
    return {
        "spec": {
            **({"initContainers": [unpacked]} if unpack else {}),
            "containers": [container],
            "volumes": [
                {"name": "files", "configMap": {"name": name}},
                {"name": "code", "emptyDir": {}},
                *(
                    {"name": volume, "persistentVolumeClaim": {"claimName": claim}}
                    for volume, claim, _ in claims
                ),
            ],
        }
    }


def _variables(job: LaunchJob, site: KubeSite) -> list[dict[str, Any]]:
    """Values as written; of a name alone the key of that name in the Secret."""
    written = [{"name": name, "value": value} for name, value in job.variables.written]
    return [
        *written,
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": site.secret, "key": name}}}
            for name in job.variables.passed
        ),
    ]
