"""The site builds without a warning, holds every page, and asks no other machine for anything."""

import ast
import importlib
import logging
import re
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import hf_captionrl
from scripts.docs_fields import field_parts, google_style
from scripts.docs_math import MathExtension, mathml
from tests.browser import CHROMIUM, Browser
from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "audio": "src",
    "video": "src",
    "embed": "src",
}
# What a `<link>` makes a browser fetch; `next`, `prev` and `canonical` are for readers and crawlers.
FETCHED = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
STYLES = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


class Page(HTMLParser):
    """What a page loads, where its links lead, and the places in it."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.ids = [], [], set()
        self.feed(text)
        self.loads += [url or sheet for url, sheet in STYLES.findall(text)]

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        if tag in LOADED and attributes.get(LOADED[tag]):
            self.loads.append(attributes[LOADED[tag]])
        if tag == "link" and FETCHED & set((attributes.get("rel") or "").split()):
            self.loads.append(attributes["href"])
        if "mermaid" in (attributes.get("class") or ""):
            self.loads.append("//mermaid")  # the theme would fetch its renderer


def elsewhere(text):
    """What a page loads from other machines."""
    return [found for found in Page(text).loads if re.match(r"(?:https?:)?//", found)]


class Warnings(logging.Handler):
    """What mkdocs and its plugins warn of; in strict mode each of them ends the build."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def site(config_file, folder):
    """Build, strict as the configuration says; what was warned of."""
    warned = Warnings()
    logging.getLogger("mkdocs").addHandler(warned)
    config = load_config(str(config_file), site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    try:
        build(config)
    except (Abort, SystemExit):
        assert warned.messages  # nothing but warnings ends a build
    finally:
        config.plugins.on_shutdown()
        logging.getLogger("mkdocs").removeHandler(warned)
    return warned.messages


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert site(ROOT / "mkdocs.yml", folder) == []
    return folder


def nav_pages(entry):
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in nav_pages(part)]


def test_every_page_is_built_and_listed(built):
    listed = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert {page for page in pages if not page.startswith("results/")} == set(listed)
    for page in pages:
        assert (built / page).with_suffix(".html").stat().st_size > 2000, page
    assert (built / "search" / "search_index.json").stat().st_size > 100_000


def test_nothing_is_loaded_from_elsewhere(built):
    files = [*built.rglob("*.html"), *built.rglob("*.css")]
    assert len(files) > 30
    for file in files:
        assert elsewhere(file.read_text(encoding="utf-8")) == [], file.name


def test_formulas_are_mathml(built):
    found = 0
    for source in sorted((ROOT / "docs").glob("*.md")):
        page = (built / source.name).with_suffix(".html").read_text(encoding="utf-8")
        text = source.read_text(encoding="utf-8")
        assert page.count('display="block"') == text.count("```math"), source.name
        assert page.count('display="inline"') == len(re.findall(r"\$`", text)), source.name
        assert not re.search(r"\$\$|\$(?:`|<code>)|language-math", page), source.name
        found += page.count("<math")
    assert found > 20


def test_formula_keeps_its_parts():
    made = mathml(r"L = \frac{1}{T} \sum_{t=1}^{T} \log p(y_t)", block=True)
    assert [part for part in ("<mfrac>", "<munderover>", "<msub>", 'display="block"') if part not in made] == []
    page = markdown.markdown(
        "a $`x < y`$ `$` b\n\n```math\nz_t\n```\n", extensions=[MathExtension(), "pymdownx.superfences"]
    )
    assert page.count("<math") == 2
    assert "<code>$</code>" in page
    with pytest.raises(ValueError, match="incomplete"):
        mathml(r"\frac{1}{")
    with pytest.raises(ValueError, match="'&'"):
        mathml(r"\begin{aligned} a &= b \end{aligned}")


def test_links_between_built_pages_lead_somewhere(built):
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in built.rglob("*.html")}
    broken = []
    for file, page in pages.items():
        for link in [*page.links, *page.loads]:
            if re.match(r"[a-z]+:|//", link) or file.name == "404.html":
                continue
            name, _, anchor = link.partition("#")
            target = (file.parent / name.partition("?")[0]).resolve() if name else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append((file.name, link))
    assert broken == []


def test_every_public_name_is_in_the_reference(built):
    ids = set()
    for file in (built / "reference").glob("*.html"):
        ids |= Page(file.read_text(encoding="utf-8")).ids
    for name, home in hf_captionrl._HOME.items():
        assert f"hf_captionrl.{home}.{name}" in ids, name
    last = {place.rpartition(".")[2] for place in ids}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        package = ROOT / "hf_captionrl" / page.stem
        if package.is_dir():
            public = set(getattr(importlib.import_module(f"hf_captionrl.{page.stem}"), "__all__", []))
            defined = {
                node.name
                for file in package.rglob("*.py")
                for node in ast.parse(file.read_text(encoding="utf-8")).body
                if isinstance(node, ast.ClassDef | ast.FunctionDef)
            }
            assert public & defined <= last, page.stem
    text = (built / "reference" / "trainers.html").read_text(encoding="utf-8")
    assert "Weight of CIDEr-D in Eq. 8" in text  # the help of a configuration's field
    assert "no_such_name" not in last


