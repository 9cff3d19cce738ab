"""The layout stays true as it grows: imports flow one way, Ray stays in `jobs/`, nothing heavy loads early."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each file may import those before it; `readers` and `kernels` stand for packages.
CHAIN = [
    *(
        "errors",
        "arguments",
        "machine",
        "checksums",
        "versions",
        "patience",
        "places",
        "guarded",
        "folders",
        "buckets",
        "addresses",
        "lease",
        "progress",
        "findings",
        "job_files",
        "asked",
        "sections",
        "job",
        "readers",
        "times",
        "windows",
        "parts",
        "labels",
        "moments",
        "survey",
        "series",
        "suspicions",
        "record",
        "layers",
        "heads",
        "packing",
        "replay",
        "saved_models",
        "tracing",
        "precision",
        "loading",
        "fingerprint",
    ),
    *(
        "walks",
        "variables",
        "facts",
        "sources",
        "dependence",
        "products",
        "cells",
        "calls",
        "fitness",
        "held",
        "recurrence",
        "backward",
        "declared",
        "weighed",
        "weights",
        "own_steps",
        "model",
        "setting",
        "plan",
        "placement",
        "choices",
    ),
    *(
        "device",
        "meter",
        "probes",
        "kernels",
        "candidates",
        "engine",
        "room",
        "tuning",
        "audit",
        "template",
        "store",
        "creation",
    ),
    *(
        "commits",
        "tally",
        "standing",
        "integrity",
        "writing",
        "worker",
        "kept",
        "given",
        "inprocess",
        "api",
        "site_index",
        "query",
        "plots",
    ),
    "recurrent",
    "report",
]


def library_files() -> list[Path]:
    return sorted((ROOT / "sensitivity").rglob("*.py"))


def imports(file: Path, *, at_run_time: bool) -> set[str]:
    """Modules that a file imports, absolute; `at_run_time` leaves out `if TYPE_CHECKING` blocks."""
    package = ".".join(file.relative_to(ROOT).with_suffix("").parts[:-1])
    tree = ast.parse(file.read_text())
    skipped = {
        node
        for block in ast.walk(tree)
        if at_run_time and isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def test_the_chain_names_every_file_of_the_library():
    names = {path.stem for path in (ROOT / "sensitivity").glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in (ROOT / "sensitivity").glob("*/__init__.py")}
    assert names | packages == set(CHAIN)


@pytest.mark.parametrize("file", library_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_knows_only_the_files_before_it(file):
    place = file.stem if file.parent.name == "sensitivity" else file.parent.name
    if place == "__init__":
        return assert_lazy(file)
    for module in imports(file, at_run_time=True):
        assert module.split(".")[0] not in ("ray", "jobs"), f"{place} imports {module}"
        known = module.removeprefix("sensitivity.").split(".")[0] if module.startswith("sensitivity.") else None
        if known in CHAIN and known != place:
            assert CHAIN.index(known) < CHAIN.index(place), f"{place} imports {known}, which comes after it"


def assert_lazy(file: Path) -> None:
    assert not [module for module in imports(file, at_run_time=True) if module.startswith("sensitivity.")]


def test_ray_stays_in_few_files():
    users = {
        file.name
        for file in (ROOT / "jobs").glob("*.py")
        if "ray" in {module.split(".")[0] for module in imports(file, at_run_time=False)}
    }
    session = {"ray_session.py", "head.py", "ray_tasks.py"}
    assert users == session | {"actors.py", "roster.py", "crew.py", "deaths.py", "metrics.py"}


def test_files_stay_short():
    long = {file.name: n for file in ROOT.glob("[js]*/**/*.py") if (n := len(file.read_text().splitlines())) > 400}
    assert not long


@pytest.mark.parametrize(
    "statement",
    ["import sensitivity", "import sensitivity; sensitivity.Job.load", "import jobs.cli", "import sensitivity.plan"],
)
def test_importing_loads_neither_tensorflow_nor_ray(statement):
    check = "import sys; print([m for m in ('tensorflow', 'keras', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", f"{statement}; {check}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
