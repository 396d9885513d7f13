"""Checks the rules of the project: `python scripts/check_source.py`, part of `make check`. Each check is a function from
the root of the project to its faults, so that tests can plant one. Only `modules` and `configs` import the project; the
others read its source.

    python scripts/check_source.py --only layers docstrings     # a part of it
    python scripts/check_source.py --print-layers               # the table of docs/architecture.md
    python scripts/check_source.py --print-diagram              # its diagram
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import io
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from scripts.source_checks.docstrings import check_docstrings
from scripts.source_checks.files import Fault, parse, python_files, relative
from scripts.source_checks.layers import PACKAGE, check_diagram, check_layers, diagram, layer_table
from scripts.source_checks.loading import check_loading
from scripts.source_checks.skips import check_skips
from scripts.source_checks.tolerances import check_tolerances

FORBIDDEN: dict[str, str] = {
    r"(?<![\w.:/])/(?:work|root|home|Users|tmp)/\w|\b[A-Z]:\\+Users\\": "a path of one machine; use a relative one",
    r"\bshared[/](?:reference|hooks|papers)\b": "a folder outside the project; copy what is needed",
    r"https?://\S+\.(?:whl|tgz)\b": "the address of a package; name packages and versions only",
    r"\bhf_[A-Za-z0-9]{30,}\b": "an access token; remove it and revoke it",
}
"""Text that must not occur in the project, and the remedy."""

_LONG_FILE, _LONG_FUNCTION = 400, 80
_HEAVY = {"torch", "transformers", "datasets", "matplotlib"}


# --- imports and configs --------------------------------------------------------------------------------------------


def check_modules(root: Path) -> list[Fault]:
    """Every module can be imported, and `import hf_captionrl` alone loads nothing heavy."""
    faults: list[Fault] = []
    for path in python_files(root, PACKAGE, "recipes", "scripts"):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if error := failure(functools.partial(importlib.import_module, module)):
            faults.append(Fault(relative(root, path), 0, f"cannot be imported: {error}"))
    if (root / PACKAGE).is_dir():
        code = f"import sys, {PACKAGE}; print(*sorted({_HEAVY} & set(sys.modules)))"
        run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
        if loaded := run.stdout.split():
            message = f"`import {PACKAGE}` loads {', '.join(loaded)}. Import it where it is used."
            faults.append(Fault(f"{PACKAGE}/__init__.py", 0, message))
    return faults


def check_configs(root: Path) -> list[Fault]:
    """Every base file `recipes/configs/<recipe>/NAME.yaml` and every row passes through `parse_args` of its recipe."""
    faults: list[Fault] = []
    folder = root / "recipes" / "configs"
    broken: set[str] = set()
    todo: list[tuple[str, str, list[str]]] = []  # where, recipe, arguments
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        name, recipe = relative(root, path), path.parent.name
        if path.parent == folder / "rows":
            continue
        if path.parent.parent != folder or not (root / "recipes" / f"{recipe}.py").is_file():
            faults.append(Fault(name, 0, "is not in the folder of a recipe. Move it to recipes/configs/<recipe>/."))
            continue
        todo.append((name, recipe, ["--config", str(path)]))
    if (folder / "rows").is_dir():
        rows = importlib.import_module("hf_captionrl.apps.experiments.arguments")
        for row in rows.row_names(folder):
            name = f"recipes/configs/rows/{row.split('/')[0]}.yaml"
            try:
                todo.append((name, rows.load_row(folder, row).recipe, ["--row", row]))
            except ValueError as error:
                faults.append(Fault(name, 0, str(error)))
    for name, recipe, arguments in todo:
        if recipe in broken:
            continue
        if problem := failure(functools.partial(importlib.import_module, f"recipes.{recipe}")):
            broken.add(recipe)  # reported once, not for each of its configs
            faults.append(
                Fault(f"recipes/{recipe}.py", 0, f"cannot be imported, so its configs are unchecked: {problem}")
            )
            continue
        parser = sys.modules[f"recipes.{recipe}"].parse_args
        if problem := failure(functools.partial(parser, arguments)):
            faults.append(Fault(name, 0, f"recipes/{recipe}.py cannot parse {' '.join(arguments)}: {problem}"))
    return faults


def failure(action: Callable[[], object]) -> str:
    """Call a function; its error in one line, or None."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            action()
    except (Exception, SystemExit) as error:
        last = said.getvalue().strip().splitlines()[-1:] if isinstance(error, SystemExit) else []
        return " ".join([f"{type(error).__name__}: {error}", *last])
    return ""


