"""Ray's own cluster launcher takes our file."""

from __future__ import annotations

import copy

import jsonschema
import pytest
import yaml

from tests.cluster.files import text


def config() -> dict:
    return yaml.safe_load(text("ray-up.yaml"))


def prepared(content: dict) -> dict:
    """As `ray up` does before it asks the cloud for anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    full = prepare_config(copy.deepcopy(content))
    validate_config(full)
    return full


def test_ray_takes_it():
    full = prepared(config())
    head, gpu = full["available_node_types"]["head"], full["available_node_types"]["gpu"]
    assert (head["max_workers"], head["resources"]) == (0, {"CPU": 0})
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, full["max_workers"])


@pytest.mark.parametrize(
    "change", [{"max_worker": 8}, {"docker": {"imag": "x"}}, {"available_node_types": {"gpu": {"resources": {}}}}]
)
def test_ray_refuses_what_it_does_not_know(change):
    with pytest.raises(jsonschema.ValidationError):
        prepared(config() | change)


def test_every_node_has_the_token_and_says_nothing_to_others():
    content = config()
    options = content["docker"]["run_options"]
    assert {"--env RAY_AUTH_MODE=token", "--env RAY_USAGE_STATS_ENABLED=0"} <= set(options)
    assert f"--env AWS_REGION={content['provider']['region']}" in options
    assert content["file_mounts"] == {"/home/ray/.ray/auth_token": "~/.ray/auth_token"}
    assert "IamInstanceProfile" in content["available_node_types"]["gpu"]["node_config"]


def test_containers_see_the_gpus_of_their_machine():
    """Ray asks for NVIDIA's runtime, which shows an image of another maker's no GPU unless told to."""
    content = config()
    assert content["available_node_types"]["gpu"]["docker"]["worker_run_options"] == [
        "--env NVIDIA_VISIBLE_DEVICES=all"
    ]
