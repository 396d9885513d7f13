"""Runs the benchmarks of the documentation: `python scripts/benchmark.py NAME [options]`.

Each benchmark is a module of `scripts/benchmarks/` with `add_arguments(parser)` and `run(args) -> dict` (what goes into
its JSON); a new module with these two is a new subcommand. A module that also has `markdown(result) -> str` keeps its
section of docs/benchmarks.md with `--write`. `gpu` is everything that a GPU has to show; it writes its section and JSON
by default.
"""

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a program, only scripts/ is on the path

from hf_captionrl.utils.io import write_json  # noqa: E402
from scripts.page_sections import write_section  # noqa: E402


def benchmarks() -> dict[str, str]:
    """Finds the benchmarks without importing them, because imports take seconds.

    Returns the first line of the docstring by name of the subcommand.
    """
    found = {}
    for path in sorted((ROOT / "scripts" / "benchmarks").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"add_arguments", "run"} <= names:
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n", 1)[0]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and prints its result."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the section of docs/benchmarks.md")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page that --write updates"
    )
    subcommands = parser.add_subparsers(dest="benchmark", required=True)
    asked = {}
    for name, summary in benchmarks().items():
        subcommand = subcommands.add_parser(name, help=summary, description=summary)
        if name in argv:
            asked[name] = importlib.import_module(f"scripts.benchmarks.{name}")
            asked[name].add_arguments(subcommand)
            subcommand.add_argument(
                "--output",
                type=Path,
                help=f"JSON file to write, such as docs/results/benchmark_{name}.json. Other shapes in it are kept by the "
                "benchmarks of a training step.",
            )
    args = parser.parse_args(argv)
    module = asked[args.benchmark]
    result = module.run(args)
    if args.output is not None:
        write_json(args.output, result)
    if not hasattr(module, "markdown"):
        print(json.dumps(result, indent=2))
        return 0
    text = module.markdown(result)
    print(text)
    if args.write:
        write_section(args.page, args.benchmark, text, title="Benchmarks")
        print(f"\nUpdated the section {args.benchmark!r} of {args.page}.")
    return 1 if result.get("failed") else 0


if __name__ == "__main__":
    raise SystemExit(main())
