"""What the site has beside the committed pages: a hook of mkdocs and an extension of griffe, both named in `mkdocs.yml`.

- Pages made of reproduction/paper_index.yaml, reproduction/findings.yaml and reproduction/results/*.json, which are not committed.
- Tables in committed pages. `<!-- table RUN: Heading; Heading -->` stands for columns of reproduction/results/RUN.json, or of several runs, `RUN, RUN`,
  and `<!-- table RUN: Heading | row; row -->` for some of its rows; `<!-- table changes -->` is README's;
  `<!-- findings PAPER -->`, `<!-- observatory -->`, `<!-- predictions -->`, `<!-- large_bags -->`, `<!-- estimators -->`,
  `<!-- estimators_seeds -->`, `<!-- listeners -->`, `<!-- listening_seeds -->`, `<!-- worlds -->`, `<!-- redrawn_seeds -->` and `<!-- other_kinds -->` for others.
  `<!-- logged_keys TRAINER -->` are rows of docs/logged_keys.yaml. Where `<!-- /table -->` (or another name) follows, the rows are
  committed too, for readers on GitHub: `python scripts/docs_hooks.py` writes them, and a test compares them.
- Formulas: ```` ```math ```` blocks and ``$`x`$`` within a line, as GitHub reads them. They become MathML, which needs no script.
- Fields of configurations: their help becomes their docstring.
"""

from __future__ import annotations

import ast
import functools
import html
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import griffe
import yaml
from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]

_LOG = logging.getLogger("mkdocs.hooks.pages")
_MARKER = re.compile(r"^<!-- (\w+)(?: (.+))? -->$(\n(?:(?!<!-- ).*\n)*<!-- /\1 -->$)?", re.M)


def on_config(config: Any) -> Any:
    """Let mkdocs read formulas, and this file the other scripts."""
    sys.path.insert(0, str(ROOT))  # not at import: mkdocs restores the path after it loads this file
    config.markdown_extensions.append(MathExtension())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and results of reproduction/, the generated pages beside them, and the examples."""
    record = (path for path in (ROOT / "reproduction").rglob("*") if path.suffix in (".md", ".yaml", ".json"))
    for path in sorted([*record, *(ROOT / "examples").glob("*.*")]):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for name, text in generated_pages().items():
        files.append(File.generated(config, f"reproduction/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Put tables where a page has their markers, and let links between docs/ and reproduction/ hold in the site.

    An unknown marker is an ordinary comment.
    """
    text = _MARKER.sub(lambda match: _table(match[1], match[2]) or match[0], markdown)
    is_record = page is not None and page.file.src_uri.startswith("reproduction/")
    text = text.replace("](../reproduction/", "](" if is_record else "](reproduction/").replace(
        "](../examples/", "](examples/"
    )
    return re.sub(r'(\]\(|")\.\./docs/', r"\1../", text) if is_record else text


def with_committed_tables(markdown: str) -> str:
    """A page with the rows of its committed tables written anew."""

    def written(match: re.Match[str]) -> str:
        if match[3] is None:
            return match[0]
        rows = [line for line in (_table(match[1], match[2]) or "").splitlines() if line.startswith("|")]
        return "\n".join([match[0].splitlines()[0], "", *rows, "", f"<!-- /{match[1]} -->"])

    return _MARKER.sub(written, markdown)


def logged_keys(trainer: str) -> dict[str, str]:
    """Meaning of what a trainer logs, by keys that share it, as docs/logged_keys.yaml writes them."""
    entries = yaml.safe_load((ROOT / "docs" / "logged_keys.yaml").read_text(encoding="utf-8"))
    return {entry["keys"]: entry["meaning"] for entry in entries if trainer in entry["trainers"]}


