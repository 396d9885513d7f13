"""Tests with the lowest, a middle and the newest releases of the libraries: `make test-versions`.

`lowest` has the lower bounds of pyproject.toml, `newest` the versions of constraints.txt; transformers and TRL are those of
`hf_captionrl.utils.versions.TESTED`. The tests are those in which this package
meets the libraries. What passed is recorded in reproduction/results/test_versions.json.
"""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import nox

from hf_captionrl.utils.versions import TESTED

nox.options.default_venv_backend = "uv"
nox.options.envdir = "outputs/versions"
nox.options.reuse_venv = "yes"

MIDDLE = """torch==2.10.0
torchvision==0.25.0
peft==0.21.0
accelerate==1.12.0
datasets==5.0.0
"""
RECORDED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "evaluate", "huggingface_hub", "numpy")
TESTS = (
    "tests/captioners/test_any_chat.py",
    "tests/captioners/test_captioner.py",
    "tests/captioners/test_clipcap.py",
    "tests/captioners/test_families.py",
    "tests/captioners/test_pipelines.py",
    "tests/losses/test_policy_gradient.py",
    "tests/metrics/evaluate_modules/test_modules.py",
    "tests/trainers",
    "tests/utils/test_lazy_import.py",
)


def constraints(libraries: str) -> str:
    """The versions that a session fixes, one `name==version` per line."""
    if libraries == "newest":
        return Path("constraints.txt").read_text(encoding="utf-8")
    bounds = re.findall(
        r"([\w-]+)>=([\d.]+)", "\n".join(nox.project.load_toml("pyproject.toml")["project"]["dependencies"])
    )
    middle = "".join(f"{name}=={tested[len(tested) // 2]}\n" for name, tested in TESTED.items())
    return MIDDLE + middle if libraries == "middle" else "".join(f"{name}=={version}\n" for name, version in bounds)


@nox.session
@nox.parametrize("libraries", ["lowest", "middle", "newest"])
def versions(session: nox.Session, libraries: str) -> None:
    """Install the releases and run the tests."""
    fixed = Path(session.create_tmp()) / "constraints.txt"
    fixed.write_text(constraints(libraries), encoding="utf-8")
    session.install(
        "--constraint",
        str(fixed),
        "--editable",
        ".[docs,tracking]",
        "hypothesis",
        "num2words",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
    )
    report = fixed.with_name("report.xml")
    command = ("pytest", "-q", "-m", "not slow", "-n", "2", "--dist", "loadfile", f"--junitxml={report}", *TESTS)
    session.run(*command, env={"PYTHONPATH": None})
    suite = ElementTree.parse(report).getroot()[0].attrib
    frozen = str(session.run("uv", "pip", "freeze", silent=True)).replace("huggingface-hub", "huggingface_hub")
    recorded = {"revision": str(session.run("git", "rev-parse", "HEAD", external=True, silent=True)).strip()}
    recorded |= {"passed": int(suite["tests"]) - int(suite["skipped"]), "skipped": int(suite["skipped"])}
    recorded["versions"] = dict(re.findall(rf"^({'|'.join(RECORDED)})==([\d.]+)", frozen, re.M))
    file = Path("reproduction/results/test_versions.json")
    found = json.loads(file.read_text(encoding="utf-8")) | {libraries: recorded}
    file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
