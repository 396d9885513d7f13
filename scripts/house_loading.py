"""Nothing that a checkpoint brings is run, as a check of `check_house.py`.

Where transformers is left to find the class of a model, tokenizer or processor (`Auto*`, or a class that is looked up
while the program runs), it asks on the terminal whether to run code that lies beside the weights, unless it is told.
"""

from __future__ import annotations

import ast
from pathlib import Path

from scripts.house_docstrings import PACKAGE, Fault, parse, python_files, relative


def finds_its_class(called: ast.expr) -> bool:
    """Whether a call is `from_pretrained` of an `Auto*` class, or of one that is no name of a class in the source."""
    if not isinstance(called, ast.Attribute) or called.attr != "from_pretrained":
        return False
    owner = called.value
    if (
        isinstance(owner, ast.Call) and ast.unparse(owner.func) == "type"
    ):  # the class of something that is loaded already
        return False
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name.startswith("Auto") or (not name[:1].isupper() and name not in ("cls", "self"))


def check_loading(root: Path) -> list[Fault]:
    """Every such call says trust_remote_code=False."""
    faults: list[Fault] = []
    for path in python_files(root, PACKAGE, "recipes", "scripts"):
        name = relative(root, path)
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.Call) or not finds_its_class(node.func):
                continue
            given = [k.value for k in node.keywords if k.arg == "trust_remote_code"]
            if not any(isinstance(value, ast.Constant) and value.value is False for value in given):
                called = ast.unparse(node.func)
                faults.append(
                    Fault(name, node.lineno, f"{called} may run a checkpoint's code: trust_remote_code=False.")
                )
    return faults
