"""The review page in headless Chromium."""

import json

import pytest

from hf_captionrl.apps.truematch.build import (
    bag_id,
    read_decisions,
    write_data,
    write_truematch,
)
from hf_captionrl.cli import main
from hf_captionrl.retrieval import BagFile
from hf_captionrl.scenes import load_scenes
from tests.browser import CHROMIUM, Browser

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
CARD = {"dataset_id": "little", "license": "apache-2.0", "source_license": "apache-2.0", "language": "en"}
MANIFEST = {"source": "scenes", "split": "test", "images": 12, "embed_images": True, "sizes": [2, 3], "card": CARD}
MANIFEST |= {"has_facts": True, "method": "by hand", "features": "image", "scorer": "clip@1f2e", "seed": 1}


def make(folder):
    """Twelve scenes in three bags of 2 and two of 3."""
    rows = load_scenes(num_train=0, num_validation=0, num_test=12)["test"]
    ids = rows["image_id"][:]
    write_data(folder, rows)
    bags = [ids[0:2], ids[2:4], ids[4:6], ids[6:9], ids[9:12]]
    return write_truematch(folder, BagFile(bags, [0.9, 0.8, 0.7, 0.6, 0.5], "clip@1f2e", "image"), MANIFEST)


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "little")
    return tmp_path / "little"


@pytest.fixture(scope="module")
def running_browser():
    with Browser() as opened:
        yield opened


@pytest.fixture
def browser(running_browser):
    """One browser for all tests, with storage cleared for each."""
    running_browser.forget()
    return running_browser


def decided(page):
    return page.evaluate("document.getElementById('count').textContent")


def press(page, keys, count=None):
    """Press keys in order, each after the page has handled the previous one."""
    for key in keys:
        page.key(key)
    if count is not None:
        page.wait(f"document.getElementById('count').textContent.startsWith('{count} of 5')")


def shown(page):
    return page.evaluate("[...document.querySelectorAll('#images code')].map((code) => code.textContent)")


@pytest.fixture
def page(browser, folder, tmp_path, capsys):
    """The review page, open in the browser."""
    path = tmp_path / "review.html"
    assert main(["truematch", "review", str(folder), "--output", str(path)]) == 0
    capsys.readouterr()
    browser.open(path.as_uri())
    browser.evaluate("localStorage.clear()")  # files share it
    browser.open(path.as_uri())
    return path


def decisions(browser):
    """What the page downloads, and the file."""
    browser.events.clear()
    browser.click("#download")
    while browser.wait_for_event("Browser.downloadProgress")["state"] != "completed":
        pass
    path = browser.downloads / "decisions.jsonl"
    lines = [(line["decision"], line["reason"]) for line in map(json.loads, path.read_text().splitlines())]
    return lines, path


@needs_chromium
def test_keys_decide(browser, page):
    assert decided(browser).startswith("0 of 5 bags decided")
    first = shown(browser)
    press(browser, "k", count=1)
    press(browser, "d")
    browser.wait("document.body.classList.contains('asking')")
    press(browser, "2", count=2)
    press(browser, "5", count=3)
    press(browser, "dd", count=4)
    assert decided(browser) == "4 of 5 bags decided · 1 kept · 3 dropped"
    press(browser, ["d", "Escape"])
    browser.wait("!document.body.classList.contains('asking')")
    lines, path = decisions(browser)
    assert lines == [("keep", None), ("drop", "too_easy"), ("drop", "other"), ("drop", None)]
    assert next(iter(read_decisions(path))) == bag_id(first)
    browser.wait("[...document.images].every((image) => image.naturalWidth > 0)")
    assert [problem for problem in browser.problems() if "favicon" not in problem] == []


@needs_chromium
def test_the_download_is_applied(browser, page, folder, capsys):
    browser.click("#keep")
    press(browser, "1", count=2)
    press(browser, "dd", count=3)
    browser.click("#undo")
    press(browser, "", count=2)
    lines, path = decisions(browser)
    assert [decision for decision, _ in lines] == ["keep", "drop", "drop", None]
    assert main(["truematch", "apply", str(folder), "--decisions", str(path), "--json"]) == 0
    applied = json.loads(capsys.readouterr().out)
    assert applied["added"] == 3  # of which one is undone
    assert sum(counts["undecided"] for counts in applied["bags"].values()) == 3
    assert len(json.loads((folder / "kept.json").read_text())["bags"]) == 4
    assert "2 of 5 bags were reviewed" in (folder / "README.md").read_text(encoding="utf-8")
    assert main(["truematch", "review", str(folder), "--output", str(page)]) == 0
    browser.evaluate("localStorage.clear()")
    browser.open(page.as_uri())
    assert decided(browser).startswith("2 of 5")  # decisions of the benchmark are in the page
