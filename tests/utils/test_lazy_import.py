"""A submodule of another library is extended when it is imported, and looks as if it were not."""

import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hf_captionrl.utils.lazy_import import call_after_import

ROOT = Path(__file__).parents[2]
IMPORTS = """
import json, os, sys
before = dict(os.environ)
import hf_captionrl
import hf_captionrl.captioners
import hf_captionrl.metrics
import hf_captionrl.trainers
names = set(hf_captionrl.__all__) <= set(dir(hf_captionrl)) and "SmileTrainer" in dir(hf_captionrl.trainers)
heavy = {"torch", "transformers", "datasets", "numpy", "evaluate", "huggingface_hub"} & set(sys.modules)
print(json.dumps([dict(os.environ) == before, sorted(heavy), names]))
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package whose front door takes a name from a submodule, as `evaluate` does."""
    name = f"library_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("from .core import load\n")
    (folder / "core.py").write_text("def look_up():\n    return 'theirs'\ndef load():\n    return look_up()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


def extend(name):
    """Replace what the submodule looks names up with; the list of calls."""
    calls = []

    def extended():
        calls.append(name)
        sys.modules[f"{name}.core"].look_up = lambda: "ours"

    call_after_import(f"{name}.core", extended)
    return calls


def test_extended_when_it_is_imported_and_at_once_where_it_is(library):
    calls = extend(library)
    assert library not in sys.modules
    assert calls == []
    package = importlib.import_module(library)
    assert package.load() == "ours"
    assert calls == [library]
    # From now on it is a module like any other.
    assert type(package.core) is types.ModuleType
    assert inspect.getsourcefile(package.core).endswith("core.py")
    assert pickle.loads(pickle.dumps(package.core.load)) is package.load
    assert extend(library) == [library]


def test_the_front_door_writes_nothing_and_imports_nothing_heavy(tmp_path):
    homes = {name: str(tmp_path / "home") for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "HF_MODULES_CACHE")}
    env = {**os.environ, **homes, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == [True, [], True]
    assert not list(tmp_path.iterdir())
