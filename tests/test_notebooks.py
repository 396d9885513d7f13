"""The notebooks run from top to bottom on the embedded world, and are committed without what they print."""

import ast
import json
import os
import resource
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CPU_SECONDS = 20  # 8 to 12 where nothing else runs; a core that two programs share counts more for the same work


def faults(content):
    """What a committed notebook must not hold."""
    found = []
    if content["metadata"]["kernelspec"]["name"] != "python3":
        found.append("kernel")
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))
            if cell["outputs"] or cell["execution_count"] is not None:
                found.append("output")
        if cell["metadata"]:
            found.append("metadata")
    return found


@pytest.fixture(autouse=True)
def kernel(monkeypatch, tmp_path):
    """The kernel is this Python with this package, and leaves nothing outside the test's folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    assert {path.stem for path in NOTEBOOKS} >= {"quickstart", "self_retrieval", "bags"}
    assert faults(json.loads(path.read_text())) == []
    nbformat.validate(nbformat.read(path, as_version=4))


@pytest.mark.slow  # each takes a kernel that imports everything
@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in NOTEBOOKS])
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=place).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    printed = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any(output.output_type == "stream" for output in printed)
    assert seconds < CPU_SECONDS, f"{path.name} took {seconds:.1f} CPU seconds"


def test_outputs_and_kernels_are_detected():
    content = json.loads(NOTEBOOKS[0].read_text())
    content["cells"][1]["execution_count"] = 3
    content["metadata"]["kernelspec"]["name"] = "my-env"
    assert faults(content) == ["kernel", "output"]
