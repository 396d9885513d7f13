"""Each rule finds the fault that is planted, and nothing where there is none."""

import re
import subprocess
import sys
import textwrap

import pytest
import yaml

from scripts.check_source import check_docstrings, check_lengths, check_pins, check_texts
from scripts.source_checks.loading import check_loading
from tests.planted_faults import ROOT, messages, plant


def run_script(root, *only):
    command = [sys.executable, str(ROOT / "scripts" / "check_source.py"), "--root", str(root), "--only", *only]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# --- docstrings -----------------------------------------------------------------------------------------------------


GOOD = '''"""A module."""
import dataclasses
from typing import NamedTuple, overload

__all__ = ["Base", "CONSTANT", "Config", "Scorer", "Span", "ranks"]

CONSTANT = 3


def ranks(features, *targets, block_size=1, **options):
    """Rank of each target.

    Args:
        features (`torch.Tensor` of shape `(N, D)`): Features:
            of captions.
        *targets: Rows.
        block_size, options: Two in one line.

    Returns:
        Ranks, 1 = best.

    Raises:
        ValueError: If there is none.
    """
    def inner():
        raise KeyError("not ours")
    if not targets:
        raise ValueError("none")
    return targets


@dataclasses.dataclass
class Config:
    """A config.

    Args:
        rate: Learning rate.
    """

    rate: float = 1.0
    beta: float = dataclasses.field(default=0.0, metadata={"help": "Weight."})
    gamma: float = 0.0
    """Discount."""
    _private: int = 0


class Span(NamedTuple):
    """A span.

    Attributes:
        start: From here.
    """

    start: int


class Base:
    """A thing.

    Args:
        size: How large.
    """

    def __init__(self, size):
        self.size = size

    @property
    def area(self):
        """Its area."""
        return 1

    def scale(self, factor):
        """Scale it.

        Args:
            factor: By how much.
        """

    def _private(self, x):
        return x


class Scorer(Base):
    """A thing of its own."""

    def scale(self, factor):
        return factor
'''


REFERENCE = {"docs/reference/a.md": "::: hf_captionrl.a\n"}
"""The page that makes the planted module public."""


def test_the_template_passes(tmp_path):
    files = {"hf_captionrl/a.py": GOOD, "hf_captionrl/__init__.py": "", "hf_captionrl/_b.py": '"""B."""'}
    root = plant(tmp_path, {**files, **REFERENCE})
    assert messages(check_docstrings(root)) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"""A module."""\n', "", "the module has no docstring"),
        ('__all__ = ["Base"', '__all__ = list() + ["Base"', "no static __all__, but ranks is public"),
        ('["Base"', '["Gone", "Base"', "__all__ names 'Gone'"),
        ('    """Rank of each target.\n', '    """\n', "there is no docstring|does not end|longer than one line"),
        ("Rank of each target.", "Rank of each target", "does not end in a full stop"),
        ("Rank of each target.\n\n", "Rank of each target.\n", "longer than one line"),
        ("        *targets: Rows.\n", "", "Args does not name targets"),
        ("        block_size, options: Two in one line.\n", "", "Args does not name block_size, options"),
        (
            "        *targets: Rows.\n",
            "        *targets: Rows.\n        stale: Gone.\n",
            "names stale, which is not a parameter",
        ),
        ("    Returns:\n        Ranks, 1 = best.\n", "", "no Returns section"),
        ("        ValueError: If there is none.\n", "        KeyError: If there is none.\n", "raises ValueError"),
        ("        rate: Learning rate.\n", "        other: Learning rate.\n", "Config.rate: say what it is"),
        ('    """Discount."""\n', "", "Config.gamma: say what it is"),
        (', metadata={"help": "Weight."}', "", "Config.beta: say what it is"),
        ("        start: From here.\n", "", "Span.start: say what it is"),
        ("        size: How large.\n", "        height: How large.\n", "Base: Args does not name size"),
        ('        """Its area."""\n', "", "Base.area: there is no docstring"),
        ("            factor: By how much.\n", "", "Base.scale: Args does not name factor"),
        ('    """A thing of its own."""\n', "", "Scorer: there is no docstring"),
    ],
)
def test_docstrings_off_the_template_are_faults(tmp_path, old, new, message):
    assert GOOD.count(old) == 1
    files = {"hf_captionrl/a.py": GOOD.replace(old, new)}
    faults = messages(check_docstrings(plant(tmp_path, {**files, **REFERENCE})))
    assert faults
    assert any(re.search(message, fault) for fault in faults), faults


@pytest.mark.parametrize(
    ("page", "init", "public"),
    [
        ("::: hf_captionrl.a.ranks\n", "", True),
        ("::: hf_captionrl\n", "from hf_captionrl.a import ranks\n\n__all__ = ['ranks']\n", True),
        ("::: hf_captionrl\n", "_HOME = {'a': ('ranks', 'Base')}\n__all__ = ['ranks']\n", True),
        ("::: hf_captionrl\n", "_HOME = {'ranks': 'a'}\n__all__ = ['ranks']\n", True),
        ("::: hf_captionrl.a.Base\n", "", False),
    ],
)
def test_only_the_public_api_is_documented_in_full(tmp_path, page, init, public):
    short = GOOD.replace("        *targets: Rows.\n", "")
    files = {"hf_captionrl/a.py": short, "hf_captionrl/__init__.py": f'"""P."""\n{init}', "docs/reference/a.md": page}
    faults = messages(check_docstrings(plant(tmp_path, files)))
    assert any("Args does not name targets" in fault for fault in faults) == public


def test_other_names_need_a_summary_all_the_same(tmp_path):
    text = GOOD.replace("Rank of each target.\n\n", "Rank of each target\n\n")
    faults = messages(check_docstrings(plant(tmp_path, {"hf_captionrl/a.py": text})))
    assert len(faults) == 1
    assert "does not end in a full stop" in faults[0]


