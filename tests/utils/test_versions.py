"""The tested range is written once; beyond it there is one warning."""

import importlib.util
import logging
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from hf_captionrl.utils import versions

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_bounds_constraints_nox_and_docs_follow_the_tested_range(monkeypatch):
    needed = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    nox = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nox)
    for library, tested in versions.TESTED.items():
        assert list(tested) == sorted(tested, key=Version)
        (lowest,) = [s.version for s in needed[library] if s.operator == ">="]
        assert Version(lowest) == Version(tested[0])
        # pip accepts every later release of the same major version.
        assert needed[library].contains(f"{Version(tested[0]).major}.999")
        assert not needed[library].contains(f"{Version(tested[0]).major + 1}.0")
        assert pinned[library] == tested[-1]
        assert f"{library} {tested[0]} to {tested[-1]}" in re.sub(r"\s+", " ", page) or len(tested) == 1
        assert f"{library}=={tested[len(tested) // 2]}" in nox.constraints("middle")
        assert f"{library}=={tested[-1]}" in nox.constraints("newest")


@pytest.mark.parametrize(
    ("installed", "said"),
    [("5.18.0", False), ("5.24.3", False), ("5.25.0.dev0", True), ("5.25.0rc1", True), ("6.0", True)],
)
def test_newer_releases_are_named_once(installed, said, monkeypatch, caplog):
    monkeypatch.setattr(versions, "TESTED", {"transformers": ("5.18.0", "5.24.0")})
    monkeypatch.setattr(metadata, "version", lambda library: installed)
    versions.warn_untested.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert [versions.warn_untested("transformers") for _ in range(3)] == [said] * 3
    finally:
        versions.warn_untested.cache_clear()
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == said
    for line in found:
        assert f"transformers {installed} is installed" in line
        assert "5.25 is the first" in line


def test_captioners_and_trl_trainers_ask():
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: {'transformers': '5.999.0', 'trl': '1.999.0'}.get(name) or real(name)\n"
        "import hf_captionrl; hf_captionrl.load_captioner; hf_captionrl.SmileSFTTrainer; hf_captionrl.SelfRetrievalGRPOTrainer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for library in versions.TESTED:
        assert done.stderr.count(f"{library} {Version(versions.TESTED[library][0]).major}.999.0 is installed") == 1
