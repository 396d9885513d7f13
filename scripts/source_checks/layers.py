"""Checks which unit may import which, and the diagram of the imports in docs/architecture.md.

python scripts/check_source.py --print-layers     # the table
python scripts/check_source.py --print-diagram    # the diagram, from the imports as they are
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from scripts.source_checks.files import Fault, parse, python_files, relative

PACKAGE = "hf_captionrl"

LAYERS: dict[int, dict[str, str]] = {
    0: {
        "io": "atomic writes",
        "options": "options of commands as dataclasses",
        "checkpoints": "names, files and safe loading of checkpoints",
        "console": "exit codes and error messages",
        "local_server": "which requests a local server answers",
        "lazy_import": "code that runs after another library is imported",
        "text": "tokenisation, n-gram counting",
        "retrieval": "scorers, cached features, ranks",
        "losses": "pure functions of tensors",
        "models": "architectures that transformers lacks",
    },
    1: {
        "captioners": "one interface for every model family",
        "conversion": "pickles and published formats to safetensors",
        "rewards": "rewards and advantages of sampled captions",
        "data": "loading, checking, collating, sampling",
        "scenes": "the embedded world",
        "metrics": "pure functions that end in a number",
    },
    2: {
        "trainers": "`transformers.Trainer` with our losses and rewards",
        "reports": "tables, plots, HTML templates",
        "evaluate_modules": "thin `evaluate` modules over `metrics`",
        "engine": "shards of rows in processes or on a Ray cluster",
        "language_models": "models that answer prompts: local, vLLM, endpoints",
    },
    3: {
        "hub": "cards, and what is published",
        "pipelines": "one call from a model to captions",
        "evaluation": "files of captions and their evaluation",
    },
    4: {
        "album": "captions that distinguish the images of a set; demo page",
        "truematch": "benchmarks of look-alikes: build, review, evaluate",
        "boosting": "Visual Caption Boosting",
        "studies": "human studies: design, page, scoring",
        "instruct": "text models: instructions, questions, answers, judges",
        "gallery": "captions of several systems side by side",
        "explain": "one caption, token by token",
        "experiments": "comparisons of runs: what the recipes share",
    },
    5: {
        "cli": "the command line",
    },
}
"""A unit may import units of its layer and of lower layers. `recipes/` and `scripts/` are above; nothing imports them."""

PRODUCTS = frozenset(LAYERS[4])

SEPARATE: dict[str, frozenset[str]] = {
    "io": frozenset({"options", "local_server", "checkpoints", "text", "retrieval", "losses", "models"}),
    "local_server": frozenset(
        {"io", "options", "checkpoints", "console", "lazy_import", "text", "retrieval", "losses", "models"}
    ),
    "options": frozenset(
        {"io", "local_server", "checkpoints", "console", "lazy_import", "text", "retrieval", "losses", "models"}
    ),
    "checkpoints": frozenset({"options", "console", "lazy_import", "text", "retrieval", "losses", "models"}),
    "console": frozenset({"io", "options", "checkpoints", "lazy_import", "text", "retrieval", "losses", "models"}),
    "lazy_import": frozenset({"io", "options", "checkpoints", "text", "retrieval", "losses", "models"}),
    "text": frozenset({"options", "local_server", "checkpoints", "retrieval", "losses", "models"}),
    "losses": frozenset({"options", "local_server", "checkpoints", "text", "retrieval", "models"}),
    "rewards": frozenset({"captioners"}),
    "data": frozenset({"captioners"}),
    "scenes": frozenset({"captioners"}),
    "metrics": frozenset({"captioners"}),
    "reports": frozenset({"trainers"}),
    **{product: PRODUCTS - {product} for product in PRODUCTS},
}
"""Units of one layer that must not import each other; products never import each other."""

TRL_ALLOWED = frozenset(
    {
        f"{PACKAGE}/experiments/parsing.py",
        f"{PACKAGE}/trainers/self_retrieval_grpo_config.py",
        f"{PACKAGE}/trainers/self_retrieval_grpo_trainer.py",
        f"{PACKAGE}/trainers/smile_sft_config.py",
        f"{PACKAGE}/trainers/smile_sft_trainer.py",
        "scripts/benchmarks/gpu_heads.py",
    }
)
"""Files that may import trl: for its argument parser, inside the function that parses, to build on its trainers, and to time its loss."""

UPWARD_CALLS = {
    f"{PACKAGE}/captioners/saving.py": "hub",
    f"{PACKAGE}/trainers/publishing.py": "hub",
    f"{PACKAGE}/metrics/__init__.py": "evaluate_modules",
}
"""Files that look up a unit of a higher layer when a function is called; docs/architecture.md has the reasons."""


HELD_BY_TRAINERS = frozenset({f"{PACKAGE}/trainers/caption_evaluation.py", f"{PACKAGE}/trainers/rollout_engine.py"})
"""Parts of a trainer that hold the trainer, so each names the type of the other."""


def imported_modules(
    tree: ast.Module, package: list[str], *, with_type_checking: bool = True
) -> Iterator[tuple[int, str, list[str]]]:
    """Every import in a file, also inside functions and by `import_module("...")`: line, absolute module name, names taken from it."""
    for node in ast.walk(tree) if with_type_checking else _executed(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])]), [a.name for a in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, str(name.value), []) for name in node.args[:1] if isinstance(name, ast.Constant))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of a file but those below `if TYPE_CHECKING`, which Python never executes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from (other, *_executed(other))
        else:
            yield child
            yield from _executed(child)


def check_layers(root: Path) -> list[Fault]:
    """Imports point downwards, neither units nor modules form an import cycle, and trl stays where it is allowed."""
    layer_of = {unit: layer for layer, units in LAYERS.items() for unit in units}
    faults: list[Fault] = []
    edges: dict[str, dict[str, tuple[str, int]]] = {}
    for path in python_files(root, PACKAGE, "recipes", "scripts"):
        name, parts = relative(root, path), path.relative_to(root).with_suffix("").parts
        inside = parts[0] == PACKAGE
        unit = parts[1] if inside else parts[0]
        facade = inside and unit == "__init__"  # the lazy list of public names may name them all
        if inside and not facade and unit not in layer_of:
            faults.append(Fault(name, 0, f"{unit!r} is in no layer. Add it to LAYERS and to docs/architecture.md."))
            continue
        package = list(parts[:-1])
        for line, module, names in imported_modules(parse(path), package):
            top, _, rest = module.partition(".")
            if top == "trl" and name not in TRL_ALLOWED:
                faults.append(Fault(name, line, f"imports trl, which only {sorted(TRL_ALLOWED)} may import."))
            if inside and top in ("recipes", "scripts", "tests"):
                faults.append(Fault(name, line, f"the package imports {top}, which is above it."))
            if top != PACKAGE or not inside or facade:
                continue
            targets = [rest.split(".")[0]] if rest else [n for n in names if n != "__version__"]
            for target in targets:
                if target in (unit, UPWARD_CALLS.get(name)):
                    continue
                if target not in layer_of:
                    message = f"imports {target!r} from the package itself. Import it from the module that defines it."
                    faults.append(Fault(name, line, message))
                elif layer_of[target] > layer_of[unit]:
                    message = f"{unit} (layer {layer_of[unit]}) imports {target} (layer {layer_of[target]}), above it."
                    faults.append(Fault(name, line, message))
                elif target in SEPARATE.get(unit, ()):
                    faults.append(
                        Fault(name, line, f"{unit} imports {target}, but these units must not import each other.")
                    )
                else:
                    edges.setdefault(unit, {}).setdefault(target, (name, line))
    return faults + import_cycles(edges) + import_cycles(module_imports(root))


def module_imports(root: Path) -> dict[str, dict[str, tuple[str, int]]]:
    """Which module of a unit imports which other module of that unit, and where.

    Imports inside functions count, since they only postpone a cycle, and so do those of types. Only the parts of a trainer
    that hold it (`HELD_BY_TRAINERS`) may name its type. Python's implicit import of the parent package is not counted.
    """
    path_of = {}
    for path in python_files(root, PACKAGE):
        parts = path.relative_to(root).with_suffix("").parts
        path_of[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    edges: dict[str, dict[str, tuple[str, int]]] = {}
    for importer, path in path_of.items():
        unit, package = importer.split(".")[:2], list(path.relative_to(root).parts[:-1])
        of_types = relative(root, path) not in HELD_BY_TRAINERS
        for line, module, names in imported_modules(parse(path), package, with_type_checking=of_types):
            found = {f"{module}.{name}" if f"{module}.{name}" in path_of else module for name in names} or {module}
            for target in sorted(found & path_of.keys()):
                if target.split(".")[:2] == unit and len(unit) == 2:
                    edges.setdefault(importer, {}).setdefault(target, (relative(root, path), line))
    return edges


def import_cycles(edges: dict[str, dict[str, tuple[str, int]]]) -> list[Fault]:
    """Cycles in a graph of units or modules, each reported once."""
    faults: list[Fault] = []
    done: set[str] = set()

    def visit(unit: str, trail: list[str]) -> None:
        if unit in trail:
            cycle = [*trail[trail.index(unit) :], unit]
            path, line = edges[trail[-1]][unit]
            faults.append(Fault(path, line, f"closes an import cycle: {' -> '.join(cycle)}."))
            return
        if unit in done:
            return
        for target in edges.get(unit, {}):
            visit(target, [*trail, unit])
        done.add(unit)

    for unit in sorted(edges):
        visit(unit, [])
    return faults


def layer_table() -> str:
    """The layers as the Markdown table of docs/architecture.md."""
    lines = ["| layer | unit | what is in it |", "|--:|:--|:--|"]
    for layer, units in sorted(LAYERS.items(), reverse=True):
        lines += [f"| {layer} | `{unit}` | {what} |" for unit, what in units.items()]
    return "\n".join(lines)


# --- the diagram ----------------------------------------------------------------------------------------------------

DIAGRAM_PAGE = "docs/architecture.md"
_BEGIN, _END = "<!-- begin diagram -->", "<!-- end diagram -->"


def unit_imports(root: Path) -> dict[str, set[str]]:
    """The other units that each unit imports."""
    units = {unit for layer in LAYERS.values() for unit in layer}
    found: dict[str, set[str]] = {unit: set() for unit in units}
    for path in python_files(root, PACKAGE):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[1] not in units:
            continue
        for _, module, names in imported_modules(parse(path), list(parts[:-1])):
            top, _, rest = module.partition(".")
            if top == PACKAGE:
                targets = {rest.split(".")[0]} if rest else set(names)
                found[parts[1]] |= targets & units - {parts[1], UPWARD_CALLS.get(relative(root, path), "")}
    return found


def direct_edges(imports: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports without those that follow from others (the transitive reduction), as (imported, importer).

    This is the direction of the data flow: a unit passes its results to the units that import it.
    """

    def reached(unit: str) -> set[str]:
        return set().union(imports[unit], *(reached(target) for target in imports[unit]))

    return sorted(
        (target, unit)
        for unit, targets in imports.items()
        for target in targets
        if not any(target in reached(other) for other in targets - {target})
    )


