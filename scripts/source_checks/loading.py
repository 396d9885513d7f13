"""Checks that no call runs code of a checkpoint or opens a pickle, as a check of `check_source.py`.

If transformers finds the class of a model, tokenizer or processor (`Auto*`, or a class that is looked up at run time),
it asks on the terminal whether to run code of the checkpoint, unless trust_remote_code=False. If there are no weights
in safetensors, it opens a pickle, unless use_safetensors=True.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from scripts.source_checks.docstrings import PACKAGE
from scripts.source_checks.files import Fault, parse, python_files, relative

_MODEL = re.compile(r"^(?!Peft).*(Model|For[A-Z]\w+|WithProjection)$")


def owner_of(called: ast.expr) -> str | None:
    """The name before `.from_pretrained`; empty if it is looked up, None if another function is called."""
    if not isinstance(called, ast.Attribute) or called.attr != "from_pretrained":
        return None
    owner = called.value
    return owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""


def finds_its_class(called: ast.expr) -> bool:
    """Whether a call is `from_pretrained` of an `Auto*` class, or of a class that is looked up at run time."""
    name = owner_of(called)
    if name is None or ast.unparse(called).startswith("type("):  # the class of an object that is loaded already
        return False
    return name.startswith("Auto") or (not name[:1].isupper() and name not in ("cls", "self"))


def check_loading(root: Path) -> list[Fault]:
    """Every such call passes trust_remote_code=False, and use_safetensors=True if it loads a model."""
    faults: list[Fault] = []
    for path in python_files(root, PACKAGE, "recipes", "scripts"):
        name = relative(root, path)
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.Call):
                continue
            given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            called = ast.unparse(node.func)
            if finds_its_class(node.func) and given.get("trust_remote_code") is not False:
                faults.append(
                    Fault(name, node.lineno, f"{called} may run a checkpoint's code. Use trust_remote_code=False.")
                )
            if _MODEL.match(owner_of(node.func) or "") and given.get("use_safetensors") is not True:
                faults.append(Fault(name, node.lineno, f"{called} may open a pickle. Use use_safetensors=True."))
    return faults