@functools.cache
def campaign() -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Rows of the papers, runs, and the results of finished runs."""
    from reproduction import RESULTS
    from reproduction.make_paper_index import load_index
    from reproduction.runs import Run, finished

    index = load_index()
    runs = {run["name"]: Run(**run) for run in index["runs"]}
    found = {name: finished(run, run.seeds, RESULTS) for name, run in runs.items()}
    return index["rows"], runs, {name: record for name, record in found.items() if record is not None}


@functools.cache
def generated_pages() -> dict[str, str]:
    """Markdown by file name."""
    from reproduction import RESULTS, findings, make_paper_index
    from reproduction.pages import leaderboard_page, presets_page, reproduction_page

    rows, runs, results = campaign()
    tables = [
        "# Full tables",
        "Every table of the embedded world with all its columns, by the name of its result. Click a heading to sort. R@1 is by the held-out scorer "
        "unless a heading says otherwise; ± is one standard error over seeds.",
    ]
    for path in sorted(RESULTS.glob("*_seeds.json")):
        tables += [f"## {path.stem}", full_table(path.stem)]
    return {
        "paper_index.md": make_paper_index.to_markdown(rows),
        "reproduction.md": reproduction_page(rows, runs, results, RESULTS),
        "leaderboard.md": leaderboard_page(runs, results),
        "presets.md": presets_page(),
        "full_tables.md": "\n\n".join(tables) + "\n",
        **findings.pages(results),
    }


@functools.cache
def full_table(run: str) -> str:
    """The table of a result with all its columns, and what made it; of `*-smile`, one row for each such result, by its name."""
    from hf_captionrl.metrics.columns import (
        MORE_REFERENCES_COLUMNS,
        REWARD_COLUMNS,
        SAMPLE_COLUMNS,
        Column,
        table_columns,
    )
    from reproduction import RESULTS
    from reproduction.run_seeds import to_markdown

    paths = sorted(RESULTS.glob(f"{run}.json"))
    record = json.loads((paths[0] if paths else RESULTS / f"{run}.json").read_text(encoding="utf-8"))
    if "*" in run:  # the start, the references, and what each result trained
        texts = {path.stem.removeprefix(Path(run).name[:-1]): path.read_text(encoding="utf-8") for path in paths}
        rows = [(name, found) for name, text in texts.items() if len(found := json.loads(text)["rows"]) > 2]
        trained = [{**found[1], "name": name} for name, found in rows]
        record |= {"rows": [rows[0][1][0], rows[0][1][-1], *trained], "command": "reproduce.py --only photographs"}
    of_videos = table_columns("emscore", "emscore_references")
    command = record.get("command", f"python reproduction/reproduce.py --only {run}")
    further = (Column("step", "Step", None, 0), *MORE_REFERENCES_COLUMNS, *REWARD_COLUMNS, *SAMPLE_COLUMNS, *of_videos)
    return to_markdown(record["rows"], record["seeds"], command, further).strip()


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def columns_of(table: str, headings: list[str], rows: Sequence[str] = ()) -> str:
    """A table with some of its columns and its rows, or those of some names, and what follows it."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    known = _cells(lines[0])
    if missing := [heading for heading in headings if heading not in known]:
        raise ValueError(f"The table has no column {missing[0]!r}. Use one of: {', '.join(known[1:])}.")
    kept = [0, *map(known.index, headings)]
    body = [cells for cells in map(_cells, lines[2:]) if not rows or cells[0] in rows]
    shown = [*map(_cells, lines[:2]), *body]
    shown_lines = ["| " + " | ".join(cells[column] for column in kept) + " |" for cells in shown]
    return "\n".join([*shown_lines, *table.splitlines()[len(lines) :]])


def _table(name: str, arguments: str | None) -> str | None:
    """What a marker stands for."""
    from reproduction import estimators, hacking, listening, worlds
    from reproduction.pages import changes_table

    if (name, arguments) == ("table", "changes"):
        return changes_table()
    if name == "table" and arguments:
        run, _, columns = arguments.partition(": ")
        columns, _, chosen = columns.partition(" | ")
        headings = columns.split("; ")
        try:
            if len(runs := run.split(", ")) > 1:  # one table, whose rows begin with their run
                parts = {one: columns_of(full_table(one), headings).splitlines() for one in runs}
                body = {one: [line[2:] for line in lines[2:] if line.startswith("|")] for one, lines in parts.items()}
                rows = [
                    f"| {one.removesuffix('_seeds')}: {row}"
                    for one, rows_of_run in body.items()
                    for row in rows_of_run
                ]
                return "\n".join([*parts[runs[0]][:2], *rows])
            more = "" if not run.endswith("_seeds") else f" [All columns](../reproduction/full_tables.md#{run})."
            return columns_of(full_table(run), headings, chosen.split("; ") if chosen else []) + more
        except (ValueError, OSError) as error:
            _LOG.warning("%s: %s", run, error)
    elif name == "logged_keys" and arguments:
        rows = [f"| `{keys.replace(' ', '` `')}` | {meaning} |" for keys, meaning in logged_keys(arguments).items()]
        return "\n".join(["| key | meaning |", "|:--|:--|", *rows])
    elif name == "findings":
        summary = generated_pages()[f"findings_{arguments}.md"]
        found = re.search(r"^\| \| finding \|.*?\n(?=\n)", summary, re.M | re.S)
        return (
            found[0] + f"\n[Every comparison with its interval](../reproduction/findings_{arguments}.md)."
            if found
            else None
        )
    elif name in (known := {**hacking.TABLES, **worlds.TABLES}):
        run, section = known[name]
        record = campaign()[2].get(run)
        return section(record) if record else f"Not finished: `python reproduction/reproduce.py --only {run}`."
    return estimators.section(name, campaign()[2]) or listening.section(name, campaign()[2])