def test_an_override_of_a_documented_method_may_be_short(tmp_path):
    text = GOOD.replace("        return factor\n", '        """Scale this one."""\n        return factor\n')
    assert messages(check_docstrings(plant(tmp_path, {"hf_captionrl/a.py": text, **REFERENCE}))) == []


# --- texts ----------------------------------------------------------------------------------------------------------


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
def test_forbidden_texts_are_faults(tmp_path, text):
    faults = check_texts(plant(tmp_path, {"docs/a.md": f"fine\n{text}\n"}))
    assert len(faults) == 1
    assert (faults[0].path, faults[0].line) == ("docs/a.md", 2)
    assert "aB3aB3" not in str(faults[0])


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch @ https://a.org/torch", "--find-links x", "-e .", ""])
def test_a_constraint_that_is_not_a_pin_is_a_fault(tmp_path, line):
    faults = check_pins(plant(tmp_path, {"constraints.txt": f"numpy==2.3.4\n{line}\nscipy==1.16.3+cpu\n"}))
    assert [(fault.path, fault.line) for fault in faults] == [("constraints.txt", 2)]


def test_innocent_texts_pass(tmp_path):
    text = "a/home/b network/work/x https://a.org/home/x outputs/tmp/ homework hf_captionrl and 1/root/2"
    root = plant(tmp_path, {"docs/a.md": text})
    (root / "image.png").write_bytes(b"\x89PNG\xff/" + b"home/me")
    assert check_texts(root) == []


def test_in_a_checkout_only_the_projects_own_texts_count(tmp_path):
    bad = "cd /" + "work/project"
    root = plant(tmp_path, {".gitignore": "outputs/", "outputs/log": bad, "new.md": bad})
    subprocess.run(["git", "init", "-q", root], check=True)
    assert [fault.path for fault in check_texts(root)] == ["new.md"]


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
    assert {fault.line for fault in check_loading(root)} == ({2} if faulty else set())


def test_long_files_and_functions_are_faults(tmp_path):
    def function(lines, docstring=""):
        return "def f():\n" + docstring + "    x = 1\n" * (lines - 1)

    docstring = '    """One.\n\n    Two.\n    """\n'
    root = plant(
        tmp_path,
        {
            "hf_captionrl/a.py": "x = 1\n" * 401,
            "hf_captionrl/b.py": "x = 1\n" * 400,
            "scripts/c.py": function(81),
            "scripts/d.py": function(80),
            "tests/e.py": function(80, docstring),
            "tests/f.py": "class A:\n" + textwrap.indent(function(81, docstring).replace("def", "async def"), "    "),
        },
    )
    assert messages(check_lengths(root)) == [
        "hf_captionrl/a.py:0: has 401 lines, more than 400. Split it.",
        "scripts/c.py:1: `f` has 81 lines, more than 80.",
        "tests/f.py:2: `f` has 81 lines, more than 80.",
    ]


# --- imports and configs, in a separate process -----------------------------------------------------------------


RECIPE = '''"""A recipe."""
import argparse
__all__ = ["parse_args"]


def parse_args(argv=None):
    """Parse.

    Args:
        argv: Arguments.

    Returns:
        Parsed.
    """
    import yaml
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--rate", type=float)
    path = parser.parse_args(argv).config
    given = yaml.safe_load(open(path))
    return parser.parse_args([f"--{key}={value}" for key, value in given.items()])
'''


def test_broken_modules_and_configs_are_faults(tmp_path):
    root = plant(
        tmp_path,
        {
            "hf_captionrl/__init__.py": '"""P."""\nimport datasets\n',
            "datasets.py": "",
            "hf_captionrl/text/good.py": "",
            "hf_captionrl/text/bad.py": "import no_such_module\n",
            "hf_captionrl/text/worse.py": "raise SystemExit('at import')\n",
            "recipes/smile.py": RECIPE,
            "recipes/broken.py": "1/0",
            "recipes/configs/smile/good.yaml": yaml.safe_dump({"rate": 0.5}),
            "recipes/configs/smile/unknown.yaml": yaml.safe_dump({"rtae": 0.5}),
            "recipes/configs/smile/wrong.yaml": yaml.safe_dump({"rate": "fast"}),
            "recipes/configs/broken/a.yaml": "",
            "recipes/configs/broken/b.yaml": "",
            "recipes/configs/stray.yaml": "",
        },
    )
    run = run_script(root, "modules", "configs")
    faults = {line.split(":")[0].strip(): line for line in run.stdout.splitlines() if line.startswith("  ")}
    assert run.returncode == 1
    assert set(faults) == {
        "hf_captionrl/__init__.py",
        "hf_captionrl/text/bad.py",
        "hf_captionrl/text/worse.py",
        "recipes/broken.py",
        "recipes/configs/smile/unknown.yaml",
        "recipes/configs/smile/wrong.yaml",
        "recipes/configs/stray.yaml",
    }
    assert "No module named 'no_such_module'" in faults["hf_captionrl/text/bad.py"]
    assert "loads datasets" in faults["hf_captionrl/__init__.py"]
    assert "--rtae" in faults["recipes/configs/smile/unknown.yaml"]
    assert "invalid float value" in faults["recipes/configs/smile/wrong.yaml"]


def test_the_exit_status_of_the_script(tmp_path):
    root = plant(tmp_path, {"hf_captionrl/a.py": '"""A module."""\n'})
    assert run_script(root, "docstrings", "texts").returncode == 0
    plant(root, {"hf_captionrl/a.py": "x = 1\n"})
    assert run_script(root, "docstrings", "texts").returncode == 1