def diagram(root: Path) -> str:
    """The data flow between units as a Mermaid flowchart, one row per layer."""
    lines = ["```mermaid", "flowchart BT"]
    for layer, units in LAYERS.items():
        lines += [f"  subgraph layer{layer}[layer {layer}]", *(f"    {unit}" for unit in units), "  end"]
    lines += [f"  {source} --> {target}" for source, target in direct_edges(unit_imports(root))]
    return "\n".join([*lines, "```"])


def check_diagram(root: Path) -> list[Fault]:
    """The diagram in docs/architecture.md shows the actual imports."""
    path = root / DIAGRAM_PAGE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if _BEGIN not in text or _END not in text:
        return [Fault(DIAGRAM_PAGE, 0, f"has no diagram between {_BEGIN} and {_END}.")]
    shown = text[text.index(_BEGIN) + len(_BEGIN) : text.index(_END)].strip().splitlines()
    wanted = diagram(root).splitlines()
    if shown == wanted:
        return []
    line = text[: text.index(_BEGIN)].count("\n") + 1
    differ = [
        *(f"no import for {x.strip()!r}" for x in shown if x not in wanted),
        *(f"lacks {x.strip()!r}" for x in wanted if x not in shown),
    ]
    told = "; ".join(differ) or "the lines are in another order"
    return [
        Fault(
            DIAGRAM_PAGE, line, f"the diagram differs from the imports: {told}. Paste the output of --print-diagram."
        )
    ]
