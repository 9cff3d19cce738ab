"""What the files and their README run is there, and they speak of the same versions."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.cluster.files import CLUSTER, PROJECT, ROOT, cluster_spec, instructions, parsed, pods, resource, text

README = text("README.md")
BLOCKS = [line.strip() for line in re.findall(r"^    (\S.*)$", README, re.MULTILINE)]


def commands(name: str) -> list[str]:
    """Of the README: `name ...`, without the variables that stand before it and the comment behind."""
    found = [re.fullmatch(rf"(?:\w+=\S+ )*({name} .+?)(?:  +#.*)?", line) for line in BLOCKS]
    return [match[1] for match in found if match]


def images() -> list[str]:
    up = yaml.safe_load(text("ray-up.yaml"))
    found = [
        pod["containers"][0]["image"] for name in ("rayjob", "raycluster") for pod in pods(resource(f"{name}.yaml"))
    ]
    found += [up["docker"]["image"], up["available_node_types"]["gpu"]["docker"]["worker_image"]]
    return found + re.findall(r"-t (\S+)", text("Containerfile"))


@pytest.mark.parametrize("command", commands("sensitivity"))
def test_our_commands_are_there(command):
    assert parsed(command).info_name == shlex.split(command)[1]


def test_the_readme_shows_each_way():
    shown = {parsed(command).info_name for command in commands("sensitivity")}
    assert {"run", "submit", "resume", "status"} <= shown


@pytest.mark.parametrize("command", commands("ray"))
def test_ray_s_commands_are_there(command):
    from ray.scripts.scripts import cli

    name, *rest = shlex.split(command)[1:]
    assert cli.commands[name].make_context(name, rest).info_name == name


def test_an_option_that_is_not_there_is_refused():
    with pytest.raises(click.UsageError):
        parsed("sensitivity run job.toml --adress auto")


def test_every_file_is_in_the_readme_and_every_file_of_the_readme_is_there():
    named = {Path(name).name for name in re.findall(r"[\w./-]*(?:\.yaml|\.sh|Containerfile)\b", README)}
    assert named == {file.name for file in CLUSTER.iterdir()} - {"README.md"}
    assert all((ROOT / path).exists() for path in re.findall(r"cluster/[\w.-]+", README + text("Containerfile")))


def test_images_agree_on_versions():
    ray = next(rest[0] for word, *rest in instructions(text("Containerfile")) if word == "ARG").partition("=")[2]
    tags = {image.rpartition(":")[2] for image in images()}
    assert tags == {f"{PROJECT['version']}-ray{ray}", f"{PROJECT['version']}-ray{ray}-gpu"}
    assert len({image.rpartition(":")[0] for image in images()}) == 1
    for name in ("rayjob.yaml", "raycluster.yaml"):
        assert cluster_spec(resource(name))["rayVersion"] == ray
        head, worker = pods(resource(name))
        assert worker["containers"][0]["image"] == f"{head['containers'][0]['image']}-gpu"
    assert re.findall(r"\bRay (2\.[\d.]+)", README) == [ray.rpartition(".")[0]]
    assert Version(ray) in ray_range()
    assert Version(ray) >= Version("2.52")  # tokens


def ray_range():
    [ray] = [Requirement(line) for line in PROJECT["dependencies"] if Requirement(line).name == "ray"]
    return ray.specifier


def test_the_python_of_the_image_is_one_of_ours():
    base = next(rest[0] for word, *rest in instructions(text("Containerfile")) if word == "FROM")
    major, minor = re.findall(r"-py(\d)(\d+)", base)[0]
    assert Version(f"{major}.{minor}") in Requirement(f"x{PROJECT['requires-python']}").specifier


def test_nothing_of_the_machine_that_it_was_written_on():
    for file in CLUSTER.iterdir():
        assert str(ROOT) not in file.read_text(), file.name
        assert not re.search(r"localhost:(?!8265)|127\.0\.0", file.read_text()), file.name
        hosts = set(re.findall(r"[\w-]+(?:\.[\w-]+)*\.(?:com|io|org|net)/", file.read_text()))
        assert hosts <= {"registry.example.com/", "files.example.com/", "nvidia.com/", "ray.io/"}, file.name
