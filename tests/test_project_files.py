"""Workflows, hooks, citation and release check name only what exists, and agree with one another."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import hf_captionrl
from hf_captionrl.scenes.dataset import WORLD_VERSION
from scripts.check import PARTS
from scripts.release_check import REQUIRED, check_contents

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def steps(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_only_commands_that_a_developer_has(path):
    commands = [step["run"] for step in steps(path) if "run" in step]
    assert commands
    for command in commands:
        # `make test-versions ONLY=...` names an environment of the job's matrix.
        program, *arguments = re.sub(r" ONLY=\$\{\{ matrix\.libraries \}\}$", "", command).split()
        assert program in ("make", "gh")
        if program == "make":
            assert set(arguments) <= TARGETS


@pytest.mark.parametrize("reaches_pytorch", [True, False])
def test_make_takes_the_build_of_torch_for_this_machine_and_says_how_to_activate(tmp_path, reaches_pytorch):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "uv", "accelerate"):
        fails = name == "uv" and not reaches_pytorch
        refuse = 'case "$*" in *--torch-backend*) exit 2;; esac' if fails else ""
        program = tmp_path / ".venv/bin" / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> calls\n{refuse}\n')
        program.chmod(0o755)
    command = ["make", "--no-print-directory", "demo"]  # "make test" is a level of make above
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    installs = ["--torch-backend auto" in call for call in calls if call.startswith("uv")]
    assert installs == ([True] if reaches_pytorch else [True, False])
    assert done.stdout.splitlines()[-1].endswith("source .venv/bin/activate")


def test_libraries_of_the_workflow_are_the_environments_of_test_versions():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text(encoding="utf-8"))["jobs"]
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert jobs["versions"]["strategy"]["matrix"]["libraries"] == re.findall(r"versions\(libraries='(\w+)'\)", listed)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_least_permissions_and_pinned_actions(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content["permissions"] == {"contents": "write" if path.stem == "release" else "read"}
    actions = [step["uses"] for step in steps(path) if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in actions)


def test_tested_python_versions_are_the_supported_ones():
    matrix = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text(encoding="utf-8"))
    tested = matrix["jobs"]["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    stated = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert tested == stated
    assert PROJECT["requires-python"] == f">={tested[0]},<3.{int(tested[-1].split('.')[1]) + 1}"


def test_pre_commit_runs_the_checks_of_make_check():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "mypy", "source"]
    commands = [" ".join(step) for steps in PARTS.values() for step in steps if not callable(step)]
    for hook in hooks[:3]:
        assert any(
            step.startswith(hook["entry"].removeprefix(".venv/bin/").removesuffix(" --fix")) for step in commands
        )


def test_citation_names_the_version_and_the_four_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == hf_captionrl.__version__ == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    cited = {reference["notes"].split(";")[0].split(",")[0]: reference for reference in citation["references"]}
    assert set(cited) == {"Benchmark", "SMILE", "DiscriTune", "SLE", "Visual Caption Boosting"}
    for paper in (reference for name, reference in cited.items() if name != "Benchmark"):
        assert paper["title"]
        assert paper["authors"]
        assert all(set(author) == {"family-names", "given-names"} for author in paper["authors"])


def test_citation_has_the_benchmark_with_the_version_of_its_data():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (benchmark,) = [reference for reference in citation["references"] if reference["type"] == "data"]
    assert benchmark["version"] == WORLD_VERSION
    assert benchmark["title"].startswith("scenes: ")
    assert benchmark["authors"] == citation["authors"]
    assert benchmark["license"] == PROJECT["license"]
    assert all((ROOT / path).is_file() for path in re.findall(r"docs/[\w./]+(?:json|md)", benchmark["notes"]))
    # Keys and types of references in version 1.2.0 of the Citation File Format.
    assert citation["cff-version"] == "1.2.0"
    known = {"type", "title", "notes", "authors", "version", "license", "collection-title", "journal", "year"}
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys() <= known
        assert reference["type"] in {"article", "conference-paper", "data"}
        assert all(isinstance(reference.get(key, ""), str) for key in known - {"authors", "year"})
        assert isinstance(reference.get("year", 0), int)


def archive(folder, names):
    """An sdist and a wheel with empty files of these names."""
    source = folder / "empty"
    source.touch()
    with tarfile.open(folder / "x-1.tar.gz", "w:gz") as sdist:
        for name in names:
            sdist.add(source, f"x-1/{name}")
    with zipfile.ZipFile(folder / "x-1.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, "")
    return [folder / "x-1.tar.gz", folder / "x-1.whl"]


def test_release_check_finds_what_is_missing_and_what_should_not_be_there(tmp_path):
    whole = [name + ("ddp.yaml" if name.endswith("/") else "") for name in REQUIRED]
    for path in archive(tmp_path, whole):
        assert check_contents(path) == []
    for path in archive(tmp_path, [*whole[1:], "hf_captionrl/__pycache__/x.pyc"]):
        faults = check_contents(path)
        assert len(faults) == 2
        assert REQUIRED[0] in faults[0]
        assert "__pycache__" in faults[1]


# --- Each program of scripts/ starts from any folder, although only its folder is on the path ---------------------------

SCRIPTS = sorted([*(ROOT / "reproduction").glob("*.py"), *(ROOT / "scripts").glob("*.py")])
PROGRAMS = [str(path) for path in SCRIPTS if '__name__ == "__main__"' in path.read_text()]
# In one interpreter, because each of them would import the libraries again.
START = """
import json, runpy, sys
before, failed = sys.path[1:], {}
for program in json.loads(sys.argv[1]):
    sys.path[:] = [program.rpartition("/")[0], *before]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("reproduction", "scripts")]:
        del sys.modules[name]
    try:
        runpy.run_path(program, run_name="not_started")
    except Exception as error:
        failed[program] = repr(error)
print(json.dumps(failed))
"""


def test_programs_find_the_modules_they_import_and_one_that_does_not_is_noticed(tmp_path):
    assert len(PROGRAMS) > 5
    planted = tmp_path / "program.py"
    planted.write_text("from reproduction.runs import processor_name\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", START, json.dumps([*PROGRAMS, str(planted)])]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    failed = json.loads(run.stdout.splitlines()[-1])
    assert "No module named 'reproduction'" in failed.pop(str(planted))
    assert failed == {}
