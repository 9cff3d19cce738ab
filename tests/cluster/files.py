"""The files of `cluster/`, read as those read them who use them."""

from __future__ import annotations

import functools
import json
import lzma
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import yaml

from jobs.cli import main
from sensitivity import __version__

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
SCHEMAS = Path(__file__).parent / "schemas"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"] | {"version": __version__}

# An object store is what stands there; these lines, uncommented, are the shared volume in its place.
SHARED = re.compile(r"^( *)# ((?:- \{name: shared|volumeMounts: \[|volumes: \[).*)$", re.MULTILINE)
ZIP = re.compile(r"^( *)# (runtimeEnvYAML: .*)$", re.MULTILINE)


def text(name: str) -> str:
    return (CLUSTER / name).read_text()


def documents(content: str) -> dict[str, dict[str, Any]]:
    """By kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(content)}


def resource(name: str, content: str | None = None) -> dict[str, Any]:
    """The RayJob or RayCluster of a file."""
    found = documents(content or text(name))
    return found.get("RayJob") or found["RayCluster"]


def cluster_spec(resource: dict[str, Any]) -> dict[str, Any]:
    return resource["spec"].get("rayClusterSpec", resource["spec"])


def pods(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod's spec of the head, and of every group of workers."""
    spec = cluster_spec(resource)
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@functools.cache
def schema(plural: str) -> dict[str, Any]:
    """The published schema of `ray.io/v1`, as JSON Schema that refuses what it does not name."""
    content = lzma.decompress((SCHEMAS / f"ray.io_{plural}.yaml.xz").read_bytes())
    definition = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [version] = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    return closed(version["schema"]["openAPIV3Schema"])


def closed(node: Any) -> Any:
    """Kubernetes prunes unknown fields, unless it is told to preserve them; here they are refused."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: closed(value) for key, value in node.items()}
    if isinstance(node.get("properties"), dict) and "additionalProperties" not in node:
        made["additionalProperties"] = bool(node.get("x-kubernetes-preserve-unknown-fields"))
    if node.get("nullable"):
        return {"anyOf": [made, {"type": "null"}]}
    return made


def parsed(command: str | list[str]) -> click.Context:
    """What our command line makes of `sensitivity ...`; raises a `click.UsageError` for what it does not have."""
    words = shlex.split(command) if isinstance(command, str) else command
    assert words[0] == "sensitivity"
    name, subcommand, rest = main.resolve_command(click.Context(main), words[1:])
    assert subcommand is not None
    return subcommand.make_context(name, rest)


def instructions(content: str) -> list[list[str]]:
    """Of a container file: the instruction, and its words; build arguments stand for their defaults."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", content, flags=re.MULTILINE))
    lines = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    defaults = dict(rest.split("=", 1) for word, rest in lines if word == "ARG" and "=" in rest)
    for name, value in defaults.items():
        lines = [[word, rest.replace(f"${{{name}}}", value)] for word, rest in lines]
    return [[word, *(json.loads(rest) if rest.startswith("[") else shlex.split(rest))] for word, rest in lines]
