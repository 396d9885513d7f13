"""The worked example of CONTRIBUTING.md, "Add a reward", is copied into a copy of the package and tested there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.link_tree import link_tree

ROOT = Path(__file__).parents[2]


def example_files():
    """Files of the example by the path in their first line."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("\n## Add a reward\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return dict(blocks)


@pytest.mark.slow  # a fresh pytest; the other examples run in warm processes
def test_add_a_reward(tmp_path):
    files = example_files()
    assert [Path(name).parent.as_posix() for name in files] == ["hf_captionrl/rewards", "tests/rewards"]
    tree = tmp_path / "tree"
    link_tree(ROOT, tree, [Path(name) for name in files])
    for name, text in files.items():
        (tree / name).write_text(text)
    tests = [name for name in files if name.startswith("tests/")]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert "3 passed" in found.stdout