def mathml(latex: str, *, block: bool = False) -> str:
    """A formula as MathML, or as text with a warning, which stops a strict build."""
    try:
        made = convert(latex.strip(), display="block" if block else "inline")
        if unknown := re.search(r"\\\w+|&(?!#?\w+;)", made):
            raise ValueError(f"{unknown[0]!r} is unknown")
    except Exception as error:
        _LOG.warning("The formula %r is incomplete or has an unknown command: %s", latex, error)
        return f"<code>{html.escape(latex)}</code>"
    return re.sub(r"<mi>(?:log|exp)</mi>(?!<mo stretchy=\"false\">&#x00028;)", r'\g<0><mspace width="0.17em"/>', made)


class _Blocks(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        def stored(found: re.Match[str]) -> str:
            made = f'<div class="formula">{mathml(found[1], block=True)}</div>'
            return f"\n{self.md.htmlStash.store(made)}\n"

        return re.sub(r"^```math[ ]*\n(.*?)\n```[ ]*$", stored, "\n".join(lines), flags=re.M | re.S).split("\n")


class _Inline(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]
        return self.md.htmlStash.store(mathml(m[1])), m.start(0), m.end(0)


class MathExtension(Extension):
    """Formulas before fenced code and code spans are read."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register both forms of a formula."""
        md.preprocessors.register(_Blocks(md), "formula-blocks", 27)  # above fenced code (25), below line ends (30)
        md.inlinePatterns.register(_Inline(r"\$`([^`]+)`\$", md), "formula-inline", 195)  # above code spans (190)


def field_parts(source: str) -> tuple[str | None, str | None]:
    """Help and default of `field(default=..., metadata={"help": ...})` or `option(default, help=...)`; None for what is not there."""
    node = ast.parse(source, mode="eval").body
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name not in ("field", "option"):
        return None, None
    found = {keyword.arg: keyword.value for keyword in node.keywords}
    if node.args:
        found["default"] = node.args[0]
    if isinstance(metadata := found.get("metadata"), ast.Dict):
        found |= {
            ast.literal_eval(key): value for key, value in zip(metadata.keys, metadata.values, strict=True) if key
        }
    default = found.get("default", found.get("default_factory"))
    try:
        text = ast.literal_eval(found["help"]) if "help" in found else None
    except ValueError:  # not a literal
        text = None
    return text, None if default is None else ast.unparse(default)


def google_style(text: str) -> str:
    """A docstring of this project as griffe's Google style reads it."""
    text = re.sub(r"^Example:$", "Examples:", re.sub(r"\[(`[^`\]]+`)\](?![\[(])", r"\1", text), flags=re.M)
    types = re.compile(r"^( {4}[\w*, ]+) \((.*?)\)(?=:)", re.M)
    text = types.sub(lambda found: f"{found[1]} ({re.sub('[`*]', '', found[2])})", text)
    return re.sub(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Yields|Raises|Examples):$)", "\n\n", text, flags=re.M)


class FieldHelp(griffe.Extension):
    """Help texts of dataclass fields as docstrings, and docstrings as griffe's Google style reads them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Read the field's help and default."""
        if attr.parent is None or not attr.parent.is_class or attr.value is None:
            return
        text, default = field_parts(str(attr.value))
        if text is not None and attr.docstring is None:
            attr.docstring = griffe.Docstring(text, parent=attr, lineno=attr.lineno)
        if default is not None:
            attr.value = default

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of whatever griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = google_style(obj.docstring.value)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "reproduction").glob("*.md")]:
        page.write_text(with_committed_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
