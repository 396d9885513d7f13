"""`make check`: the rules of the project.

    python scripts/check.py                  # all parts, two at a time
    python scripts/check.py source types     # some parts

A part is a list of commands, or a function from the root of the project to its faults, so that tests can plant one.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import graphlib
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_captionrl"
HEAVY = {"torch", "transformers", "datasets", "matplotlib"}
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")

LAYERS: tuple[str, ...] = (
    "utils text losses retrieval scenes",
    "data",
    "metrics",
    "captioners rewards",
    "trainers",
    "hub",
    "evaluation",
    "experimental",
    "cli",
    "apps/album apps/boosting apps/truematch apps/instruct apps/convert apps/experiments apps/pairs",
)
"""A unit imports units of its layer and of those above it in this list, without cycles. A folder of apps/ is a unit `apps/NAME`."""

APPLICATIONS = LAYERS[-1]
"""They do not import each other."""

UPWARD = {
    f"{PACKAGE}/captioners/captioner.py": ("hub",),
    f"{PACKAGE}/trainers/publishing.py": ("hub",),
    f"{PACKAGE}/cli/publish.py": ("apps/album", "apps/boosting", "apps/truematch"),
}
"""Files that import a unit of a higher layer when a function is called."""

FORBIDDEN = {
    r"(?<![\w.:/])/(?:work|root|home|Users|tmp)/\w|\b[A-Z]:\\+Users\\": "a path of one machine; use a relative one",
    r"\bshared[/](?:reference|hooks|papers)\b": "a folder outside the project; copy what is needed",
    r"https?://\S+\.(?:whl|tgz)\b": "the address of a package; name packages and versions only",
    r"\bhf_[A-Za-z0-9]{30,}\b": "an access token; remove it and revoke it",
}
"""Text that must not occur in the project, and the remedy."""


def python_files(root: Path, *folders: str) -> list[Path]:
    """Python files below folders of `root`, in a stable order."""
    found = (path for folder in folders for path in (root / folder).rglob("*.py"))
    return sorted(path for path in found if "__pycache__" not in path.parts)


# --- imports between units ------------------------------------------------------------------------------------------


def unit_of(parts: tuple[str, ...] | list[str]) -> str:
    """The unit of a module below the package: its first name, or `apps/NAME`."""
    return "/".join(parts[:2]) if parts[0] == "apps" else parts[0]


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of what a file imports, also in functions and by `import_module("...")`."""
    package = path.relative_to(root).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*(package[: len(package) - node.level + 1] if node.level else ()), *filter(None, [node.module])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def check_layers(root: Path) -> Iterator[str]:
    """Imports of the package point down the layers, and units form no cycle."""
    layer = {unit: number for number, units in enumerate(LAYERS) for unit in units.split()}
    edges: dict[str, set[str]] = {}
    for path in python_files(root, PACKAGE):
        name, parts = path.relative_to(root).as_posix(), path.relative_to(root / PACKAGE).with_suffix("").parts
        unit = unit_of(parts)
        if unit.endswith("__init__"):  # the lazy list of public names may name them all
            continue
        if unit not in layer:
            yield f"{name}: {unit!r} is in no layer. Add it to LAYERS in scripts/check.py."
            continue
        for line, module in imports(path, root):
            top, *rest = module.split(".")
            if top in ("examples", "recipes", "reproduction", "scripts", "tests"):
                yield f"{name}:{line}: the package imports {top}, which is above it."
            if top != PACKAGE or rest == ["__version__"] or not rest:
                continue
            target = unit_of(rest)
            if target not in layer:
                yield f"{name}:{line}: imports {target!r} from the package. Import it from the module that defines it."
            elif target not in (unit, *UPWARD.get(name, ())):
                if layer[target] > layer[unit]:
                    yield f"{name}:{line}: {unit} imports {target}, which is above it."
                elif {unit, target} <= set(APPLICATIONS.split()):
                    yield f"{name}:{line}: the application {unit} imports the application {target}."
                edges.setdefault(unit, set()).add(target)
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        yield f"{PACKAGE}: units import each other in a cycle: {' <- '.join(error.args[1])}."


# --- sizes ----------------------------------------------------------------------------------------------------------


def sizes(root: Path, units: list[str]) -> dict[str, list[int]]:
    """Lines and files of Python in each unit, without those of a smaller unit; of docs, bytes and files of Markdown."""
    found = {unit: [0, 0] for unit in units}
    for path in python_files(root, *{unit.split("/")[0] for unit in units} - {"docs"}):
        name = path.relative_to(root).as_posix()
        unit = max((unit for unit in units if name.startswith(f"{unit}/")), key=len)
        found[unit][0] += len(path.read_text(encoding="utf-8").splitlines())
        found[unit][1] += 1
    if "docs" in found:
        pages = [path for path in (root / "docs").rglob("*.md") if "results" not in path.parts]
        found["docs"] = [sum(path.stat().st_size for path in pages), len(pages)]
    return found


