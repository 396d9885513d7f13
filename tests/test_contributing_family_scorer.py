"""Executes the worked examples "Add a model family" and "Add a scorer" of CONTRIBUTING.md."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hf_captionrl.captioners.loading import FAMILIES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
FILE = re.compile(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)^```", re.M | re.S)


def files_of(heading):
    """Path and source of the files that a section shows."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return FILE.findall(section)


def executed(path, source, monkeypatch):
    """The file as a module that others can import."""
    module = types.ModuleType(path.removesuffix(".py").replace("/", "."))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, path, "exec"), vars(module))
    return module


def cases_of(test):
    """The arguments of each run of a test function."""
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        return [dict(zip(names, value, strict=True)) for value in values]
    return [{}]


@pytest.mark.parametrize(("heading", "num_runs"), [("Add a model family", 2), ("Add a scorer", 3)])
def test_worked_example_passes_its_own_test(heading, num_runs, monkeypatch):
    families = dict(FAMILIES)
    (source_path, source), (test_path, test_source) = files_of(heading)
    assert not Path(source_path).exists()
    assert test_path.startswith("tests/")
    try:
        executed(source_path, source, monkeypatch)
        module = executed(test_path, test_source, monkeypatch)
        runs = [
            (function, arguments)
            for name, function in inspect.getmembers(module, inspect.isfunction)
            if name.startswith("test_")
            for arguments in cases_of(function)
        ]
        assert len(runs) == num_runs
        for function, arguments in runs:
            function(**arguments)
    finally:
        FAMILIES.clear()
        FAMILIES.update(families)


def test_a_module_of_ones_own_registers_a_family(tmp_path):
    path, source = files_of("Add a model family")[0]
    (tmp_path / path).write_text(source)
    code = (
        "import vipllava; from hf_captionrl.captioners.loading import FAMILIES; print(FAMILIES['vipllava'].__name__)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "VipLlavaCaptioner", found.stderr[-3000:]
