"""The docstring template, as a check of `check_source.py`.

A name that a module's static `__all__` lists has a summary of one line. What docs/reference lists, the public API, is
documented in full: `Args:` with every parameter and no other, `Returns:` if it returns something, and `Raises:` with what
it raises itself; every field of a dataclass in `Args:`, in `metadata={"help": ...}` or `option(help=...)`, or in a line below it. A method that
overrides a documented one needs no docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.source_checks.files import Fault, parse, python_files, relative
from scripts.source_checks.public_api import PublicAPI

PACKAGE = "hf_captionrl"

_HEADINGS = ("Args", "Returns", "Yields", "Raises", "Example", "Examples", "Attributes", "Note", "Shape")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_docstrings(root: Path) -> list[Fault]:
    """Every module has a docstring and lists its public names; docstrings of the public API follow the template."""
    faults: list[Fault] = []
    api = PublicAPI(root)
    public_api = api.find()
    for path in python_files(root, PACKAGE, "recipes", "scripts"):
        name, tree = relative(root, path), parse(path)
        if not tree.body:
            continue
        if not ast.get_docstring(tree):
            faults.append(Fault(name, 1, "the module has no docstring. Say in one line what is in it."))
        if name.startswith("scripts/"):
            continue  # programs have no public API
        defined = defined_names(tree)
        public = static_all(tree)
        if public is None:
            own = [
                n
                for n, node in defined.items()
                if not n.startswith("_") and isinstance(node, _Function | ast.ClassDef)
            ]
            if own and not path.name.startswith("_"):
                faults.append(
                    Fault(name, 1, f"there is no static __all__, but {own[0]} is public. List the public names.")
                )
            continue
        lazy = "__getattr__" in defined
        for entry in public:
            node = defined.get(entry)
            if node is None and not lazy:
                faults.append(Fault(name, 1, f"__all__ names {entry!r}, which the module does not have."))
            elif isinstance(node, _Function | ast.ClassDef) and (path, entry) not in public_api:
                missing = summary_faults(ast.get_docstring(node))
                faults += [Fault(name, node.lineno, f"{entry}: {fault}") for fault in missing]
            elif isinstance(node, _Function):
                faults += [Fault(name, node.lineno, f"{entry}: {fault}") for fault in function_faults(node)]
            elif isinstance(node, ast.ClassDef):
                overrides = api.inherited_methods(path, node)
                faults += [Fault(name, line, f"{entry}{fault}") for line, fault in class_faults(node, overrides)]
    return faults


def static_all(tree: ast.Module) -> list[str] | None:
    """The names of a literal `__all__`, or None."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        named = any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
        if named and isinstance(node.value, ast.List | ast.Tuple):
            return [e.value for e in node.value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return None


def defined_names(tree: ast.Module) -> dict[str, ast.AST]:
    """What a module binds at its top level, `if` and `try` included."""
    names: dict[str, ast.AST] = {}
    queue: list[ast.stmt] = list(tree.body)
    while queue:
        node = queue.pop(0)
        if isinstance(node, _Function | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id: node for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            queue += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            queue += [s for handler in getattr(node, "handlers", []) for s in handler.body]
    return names


def decorators(node: _Function | ast.ClassDef) -> set[str]:
    """Last names of a definition's decorators: `dataclass`, `property`, `overload`."""
    names = set()
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        names.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return names


def sections(docstring: str) -> dict[str, list[str]]:
    """Headings of a docstring with the lines below each."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in docstring.splitlines():
        heading = line.rstrip().removesuffix(":")
        if line.rstrip().endswith(":") and heading in _HEADINGS:
            current = found.setdefault(heading, [])
        elif line.strip() and not line.startswith(" "):
            current = None
        elif current is not None:
            current.append(line)
    return found


def documented(lines: list[str]) -> set[str]:
    """Names that an Args section describes."""
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    names: set[str] = set()
    for line in lines:
        if indents and line.strip() and len(line) - len(line.lstrip()) == min(indents):
            head = re.match(r"\s*((?:\*{0,2}`?\w+`?(?:\s*,\s*|\s+and\s+)?)+)\s*(?:\(|:)", line)
            names |= set(re.findall(r"\w+", head.group(1))) - {"and"} if head else set()
    return names


def own_nodes(function: _Function) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions and classes inside it."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, _Function | ast.ClassDef | ast.Lambda):
            queue += ast.iter_child_nodes(node)


def summary_faults(docstring: str | None) -> list[str]:
    """Faults of the first line."""
    if not docstring:
        return ["there is no docstring."]
    lines = docstring.splitlines()
    if len(lines) > 1 and lines[1].strip():
        return ["the summary is longer than one line. Put a blank line after the first."]
    if not lines[0].rstrip().endswith((".", "?", "!", ":", "`")):
        return [f"the summary {lines[0]!r} does not end in a full stop."]
    return []


def function_faults(function: _Function, *, is_method: bool = False, init_of: ast.ClassDef | None = None) -> list[str]:
    """What a function's docstring lacks: Args with every parameter and no other, Returns, Raises."""
    marks = decorators(function)
    if "overload" in marks:
        return []
    docstring = ast.get_docstring(function) or ""
    if init_of is not None:  # a class may describe its parameters itself
        docstring = f"{ast.get_docstring(init_of) or ''}\n\n{docstring}"
    faults = [] if init_of is not None else summary_faults(docstring)
    if faults or marks & {"property", "cached_property", "setter"}:
        return faults
    found = sections(docstring)
    a = function.args
    parameters = [p.arg for p in (*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs)]
    parameters += [a.kwarg.arg] if a.kwarg else []
    if (is_method or init_of is not None) and "staticmethod" not in marks:
        parameters = parameters[1:]
    parameters = [p for p in parameters if not p.startswith("_")]
    named = documented(found.get("Args", []))
    if missing := [p for p in parameters if p not in named]:
        faults.append(f"Args does not name {', '.join(missing)}.")
    if extra := sorted(named - set(parameters)):
        faults.append(f"Args names {', '.join(extra)}, which is not a parameter.")
    if init_of is None and returns_something(function) and not {"Returns", "Yields"} & found.keys():
        faults.append("it returns a value, but has no Returns section.")
    text = " ".join(found.get("Raises", []))
    for error in sorted(raised(function)):
        if not re.search(rf"\b{error}\b", text):
            faults.append(f"it raises {error}, which the Raises section does not name.")
    return faults


def returns_something(function: _Function) -> bool:
    """Whether a function returns a value."""
    annotation = function.returns
    if annotation is not None:
        return ast.unparse(annotation).strip("'\"") not in ("None", "NoReturn", "Never")
    return any(isinstance(node, ast.Return) and node.value is not None for node in own_nodes(function))


def raised(function: _Function) -> set[str]:
    """Names of the exceptions that a function itself raises."""
    names = set()
    for node in own_nodes(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            target = node.exc.func
            names.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return {name for name in names if name[:1].isupper()} - {"NotImplementedError"}


def class_faults(node: ast.ClassDef, overrides: set[str]) -> list[tuple[int, str]]:
    """What a class's docstring lacks: its fields or parameters, and those of its public methods that it introduces."""
    docstring = ast.get_docstring(node)
    faults = [(node.lineno, f": {fault}") for fault in summary_faults(docstring)]
    found = sections(docstring or "")
    named = documented(found.get("Args", []) + found.get("Attributes", []))
    bases = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
    if "dataclass" in decorators(node) or bases & {"NamedTuple", "TypedDict"}:
        for line, field in undocumented_fields(node, named):
            faults.append((line, f".{field}: say what it is, in Args, in metadata help, or in a line below it."))
    for member in node.body:
        if not isinstance(member, _Function):
            continue
        if member.name == "__init__":
            faults += [(member.lineno, f": {fault}") for fault in function_faults(member, init_of=node)]
        # An override is described where the method was introduced, perhaps in another library.
        elif not member.name.startswith("_") and (
            member.name not in overrides and (ast.get_docstring(member) or not bases - {"Protocol", "ABC", "Generic"})
        ):
            for fault in function_faults(member, is_method=True):
                faults.append((member.lineno, f".{member.name}: {fault}"))
    return faults


def undocumented_fields(node: ast.ClassDef, named: set[str]) -> Iterator[tuple[int, str]]:
    """Fields of a dataclass or named tuple that nothing describes."""
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, source = statement.target.id, ast.unparse(statement)
        if name.startswith("_") or "ClassVar" in ast.unparse(statement.annotation) or "init=False" in source:
            continue
        below = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if (
            name not in named
            and not below
            and not re.search(r"metadata=.*'help':|= option\(.*\bhelp=", source, re.DOTALL)
        ):
            yield statement.lineno, name
