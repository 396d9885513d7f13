"""Floating-point numbers are compared in units of their resolution, as a check of `check_source.py`.

An absolute tolerance is meaningless without the magnitude of the values, which the source does not contain.
`tests/tolerances.py` knows it when a test runs, so tests must use it for all tolerances. Every other absolute tolerance
is a fault, unless it is 0.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from scripts.source_checks.files import Fault, parse, python_files, relative

_HELPER = "tests/tolerances.py"
_KEYWORDS = {"atol", "abs_tol", "delta"}
_POSITIONS = {"approx": 2, "allclose": 3, "isclose": 3, "assert_allclose": 3}
"""Functions that accept the absolute tolerance by position, and the index of that argument from 0 (one less for
methods)."""
_LIBRARIES = {"math", "np", "numpy", "np.testing", "numpy.testing", "pytest", "torch", ""}
_DECIMALS = {"assert_almost_equal", "assert_array_almost_equal", "assertAlmostEqual", "assert_approx_equal"}
_TINY, _SMALL = 1e-4, 1e-2
"""Limits from which on anything, and an absolute difference, must say the magnitude of its values."""
_INSTEAD = "Use assert_close, close or within of tests/tolerances.py, which know the magnitude of the values."
_DIFFERENCE = "Compare with resolution(magnitude, dtype=...) of tests/tolerances.py."


def check_tolerances(root: Path) -> list[Fault]:
    """No test has an absolute tolerance outside the helper."""
    faults: list[Fault] = []
    for path in python_files(root, "tests"):
        name = relative(root, path)
        if name == _HELPER:
            continue
        tree = parse(path)
        tiny = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and _is_tiny(node.value, set(), _TINY)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            faults += [Fault(name, line, message) for line, message in _bare(node, tiny)]
    return sorted(faults, key=lambda fault: (fault.path, fault.line))


def _bare(node: ast.AST, tiny: set[str]) -> Iterator[tuple[int, str]]:
    """The absolute tolerances in a node, and the remedy; `tiny` are names of tiny numbers."""
    if isinstance(node, ast.Call):
        yield from _bare_call(node)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in _KEYWORDS and not _is_zero(value):
                yield node.lineno, f"{key.value!r} is an absolute tolerance. {_INSTEAD}"
    elif isinstance(node, ast.arguments):
        for argument in [*node.posonlyargs, *node.args, *node.kwonlyargs]:
            if argument.arg in _KEYWORDS:
                yield argument.lineno, f"The parameter {argument.arg} is an absolute tolerance. {_INSTEAD}"
    elif isinstance(node, ast.Compare):
        values = [node.left, *node.comparators]
        for left, right, operator in zip(values, values[1:], node.ops, strict=False):
            if isinstance(operator, ast.Gt | ast.GtE):
                left, right = right, left
            elif not isinstance(operator, ast.Lt | ast.LtE):
                continue
            # Below a tiny number, or above a tiny negative one.
            most = _SMALL if _is_difference(left) else _TINY
            for limit in (right, left.operand if isinstance(left, ast.UnaryOp) else None):
                if limit is not None and _is_tiny(limit, tiny, most):
                    yield node.lineno, f"{ast.unparse(limit)} is an absolute tolerance. {_DIFFERENCE}"


def _bare_call(node: ast.Call) -> Iterator[tuple[int, str]]:
    owner, _, called = ast.unparse(node.func).rpartition(".")
    for keyword in node.keywords:
        absolute = keyword.arg in _KEYWORDS or (keyword.arg == "abs" and called == "approx")
        if absolute and not _is_zero(keyword.value):
            yield node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)} is an absolute tolerance. {_INSTEAD}"
    if called in _POSITIONS:
        place = _POSITIONS[called] - (owner not in _LIBRARIES)
        for given in node.args[place : place + 1]:
            if not _is_zero(given):
                yield node.lineno, f"{ast.unparse(given)} is an absolute tolerance of {called}. {_INSTEAD}"
    if called in _DECIMALS:
        yield node.lineno, f"{called} compares decimals. {_INSTEAD}"


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _is_difference(node: ast.expr) -> bool:
    """Whether something holds an absolute difference: `abs(a - b)`, `(a - b).abs().max()`."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "abs":
            inside = call.args[:1] or [call.func]
            if any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) for part in ast.walk(inside[0])):
                return True
    return False


def _is_tiny(node: ast.expr, names: set[str], most: float) -> bool:
    """Whether a limit is a tiny number, the name of one, or calculated from one: `1e-6`, `1e-6 + 1e-9 * size`."""
    if isinstance(node, ast.BinOp):
        return _is_tiny(node.left, names, most) or _is_tiny(node.right, names, most)
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value <= most