def check_budgets(root: Path) -> Iterator[str]:
    """No unit has more lines or files than its budget in pyproject.toml, and every unit of the package has one."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    budgets: dict[str, list[int]] = project["tool"]["captionrl"]["budgets"]
    for folder in sorted({path.parent for path in python_files(root, PACKAGE)} - {root / PACKAGE}):
        unit = f"{PACKAGE}/{unit_of(folder.relative_to(root / PACKAGE).parts)}"
        if unit not in budgets:
            budgets[unit] = [sys.maxsize, sys.maxsize]
            yield f"{unit} has no budget. Add it to [tool.captionrl.budgets] in pyproject.toml."
    for unit, found in sizes(root, list(budgets)).items():
        for number, budget, what in zip(
            found, budgets[unit], ("bytes" if unit == "docs" else "lines", "files"), strict=True
        ):
            if number > budget:
                yield (
                    f"{unit} has {number} {what}, and its budget in pyproject.toml is {budget}. Remove something, or raise the "
                    "budget in a commit of its own that says what a user gets for it."
                )

    for name, most, longest in (("docs", 150_000, 10_240), ("reproduction", 120_000, sys.maxsize)):
        pages = {page: page.stat().st_size for page in (root / name).rglob("*.md") if "results" not in page.parts}
        if sum(pages.values()) > most:
            yield f"Pages of {name}/ have {sum(pages.values()):,} bytes, and may have {most:,}."
        for page, size in pages.items():
            if size > longest:
                yield f"{page.relative_to(root)} has {size:,} bytes, and may have {longest:,}."


# --- texts and unsafe calls -----------------------------------------------------------------------------------------


def check_texts(root: Path) -> Iterator[str]:
    """No text that git tracks or would track contains a local path, the URL of a package, or a secret."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
    for name in sorted(filter(None, listed)):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        for pattern, what in FORBIDDEN.items():
            for found in re.finditer(pattern, text):
                yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}: the text holds {what}."


def check_links(root: Path) -> Iterator[str]:
    """Links between pages lead to files of the checkout, not to pages that only `make docs` generates."""
    for page in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("reproduction/*.md")]):
        text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if ":" not in target and not (page.parent / target).exists():
                yield f"{page.relative_to(root).as_posix()}: links {target}, which is not in the checkout. Link what is, or nothing."


