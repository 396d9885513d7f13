"""`make check`: each rule with a planted fault, and the exit code."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check import check_budgets, check_layers, check_loading, check_texts

ROOT = Path(__file__).parents[2]


def plant(root, files):
    """A small project: path -> text."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("losses/a.py", "from hf_captionrl.captioners.captioner import C", "a.py:1: losses imports captioners"),
        ("losses/a.py", "from hf_captionrl import captioners", "losses imports captioners"),
        ("losses/a.py", "from ..captioners import base", "losses imports captioners"),
        ("data/a.py", "def f():\n    import hf_captionrl.trainers.x", "a.py:2: data imports trainers"),
        ("data/a.py", "def f():\n    import_module('hf_captionrl.hub')", "a.py:2: data imports hub"),
        ("apps/album/a.py", "import hf_captionrl.apps.gallery", "application"),
        ("metrics/a.py", "from hf_captionrl import self_retrieval", "from the package"),
        ("hub.py", "import recipes.smile_blip", "imports recipes"),
        ("extras/a.py", "import os", "'extras' is in no layer"),
    ],
)
def test_upward_imports_are_faults(tmp_path, name, code, message):
    good = {"hf_captionrl/trainers/a.py": "from ..captioners import auto\nfrom hf_captionrl import __version__"}
    [fault] = check_layers(plant(tmp_path, {**good, f"hf_captionrl/{name}": code}))
    assert message in fault


def test_import_cycles_of_units_are_faults(tmp_path):
    cycle = {"text": "losses", "losses": "retrieval", "retrieval": "text"}
    files = {f"hf_captionrl/{a}/a.py": f"import hf_captionrl.{b}" for a, b in cycle.items()}
    [fault] = check_layers(plant(tmp_path, files))
    assert all(unit in fault for unit in cycle)


BUDGETS = "[tool.captionrl.budgets]\n'hf_captionrl' = [1, 1]\n'hf_captionrl/a' = [2, 1]\n'docs' = [9, 1]\n"


def test_budgets_count_what_is_in_a_unit(tmp_path):
    root = plant(tmp_path, {"pyproject.toml": BUDGETS, "hf_captionrl/x.py": "1\n", "hf_captionrl/a/x.py": "1\n2\n"})
    plant(root, {"docs/page.md": "123456789", "docs/results/x.md": "0" * 99})
    assert [*check_budgets(root)] == []
    plant(root, {"hf_captionrl/a/y.py": "3\n", "docs/page.md": "1234567890", "hf_captionrl/b/x.py": ""})
    unknown, lines, files, pages = check_budgets(root)
    assert "hf_captionrl/b has no budget" in unknown
    assert "hf_captionrl/a has 3 lines, and its budget in pyproject.toml is 2" in lines
    assert "hf_captionrl/a has 2 files" in files
    assert "docs has 10 bytes" in pages
    assert "what a user gets" in pages


@pytest.mark.parametrize(
    "text",
    [
        "root = '/" + "home/me/data'",
        "cd /" + "work/project",
        "open('/" + "tmp/x')",
        "C:" + "\\Users\\me",
        "../shared" + "/reference/coco",
        "https://a.org/packages/x" + ".whl",
        "token = 'hf_" + "aB3" * 12 + "'",
    ],
)
def test_forbidden_texts_are_faults_where_git_tracks_them(tmp_path, text):
    root = plant(tmp_path, {"docs/a.md": f"fine\n{text}\n", ".gitignore": "outputs/", "outputs/log": text})
    plant(root, {"b.md": "a/home/b network/work/x https://a.org/home/x outputs/tmp/ hf_captionrl and 1/root/2"})
    subprocess.run(["git", "init", "-q", root], check=True)
    [fault] = check_texts(root)
    assert fault.startswith("docs/a.md:2: ")
    assert "aB3aB3" not in fault


@pytest.mark.parametrize(
    ("call", "faulty"),
    [
        ("AutoModel.from_pretrained('x')", True),
        ("transformers.AutoTokenizer.from_pretrained('x', trust_remote_code=True)", True),
        ("getattr(transformers, name).from_pretrained('x')", True),
        ("loader.from_pretrained('x', trust_remote_code=asked)", True),
        ("AutoModel.from_pretrained('x', trust_remote_code=False)", True),
        ("AutoModelForCausalLM.from_pretrained('x', trust_remote_code=False, use_safetensors=False)", True),
        ("AutoModel.from_pretrained('x', trust_remote_code=False, use_safetensors=True)", False),
        ("CLIPModel.from_pretrained('x')", True),
        ("transformers.CLIPModel.from_pretrained('x', use_safetensors=True)", False),
        ("PeftModel.from_pretrained(model, 'x')", False),
        ("CLIPProcessor.from_pretrained('x')", False),
        ("cls.from_pretrained('x')", False),
        ("type(model).from_pretrained('x')", False),
    ],
)
def test_calls_that_may_run_a_checkpoints_code_are_faults(tmp_path, call, faulty):
    root = plant(tmp_path, {"hf_captionrl/a.py": f"def f():\n    return {call}\n"})
    assert bool([*check_loading(root)]) == faulty


@pytest.mark.parametrize("sigchld", [signal.SIG_DFL, signal.SIG_IGN], ids=["default", "ignored"])
@pytest.mark.parametrize(("command", "code"), [("true", 0), ("false", 1)])
def test_the_exit_code_is_nonzero_if_a_part_failed(tmp_path, command, code, sigchld):
    """Also under a parent that ignores SIGCHLD, where the system would discard the exit codes of the parts."""
    program = (
        f"import signal, sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import check; check._BIN = check.Path('/bin'); "
        f"signal.signal(signal.SIGCHLD, {int(sigchld)}); check.PARTS['types'] = [['true'], [{command!r}]]; "
        "sys.exit(check.main(['types']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