# --- texts ----------------------------------------------------------------------------------------------------------


def text_files(root: Path) -> Iterator[tuple[str, str]]:
    """Every text file that git tracks or would track."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    run = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
    if run is not None and run.returncode == 0:
        names = sorted(name for name in run.stdout.split("\0") if name)
    else:  # not a checkout, for example an unpacked archive
        names = sorted(relative(root, p) for p in root.rglob("*") if not any(q.startswith(".") for q in p.parts[1:]))
    for name in names:
        path = root / name
        if path.is_file() and path.stat().st_size < 4_000_000:
            with contextlib.suppress(UnicodeDecodeError):
                yield name, path.read_text(encoding="utf-8")


def check_texts(root: Path) -> list[Fault]:
    """No text contains a local path, the URL of a package, or a secret."""
    faults: list[Fault] = []
    for name, text in text_files(root):
        for pattern, what in FORBIDDEN.items():
            for found in re.finditer(pattern, text):
                shown = found.group(0) if "token" not in what else "..."
                faults.append(Fault(name, text.count("\n", 0, found.start()) + 1, f"{shown!r} is {what}."))
    return faults


def check_pins(root: Path) -> list[Fault]:
    """Every line of constraints.txt is `name==version`, without URLs and options of an installer."""
    path = root / "constraints.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [
        Fault("constraints.txt", number, f"{line!r} is not name==version. Pin a package by its name and version.")
        for number, line in enumerate(lines, start=1)
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!-]+", line)
    ]


def check_lengths(root: Path) -> list[Fault]:
    """No file has more than 400 lines, and no function more than 80 without its docstring."""
    faults: list[Fault] = []
    for path in python_files(root, PACKAGE, "recipes", "scripts", "tests"):
        name = relative(root, path)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > _LONG_FILE:
            faults.append(Fault(name, 0, f"has {count} lines, more than {_LONG_FILE}. Split it."))
        for node in ast.walk(parse(path)):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and (lines := own_lines(node)) > _LONG_FUNCTION
            ):
                faults.append(
                    Fault(name, node.lineno, f"`{node.name}` has {lines} lines, more than {_LONG_FUNCTION}.")
                )
    return faults


def own_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from `def` to its end, without those of its docstring."""
    first, last = node.body[0], node.end_lineno or node.lineno
    documented = ast.get_docstring(node) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return last - node.lineno + 1 - docstring


CHECKS: dict[str, Callable[[Path], list[Fault]]] = {
    "layers": check_layers,
    "diagram": check_diagram,
    "docstrings": check_docstrings,
    "loading": check_loading,
    "texts": check_texts,
    "pins": check_pins,
    "skips": check_skips,
    "tolerances": check_tolerances,
    "lengths": check_lengths,
    "modules": check_modules,
    "configs": check_configs,
}


def main(argv: list[str] | None = None) -> int:
    """Run the checks; 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="root of the project")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="checks to run")
    parser.add_argument("--except", nargs="+", choices=CHECKS, default=[], dest="left_out", help="checks to leave out")
    parser.add_argument("--print-layers", action="store_true", help="print the layer table and stop")
    parser.add_argument("--print-diagram", action="store_true", help="print the diagram of the imports and stop")
    arguments = parser.parse_args(argv)
    if arguments.print_layers:
        print(layer_table())
        return 0
    root = arguments.root.resolve()
    if arguments.print_diagram:
        print(diagram(root))
        return 0
    sys.path.insert(0, str(root))
    started, count = time.perf_counter(), 0
    for name in (name for name in arguments.only if name not in arguments.left_out):
        begun = time.perf_counter()
        faults = CHECKS[name](root)
        count += len(faults)
        print(f"{name:12} {'ok' if not faults else f'{len(faults)} faults':12} {time.perf_counter() - begun:5.1f} s")
        for fault in faults:
            print(f"  {fault}")
    print(f"{count} faults in {time.perf_counter() - started:.1f} s")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
