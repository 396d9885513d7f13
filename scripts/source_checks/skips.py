"""Why tests may be skipped and how to unskip them, as a check of `check_source.py` and for the end of `make test`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from scripts.source_checks.files import Fault, parse, python_files, relative

_PAGE = "docs/skips.md"


def skip_commands(root: Path) -> dict[str, str]:
    """The table of docs/skips.md: each reason, and the command in its second column."""
    page = root / _PAGE
    rows = re.findall(
        r"^\| *([^|`]+?) *\| *`([^`|]+)` *\|", page.read_text(encoding="utf-8") if page.is_file() else "", re.M
    )
    return dict(rows)


def check_skips(root: Path) -> list[Fault]:
    """docs/skips.md lists every reason for skipping a test, with the command that unskips it."""
    commands = skip_commands(root)
    faults: list[Fault] = []
    for path in python_files(root, "tests"):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if not called.endswith(("pytest.skip", "mark.skip", "mark.skipif", "importorskip")):
                continue
            given = [k.value for k in node.keywords if k.arg == "reason"]
            given += node.args[:1] if called.endswith(("pytest.skip", "mark.skip")) else []
            reason = given[0].value if given and isinstance(given[0], ast.Constant) else None
            if reason not in commands:
                message = (
                    f"may be skipped for {reason!r}; write the reason as a literal, and list it in {_PAGE} with the "
                    "command that unskips it, in backticks."
                )
                faults.append(Fault(relative(root, path), node.lineno, message))
    return faults


def skip_summary(reasons: list[str], commands: dict[str, str]) -> list[str]:
    """The skipped tests, one line per reason, with the command that unskips them."""
    lines = []
    for reason in sorted(set(reasons)):
        count = reasons.count(reason)
        known = commands.get(reason)
        remedy = f"To run {'it' if count == 1 else 'them'}: {known}" if known else f"{_PAGE} names no command."
        lines.append(f"{count} {'test' if count == 1 else 'tests'} skipped: {reason}. {remedy}")
    return lines
