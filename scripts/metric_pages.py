"""Generates the Spaces of the metrics and the table in docs/metrics.md from the declarations.

python scripts/metric_pages.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"(?<=<!-- begin metrics -->\n).*?(?=<!-- end metrics -->)", re.DOTALL)


def metrics_table() -> str:
    """The metrics with their functions and main keys, as Markdown."""
    from hf_captionrl.metrics.evaluate_modules.metric import all_metrics

    rows = ["| module | function | main keys |", "|:--|:--|:--|"]
    for name, metric in all_metrics().items():
        functions = ", ".join(f"`{function}`" for function in metric.functions)
        rows.append(f"| `{name}` | {functions} | {metric.keys} |")
    return "\n".join(rows) + "\n"


def generated_files(root: Path) -> dict[Path, str]:
    """All generated files with their contents."""
    from hf_captionrl.hub.spaces import space_files
    from hf_captionrl.metrics.evaluate_modules import MODULES

    page = root / "docs" / "metrics.md"
    files = {page: _TABLE.sub(metrics_table().replace("\\", r"\\"), page.read_text(encoding="utf-8"))}
    for name in MODULES:
        folder = root / "hf_captionrl" / "evaluate_modules" / name
        files |= {folder / file: text for file, text in space_files(name).items()}
    return files


def main(argv: list[str] | None = None) -> int:
    """Write or check the files; 1 if some are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; list the files that are out of date")
    arguments = parser.parse_args(argv)
    files = generated_files(ROOT)
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if arguments.check else 'wrote'}: {path.relative_to(ROOT)}")
        if not arguments.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
