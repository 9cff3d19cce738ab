"""KubeRay's published schemas take our files, and the files say what they are to say."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from sensitivity.job import Job
from sensitivity.sections import parse_bytes
from tests.cluster.files import SHARED, ZIP, cluster_spec, documents, parsed, pods, resource, schema, text

NAMES = {"rayjob.yaml": "rayjobs", "raycluster.yaml": "rayclusters"}
FILES = pytest.mark.parametrize("name", NAMES)


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema(NAMES[name]))


def job() -> Job:
    content = documents(text("rayjob.yaml"))["ConfigMap"]["data"]["job.toml"]
    return Job.parse(tomllib.loads(content), Path("/job"))


@FILES
def test_the_published_schema_takes_it(name):
    found = resource(name)
    validator(name).validate(found)
    assert found["apiVersion"] == "ray.io/v1"
    assert set(found["metadata"]) == {"name"}


@FILES
@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ((), "enableAutoscaling", True),
        (("headGroupSpec",), "replica", 1),
        (("headGroupSpec", "rayStartParams"), "num-cpus", 0),
        (("headGroupSpec", "template", "spec", "containers", 0), "imagePullPolice", "Always"),
        (("workerGroupSpecs", 0), "maxReplicas", "8"),
        (("authOptions",), "mode", "on"),
    ],
)
def test_the_schema_refuses_what_it_does_not_know(name, place, key, value):
    broken = copy.deepcopy(resource(name))
    part = cluster_spec(broken)
    for step in place:
        part = part[step]
    part[key] = value
    with pytest.raises(jsonschema.ValidationError):
        validator(name).validate(broken)


@FILES
def test_a_shared_volume_in_place_of_a_store(name):
    content, lines = SHARED.subn(r"\1\2", text(name))
    assert lines == 4
    found = resource(name, content)
    validator(name).validate(found)
    for pod in pods(found):
        assert {"name": "shared", "mountPath": "/shared"} in pod["containers"][0]["volumeMounts"]
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": "sensitivity"}} in pod["volumes"]
        assert pod["securityContext"]["fsGroup"] == 100


def test_a_zip_in_place_of_a_config_map():
    content, lines = ZIP.subn(r"\1\2", text("rayjob.yaml"))
    assert lines == 1
    validator("rayjob.yaml").validate(resource("rayjob.yaml", content))


@FILES
def test_the_head_takes_no_tasks_and_workers_come_when_asked_for(name):
    spec = cluster_spec(resource(name))
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["enableInTreeAutoscaling"]
    [workers] = spec["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"]) == (0, 0)
    head, worker = pods(resource(name))
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in worker["tolerations"]


@FILES
def test_every_pod_has_credentials_by_reference_only(name):
    assert cluster_spec(resource(name))["authOptions"] == {"mode": "token"}
    for pod in pods(resource(name)):
        [container] = pod["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "sensitivity-store"}}]
        assert container["env"] == [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert pod["securityContext"]["runAsNonRoot"]
    assert not re.search(r"AWS_SECRET|password|stringData|auth_token: ", text(name))


@FILES
def test_every_mount_has_its_volume(name):
    for pod in pods(resource(name)):
        mounts = {mount["name"] for mount in pod["containers"][0].get("volumeMounts", ())}
        assert mounts == {volume["name"] for volume in pod.get("volumes", ())}


def test_a_retry_of_the_job_is_a_resume():
    spec = resource("rayjob.yaml")["spec"]
    assert spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"]
    assert not {"entrypointNumGpus", "entrypointNumCpus", "entrypointResources", "jobId"} & set(spec)
    context = parsed(spec["entrypoint"])
    assert context.info_name == "run"
    assert context.params["address"] == "auto"
    assert context.params["autoscale"]
    run = job().run
    assert "://" in run.path  # on what outlives the cluster


def test_the_config_map_holds_a_job_that_fits_the_workers():
    found = documents(text("rayjob.yaml"))
    config, spec = found["ConfigMap"], found["RayJob"]["spec"]
    head, worker = pods(found["RayJob"])
    assert head["volumes"] == [{"name": "job", "configMap": {"name": config["metadata"]["name"]}}]
    mounted = Path(head["containers"][0]["volumeMounts"][0]["mountPath"]) / next(iter(config["data"]))
    assert mounted == parsed(spec["entrypoint"]).params["job"]

    run, limits = job().run, worker["containers"][0]["resources"]["limits"]
    assert "auto" not in (run.workers, run.gpus_per_worker, run.memory_per_worker)
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert run.workers * run.gpus_per_worker <= group["maxReplicas"] * limits["nvidia.com/gpu"]
    assert run.cpus_per_worker <= int(limits["cpu"])
    assert run.memory_bytes is not None
    assert run.memory_bytes < 0.8 * parse_bytes(limits["memory"] + "B")
