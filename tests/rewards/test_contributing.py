"""The worked example of CONTRIBUTING.md, "Add a reward", is copied into a copy of the package and tested there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def example_files():
    """Files of the example by the path in their first line."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("\n## Add a reward\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return dict(blocks)


def link_tree(source, target, replaced):
    """A folder of links to another one's entries; the folders that lead to `replaced` are real."""
    target.mkdir()
    for entry in source.iterdir():
        inside = [
            path.relative_to(entry.name) for path in replaced if path.parts[0] == entry.name and len(path.parts) > 1
        ]
        if inside:
            link_tree(entry, target / entry.name, inside)
        elif entry.name not in (".git", "__pycache__"):
            (target / entry.name).symlink_to(entry)


@pytest.mark.slow  # a fresh pytest; the other examples run in warm processes
def test_add_a_reward(tmp_path):
    files = example_files()
    assert [Path(name).parent.as_posix() for name in files] == ["hf_captionrl/rewards", "tests/rewards"]
    tree = tmp_path / "tree"
    link_tree(ROOT, tree, [Path(name) for name in files])
    for name, text in files.items():
        (tree / name).write_text(text)
    tests = [name for name in files if name.startswith("tests/")]
    # The card of the new reward is tested with those of all registered rewards.
    tests.append("tests/rewards/test_arguments.py::test_model_card_describes_every_registered_reward")
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert "10 passed" in found.stdout
