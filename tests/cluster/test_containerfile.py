"""The container file builds from what is here, as nobody in particular, and keeps no secret."""

from __future__ import annotations

import re

from tests.cluster.files import PROJECT, ROOT, instructions, text

LINES = instructions(text("Containerfile"))


def words(name: str) -> list[list[str]]:
    return [rest for word, *rest in LINES if word == name]


def test_the_parser_reads_what_builders_read():
    lines = instructions('# a\nARG A=1\nFROM x:${A} AS y\nRUN pip \\\n  install "z[a]"\nCMD ["b", "c d"]\n')
    assert lines == [
        ["ARG", "A=1"],
        ["FROM", "x:1", "AS", "y"],
        ["RUN", "pip", "install", "z[a]"],
        ["CMD", "b", "c d"],
    ]


def test_one_pinned_base_and_the_second_image_on_the_first():
    base, cpu, gpu = words("FROM")[0][0], *words("FROM")
    assert re.fullmatch(r"rayproject/ray:\d+\.\d+\.\d+-py3\d\d", base)
    assert (cpu, gpu) == ([base, "AS", "cpu"], ["cpu", "AS", "gpu"])
    assert len(words("FROM")) == 2


def test_what_is_copied_is_there_and_all_that_the_package_needs():
    copied = {source for *sources, _ in words("COPY") for source in sources}
    assert all((ROOT / source).exists() for source in copied)
    assert copied == {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "sensitivity", "jobs"}


def test_this_project_is_installed_and_the_ray_of_the_base_stays():
    ray = f"ray=={words('ARG')[0][0].removeprefix('RAY_VERSION=')}"
    assert words("RUN") == [
        ["pip", "install", "--no-cache-dir", "/src", ray],
        ["pip", "install", "--no-cache-dir", "/src[gpu]", ray],
    ]
    assert {destination.partition("/src")[0] for *_, destination in words("COPY")} == {""}
    assert "gpu" in PROJECT["optional-dependencies"]


def test_it_runs_as_nobody_in_particular():
    user, group = words("USER")[-1][0].split(":")
    assert (int(user), int(group)) == (1000, 100)


def test_no_secret_and_nothing_of_the_network():
    assert not re.search(r"token|secret|passw|key|credential", text("Containerfile"), re.IGNORECASE)
    assert not words("ADD")
    assert ["RAY_USAGE_STATS_ENABLED=0"] in words("ENV")
