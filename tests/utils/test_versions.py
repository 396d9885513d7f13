"""The tested range is written once."""

import importlib.util
import re
import tomllib
from pathlib import Path

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