def check_loading(root: Path) -> Iterator[str]:
    """`from_pretrained` never asks to run a checkpoint's code, and never opens a pickle, as it would without these arguments."""
    for path in python_files(root, PACKAGE, "examples", "recipes", "reproduction", "scripts"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or not called.endswith(".from_pretrained"):
                continue
            where = f"{path.relative_to(root).as_posix()}:{node.lineno}: {called}"
            owner = re.sub(r".*\)$", "", called.removesuffix(".from_pretrained")).rpartition(".")[2]
            given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            looked_up = owner.startswith("Auto") or (not owner[:1].isupper() and owner not in ("cls", "self"))
            if looked_up and not called.startswith("type(") and given.get("trust_remote_code") is not False:
                yield f"{where} may run a checkpoint's code. Use trust_remote_code=False."
            is_model = re.match(r"(?!Peft).*(Model|For[A-Z]\w+|WithProjection)$", owner)
            if is_model and given.get("use_safetensors") is not True:
                yield f"{where} may open a pickle. Use use_safetensors=True."


# --- modules and configs, which are imported ------------------------------------------------------------------------


def failure(action: Callable[[], object]) -> str:
    """Call a function; its error in one line, or an empty text."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            action()
    except (Exception, SystemExit) as error:
        return " ".join([f"{type(error).__name__}: {error}", *said.getvalue().strip().splitlines()[-1:]])
    return ""


def check_modules(root: Path) -> Iterator[str]:
    """Every module can be imported, and `import hf_captionrl` alone loads nothing heavy."""
    sys.path.insert(0, str(root))
    code = f"import sys, {PACKAGE}; print(*sorted({HEAVY} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if loaded.stdout.strip():
        yield f"{PACKAGE}/__init__.py: loads {loaded.stdout.strip()}. Import it where it is used."
    for path in python_files(root, PACKAGE, "recipes", "reproduction", "scripts"):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if error := failure(functools.partial(importlib.import_module, name)):
            yield f"{path.relative_to(root).as_posix()}: cannot be imported: {error}"


def check_configs(root: Path) -> Iterator[str]:
    """Every `recipes/configs/RECIPE/NAME.yaml` and every row passes through `parse_args` of its recipe."""
    rows = importlib.import_module("hf_captionrl.apps.experiments.arguments")
    folder = root / "recipes" / "configs"
    files = [path for path in sorted(folder.rglob("*.yaml")) if path.parent != folder / "rows"]
    todo = [(path.parent.name, ["--config", str(path)]) for path in files]
    todo += [(rows.load_row(folder, row).recipe, ["--row", row]) for row in rows.row_names(folder)]
    for recipe, arguments in todo:
        # A broken recipe is reported by its own fault, once for each of its configs.
        if error := failure(lambda r=recipe, a=arguments: importlib.import_module(f"recipes.{r}").parse_args(a)):  # type: ignore[misc]
            yield f"recipes/{recipe}.py cannot parse {' '.join(arguments)}: {error}"


MOST_OPTIONS = 280


def options_of_commands_and_recipes(root: Path) -> list[str]:
    """Every option that a command or a recipe declares, where it is new: not one of a base class, nor of a trainer's configuration."""
    sys.path.insert(0, str(root))
    main = importlib.import_module(f"{PACKAGE}.cli.main")
    modules = [f"recipes.{path.stem}" for path in sorted((root / "recipes").glob("*.py"))]
    modules += [f"{PACKAGE}.apps.experiments.{name}" for name in ("arguments", "data", "self_retrieval", "smile")]
    commands = [inner for command in main.COMMANDS for inner in (command.subcommands or [command])]
    kinds: list[Any] = [main._load(command.options) for command in commands]
    for name in modules:
        kinds += [kind for kind in vars(importlib.import_module(name)).values() if isinstance(kind, type)]
    trained = importlib.import_module("transformers").TrainingArguments.__dataclass_fields__.keys()
    trained |= importlib.import_module(f"{PACKAGE}.trainers").SelfRetrievalConfig.__dataclass_fields__.keys()
    names = set()
    owners: set[Any] = {owner for one in kinds for owner in one.__mro__ if dataclasses.is_dataclass(owner)}
    for kind in owners:
        if kind.__module__.startswith((PACKAGE, "recipes")) and not re.search(
            r"\.(trainers|rewards)\.", kind.__module__
        ):
            inherited = {name for base in kind.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())}
            before = inherited | (trained if kind.__name__.endswith(("Config", "Defaults")) else set())
            fields = getattr(kind, "__dataclass_fields__", {})
            new = [name for name in vars(kind).get("__annotations__", ()) if name in fields and name not in before]
            names |= {f"{kind.__name__}.{name}" for name in new if "help" in fields[name].metadata}
    return sorted(names)


def check_options(root: Path) -> Iterator[str]:
    """All commands and recipes together have at most `MOST_OPTIONS` options."""
    number = len(options_of_commands_and_recipes(root))
    if number > MOST_OPTIONS:
        yield f"Commands and recipes have {number} options, and may have {MOST_OPTIONS}. Remove those that hardly anyone uses."


# --- parts ----------------------------------------------------------------------------------------------------------

_BIN = Path(sys.executable).parent
PARTS: dict[str, Sequence[Callable[[Path], Iterator[str]] | list[str]]] = {
    "imports": [check_modules, check_configs, check_options],
    "types": [["mypy"]],
    "pages": [
        check_links,
        *(["python", name, "--check"] for name in ("reproduction/reproduce.py", "scripts/docs_pictures.py")),
    ],
    "source": [check_layers, check_budgets, check_texts, check_loading],
    "lint": [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["bandit", "-q", "-c", "pyproject.toml", "-r", PACKAGE, "examples", "recipes", "reproduction", "scripts"],
    ],
}
"""The longest first."""


def run_part(name: str, root: Path = ROOT) -> int:
    """Run a part in this process; the number of faults."""
    faults = 0
    for step in PARTS[name]:
        if callable(step):
            for fault in step(root):
                print(fault)
                faults += 1
        else:
            faults += bool(subprocess.run([_BIN / step[0], *step[1:]], cwd=root, check=False).returncode)
    print(f"{name}: {f'{faults} faults' if faults else 'ok'}", flush=True)
    return faults


def main(names: list[str]) -> int:
    """Run parts; 1 if one has a fault."""
    # If the caller ignores SIGCHLD, the system discards exit codes, and every command would seem to pass.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ |= dict.fromkeys(OFFLINE, "1")
    if names:
        return int(sum(map(run_part, names)) > 0)
    with ThreadPoolExecutor(2) as pool:
        command = [sys.executable, str(Path(__file__).resolve())]
        capture = functools.partial(subprocess.run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        parts = [pool.submit(capture, [*command, name]) for name in PARTS]
        done = [part.result() for part in as_completed(parts)]
    print(*(part.stdout for part in done), sep="", end="")
    return int(any(part.returncode for part in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
