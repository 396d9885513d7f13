"""The public API: what the pages of docs/reference list, with the base classes that users see through it.

It is found in the source, without imports. A page lists a name (`::: hf_captionrl.captioners.Captioner`) or a
module, which stands for the names of its `__all__`. Packages re-export names with imports, or with a table of
`name -> submodule` or `submodule -> names` that is looked up on first use.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from scripts.source_checks.files import parse

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Place: TypeAlias = tuple[Path, Definition]


class PublicAPI:
    """The public API of the package below the root of a repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._homes: dict[str, dict[str, tuple[str, str]]] = {}

    def find(self) -> dict[tuple[Path, str], Definition]:
        """Every public definition by its file and name."""
        found: dict[tuple[Path, str], Definition] = {}
        waiting, done = list(self._listed()), set()
        while waiting:
            module, name = waiting.pop()
            if (module, name) in done:
                continue
            done.add((module, name))
            place = self.resolve(module, name)
            if place is None:
                continue
            path, node = place
            found[path, node.name] = node
            if isinstance(node, ast.ClassDef):
                waiting += [(self._dotted(path), base) for base in base_names(node)]
        return found

    def inherited_methods(self, path: Path, node: ast.ClassDef) -> set[str]:
        """Methods that a base class of the package documents."""
        names: set[str] = set()
        for base in base_names(node):
            place = self.resolve(self._dotted(path), base)
            if place is not None and isinstance(place[1], ast.ClassDef):
                names |= {m.name for m in place[1].body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)}
                names |= self.inherited_methods(place[0], place[1])
        return names

    def resolve(self, module: str, name: str) -> Place | None:
        """Where a name that a module offers is defined; None if that is not in the package."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen:
            seen.add((module, name))
            path = self._file(module)
            if path is None:
                return None
            for node in parse(path).body:
                if isinstance(node, Definition) and node.name == name:
                    return path, node
            if name not in self._offered(module):
                return None
            module, name = self._offered(module)[name]
        return None

    def _listed(self) -> Iterator[tuple[str, str]]:
        targets = ["hf_captionrl"]
        for page in sorted((self.root / "docs" / "reference").glob("*.md")):
            targets += re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        for target in targets:
            path = self._file(target)
            if path is None:
                module, _, name = target.rpartition(".")
                yield module, name
            else:
                yield from ((target, name) for name in exported(parse(path)))

    def _file(self, module: str) -> Path | None:
        stem = self.root.joinpath(*module.split("."))
        return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)

    def _dotted(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def _offered(self, module: str) -> dict[str, tuple[str, str]]:
        """Names that a module imports or looks up, with the module and name behind each."""
        if module not in self._homes:
            homes: dict[str, tuple[str, str]] = {}
            path = self._file(module)
            for node in ast.walk(parse(path)) if path else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_captionrl"):
                    homes |= {a.asname or a.name: (str(node.module), a.name) for a in node.names}
                elif isinstance(node, ast.Dict):
                    homes = {**dict(_table(module, node)), **homes}
            self._homes[module] = homes
        return self._homes[module]


def _table(module: str, node: ast.Dict) -> Iterator[tuple[str, tuple[str, str]]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            continue
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield key.value, (f"{module}.{value.value}", key.value)
        elif isinstance(value, ast.Tuple):
            for name in value.elts:
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value, (f"{module}.{key.value}", name.value)


def base_names(node: ast.ClassDef) -> Iterator[str]:
    """Names of a class's bases, without their type parameters."""
    for base in node.bases:
        target = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(target, ast.Name):
            yield target.id


def exported(tree: ast.Module) -> list[str]:
    """The names of a literal `__all__`."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets) and isinstance(value, ast.List):
            return [e.value for e in value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return []