def test_docstrings_are_read(built):
    docstring = "Summary, see [`Other`].\n\nArgs:\n    x (`torch.Tensor` of shape `(B, T)`, *optional*): `x` (a). \nReturns:\n    A."
    read = google_style(docstring + "\n\nExample:\n    >>> 1")
    assert "see `Other`." in read
    assert "    x (torch.Tensor of shape (B, T), optional): `x` (a). \n\nReturns:" in read
    assert read.endswith("\n\nExamples:\n    >>> 1")
    assert field_parts('field(default=0.5, metadata={"help": "How " "much."})') == ("How much.", "0.5")
    assert field_parts("field(default_factory=list)") == (None, "list")
    assert field_parts('option(0.5, parse=share, help="How " "much.")') == ("How much.", "0.5")
    assert field_parts("other(default=1)") == (None, None)
    for file in (built / "reference").glob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert "<p>Returns:" not in text, file.name
        assert "field(default" not in text, file.name


def test_code_of_the_front_pages_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAPTIONRL_CACHE", str(tmp_path / "cache"))
    names: dict = {}
    for number, code in enumerate(blocks(ROOT / "docs" / "quickstart.md", "python")):
        exec(compile(code, f"docs/quickstart.md, example {number}", "exec"), names)
    assert names["found"]["recall_at_1"] < 0.7
    assert names["truth"]["fact_recall"] < 0.5
    assert names["trainer"].state.global_step == 2
    with pytest.raises(NameError):
        exec("nobody_wrote_this", names)


FAULTS = {
    "a broken link": ("# Home\n\n[x](nowhere.md)\n", "nowhere.md"),
    "a broken anchor": ("# Home\n\n[x](#no-such-place)\n", "no-such-place"),
    "a link out of the folder": ("# Home\n\n[x](../README.md)\n", "README.md"),
    "a missing picture": ("# Home\n\n![x](images/none.png)\n", "none.png"),
    "a docstring that names what is not there": (
        "# Home\n\n::: planted\n",
        "does not appear in the function signature",
    ),
    "a module that is not there": ("# Home\n\n::: no_such_module\n", "no_such_module"),
    "a page in no list": ("# Home\n", "other.md"),
    "a formula without an end": ("# Home\n\n```math\n\\frac{1}{\n```\n", "incomplete"),
    "a command that no formula knows": ("# Home\n\nSo $`\\nosuch{1}`$.\n", "\\nosuch"),
    "no fault": ("# Home\n\n[home](index.md#home)\n", None),
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[] if f in ("a broken link", "no fault") else pytest.mark.slow) for f in FAULTS],
)
def test_a_fault_stops_the_build(fault, tmp_path):
    text, message = FAULTS[fault]
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(text)
    (docs / "other.md").write_text("# Other\n")
    planted = '"""A module."""\n\n\ndef double(x: int) -> int:\n    """Twice.\n\n    Args:\n        y: No parameter.\n    """\n'
    (tmp_path / "planted.py").write_text(planted)
    config = (ROOT / "mkdocs.yml").read_text().replace("paths: [.]", f"paths: [{tmp_path}]")
    for name in ("docs_fields.py", "docs_math.py"):
        config = config.replace(f"scripts/{name}", str(ROOT / "scripts" / name))
    nav = ["index.md"] if message == "other.md" else ["index.md", "other.md"]
    config = re.sub(r"^nav:.*", yaml.safe_dump({"nav": nav}), config, flags=re.M | re.S)
    (tmp_path / "mkdocs.yml").write_text(config)
    warned = site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert any(message in text for text in warned) if message else warned == [], warned


def test_a_page_that_loads_from_elsewhere_is_seen(built):
    page = (built / "index.html").read_text(encoding="utf-8")
    assert elsewhere(page.replace("</head>", '<link rel="stylesheet" href="https://fonts.example/a.css"></head>'))
    assert elsewhere(page.replace("</head>", '<script src="//cdn.example/katex.js"></script></head>'))
    assert elsewhere("@font-face { src: url(https://fonts.example/a.woff2) }")
    assert elsewhere('<div class="mermaid">graph</div>')
    assert elsewhere(page) == []


SORTED = """<article><table>
<thead><tr><th></th><th style="text-align: right;">R@1 ↑</th></tr></thead>
<tbody><tr><td>b</td><td>0.5 ±0.1</td></tr><tr><td>c</td><td>–</td></tr><tr><td>a</td><td>12.0</td></tr></tbody>
</table><table><thead><tr><th>text</th></tr></thead><tbody><tr><td>x</td></tr></tbody></table></article>
<script>SCRIPT</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_tables_sort_by_the_clicked_column(tmp_path):
    script = (ROOT / "docs" / "tables.js").read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text('<meta charset="utf-8">' + SORTED.replace("SCRIPT", script), encoding="utf-8")
    names = (
        "[...document.querySelectorAll('table')[0].tBodies[0].rows].map((row) => row.cells[0].textContent).join('')"
    )
    with Browser() as browser:
        browser.open(page.as_uri())
        assert (
            browser.evaluate("document.querySelectorAll('button').length") == 2
        )  # none where no column holds numbers
        for column, wanted in ((1, "bac"), (1, "cab"), (0, "abc"), (0, "cba")):
            browser.click(f"th:nth-child({column + 1}) button")
            assert browser.evaluate(names) == wanted
        assert browser.evaluate("document.querySelector('th').getAttribute('aria-sort')") == "descending"
        assert browser.problems() == []
