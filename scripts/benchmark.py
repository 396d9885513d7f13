"""Measures what the documentation claims: `python scripts/benchmark.py NAME [options]`.

Each benchmark is a module of `scripts/benchmarks/` with `add_arguments(parser)` and `run(args) -> dict` (what goes into
its JSON); a new module with these two is a new subcommand. A module that also has `markdown(result) -> str` keeps its own
section of docs/benchmarks.md with `--write`. `--device cuda` without a name is `device --device cuda`: everything that is
measured on a GPU.
"""

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python scripts/benchmark.py` puts scripts/ there, not the folder that holds it

from hf_captionrl.io import atomic_write_text  # noqa: E402

__all__ = ["benchmarks", "main", "replace_section"]


def benchmarks() -> dict[str, str]:
    """Finds the benchmarks without importing them, which would take seconds for those that are not asked for.

    Returns:
        `dict[str, str]`: First line of the docstring by name of the subcommand.
    """
    found = {}
    for path in sorted((ROOT / "scripts" / "benchmarks").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"add_arguments", "run"} <= names:
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n", 1)[0]
    return found


def replace_section(page: str, name: str, text: str) -> str:
    """Puts a benchmark's text between its markers.

    Args:
        page: The old page.
        name: Name of the benchmark.
        text: The new section; it goes to the end of a page that has no markers for it.

    Returns:
        `str`: The new page.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in page and end in page:
        before, rest = page.split(begin, 1)
        return before + section + rest.split(end, 1)[1]
    return f"{page.rstrip()}\n\n{section}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and prints its result.

    Args:
        argv: Command-line arguments; those of the process if None.

    Returns:
        `int`: Exit status, 0.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--device" in argv and not benchmarks().keys() & set(argv):
        argv.insert(argv.index("--device"), "device")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the section of docs/benchmarks.md")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page that --write renews"
    )
    subcommands = parser.add_subparsers(dest="benchmark", required=True)
    asked = {}
    for name, summary in benchmarks().items():
        subcommand = subcommands.add_parser(name, help=summary, description=summary)
        if name in argv:
            asked[name] = importlib.import_module(f"scripts.benchmarks.{name}")
            asked[name].add_arguments(subcommand)
    args = parser.parse_args(argv)
    module = asked[args.benchmark]
    result = module.run(args)
    if not hasattr(module, "markdown"):
        print(json.dumps(result, indent=2))
        return 0
    text = module.markdown(result)
    print(text)
    if args.write:
        page = args.page.read_text(encoding="utf-8") if args.page.exists() else "# Benchmarks\n"
        atomic_write_text(args.page, replace_section(page, args.benchmark, text))
        print(f"\nRenewed the section {args.benchmark!r} of {args.page}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
