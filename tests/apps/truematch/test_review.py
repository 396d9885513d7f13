"""The review page in headless Chromium, and requests of other pages to its server."""

import http.client
import json
import os
import re
import signal
from pathlib import Path

import pytest

from hf_captionrl.apps.truematch.build import (
    REASONS,
    bag_id,
    load_truematch,
    read_decisions,
    write_data,
    write_truematch,
)
from hf_captionrl.apps.truematch.review import ReviewServer, review_images
from hf_captionrl.cli import main
from hf_captionrl.data.options import DatasetOptions
from hf_captionrl.retrieval import BagFile
from hf_captionrl.scenes import load_scenes
from tests.browser import CHROMIUM, Browser
from tests.processes import Forked

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
ROOT = Path(__file__).parents[3]
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


@pytest.fixture
def server(folder):
    rows = review_images(load_truematch(folder), DatasetOptions(dataset=""))
    with ReviewServer(folder, rows) as running:
        yield running


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


def lines(folder):
    return [(d.decision, d.reason) for d in read_decisions(folder / "decisions.jsonl")]


@needs_chromium
def test_keys_decide_and_decisions_are_on_disk(browser, server, folder):
    browser.open(server.address)
    assert decided(browser).startswith("0 of 5 bags decided")
    first = shown(browser)
    press(browser, "k", count=1)
    assert lines(folder) == [("keep", None)]
    assert read_decisions(folder / "decisions.jsonl")[0].bag == bag_id(first)
    press(browser, "d")
    browser.wait("document.body.classList.contains('asking')")
    assert len(lines(folder)) == 1  # nothing before the reason
    press(browser, "2", count=2)
    press(browser, "5", count=3)
    press(browser, "dd", count=4)
    assert lines(folder) == [("keep", None), ("drop", "too_easy"), ("drop", "other"), ("drop", None)]
    assert decided(browser) == "4 of 5 bags decided · 1 kept · 3 dropped"
    press(browser, ["d", "Escape"])
    browser.wait("!document.body.classList.contains('asking')")
    assert len(lines(folder)) == 4
    browser.wait("[...document.images].every((image) => image.naturalWidth > 0)")


@needs_chromium
def test_arrows_undo_and_reload(browser, server, folder):
    browser.open(server.address)
    bags = [shown(browser)]
    for _ in range(4):
        press(browser, ["ArrowRight"])
        bags.append(shown(browser))
    assert len({tuple(bag) for bag in bags}) == 5
    assert [len(bag) for bag in bags] == [2, 2, 2, 3, 3]
    press(browser, ["ArrowRight"])
    assert shown(browser) == bags[4]  # there is no bag after the last
    press(browser, ["ArrowLeft"] * 9)
    assert shown(browser) == bags[0]
    press(browser, "1", count=1)
    press(browser, "k", count=2)
    assert shown(browser) == bags[2]
    press(browser, "u", count=1)
    assert shown(browser) == bags[1]
    press(browser, "u", count=0)
    assert shown(browser) == bags[0]
    assert load_truematch(folder).last == {}
    assert lines(folder) == [("drop", "duplicates"), ("keep", None), (None, None), (None, None)]
    press(browser, "3", count=1)
    press(browser, ["ArrowLeft"])
    # Change a decision, and undo the change.
    press(browser, "k")
    browser.wait("document.getElementById('count').textContent.includes('1 kept')")
    press(browser, "u")
    browser.wait("document.getElementById('count').textContent.includes('1 dropped')")
    assert browser.evaluate("document.getElementById('verdict').textContent") == f"Dropped: {REASONS['text_or_names']}"
    browser.open(server.address)
    assert decided(browser).startswith("1 of 5")
    assert shown(browser) == bags[1]  # the first open one
    press(browser, ["ArrowRight", "ArrowRight", "n"])
    assert shown(browser) == bags[4]
    press(browser, ["n"])
    assert shown(browser) == bags[1]


@needs_chromium
def test_buttons_do_what_keys_do(browser, server, folder):
    browser.open(server.address)
    for button, count in (("#keep", 1), ("[data-reason=bad_image]", 2), ("#undo", 1)):
        browser.click(button)
        browser.wait(f"document.getElementById('count').textContent.startsWith('{count} of 5')")
    assert lines(folder) == [("keep", None), ("drop", "bad_image"), (None, None)]


@needs_chromium
def test_failed_decision_is_not_shown_as_saved(browser, folder):
    rows = review_images(load_truematch(folder), DatasetOptions(dataset=""))
    with ReviewServer(folder, rows) as server:
        browser.open(server.address)
        press(browser, "k", count=1)
        bag = shown(browser)
    press(browser, "k")
    browser.wait("!document.getElementById('error').hidden")
    assert decided(browser).startswith("1 of 5")
    assert shown(browser) == bag
    assert len(lines(folder)) == 1
    with ReviewServer(folder, rows, server.port):  # restarted: the token of the old page is invalid
        press(browser, "k")
        browser.wait("document.getElementById('error').textContent.includes('Reload the page')")
    assert len(lines(folder)) == 1


@needs_chromium
def test_exported_page_downloads_decisions(browser, folder, tmp_path, capsys):
    page = tmp_path / "review.html"
    assert main(["truematch", "review", str(folder), "--export", str(page)]) == 0
    capsys.readouterr()
    browser.open(page.as_uri())
    press(browser, "k", count=1)
    press(browser, "1", count=2)
    browser.open(page.as_uri())  # stored in the browser
    assert decided(browser).startswith("2 of 5")
    press(browser, "dd", count=3)
    press(browser, "u", count=2)
    browser.events.clear()
    browser.click("#download")
    while browser.wait_for_event("Browser.downloadProgress")["state"] != "completed":
        pass
    downloaded = browser.downloads / "decisions.jsonl"
    decisions = [json.loads(line)["decision"] for line in downloaded.read_text().splitlines()]
    assert decisions == ["keep", "drop", "drop", None]
    assert main(["truematch", "apply", str(folder), "--decisions", str(downloaded), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["added"] == 4
    assert sum(counts["undecided"] for counts in said["bags"].values()) == 3
    assert len(json.loads((folder / "kept.json").read_text())["bags"]) == 4
    assert [p for p in browser.problems() if "favicon" not in p] == []
    browser.evaluate("localStorage.clear()")


@needs_chromium
def test_killed_review_resumes(browser, folder):
    def start():
        running = Forked(main, ["truematch", "review", str(folder), "--port", "0", "--json"])
        return running, next(filter(None, (re.search(r"http://\S+", line) for line in running.stderr))).group(0)

    process, address = start()
    browser.open(address)
    press(browser, "k", count=1)
    press(browser, "4", count=2)
    process.kill()
    process.communicate()
    assert lines(folder) == [("keep", None), ("drop", "bad_image")]
    with (folder / "decisions.jsonl").open("ab") as file:
        file.write(b'{"bag": "3-00')  # an incomplete line, as after a kill
    process, address = start()
    browser.open(address)
    assert decided(browser).startswith("2 of 5")
    press(browser, "k", count=3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sum(c["kept"] for c in json.loads(said)["bags"].values()) == 2
    assert lines(folder) == [("keep", None), ("drop", "bad_image"), ("keep", None)]
    assert "3 of 5 bags were reviewed" in (folder / "README.md").read_text(encoding="utf-8")


def ask(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body=body, headers=names)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_decisions_need_the_token_of_the_page(server, folder):
    status, page = ask(server, "GET", "/")
    assert status == 200
    token = json.loads(re.search(rb'id="data">(.*?)</script>', page, re.DOTALL).group(1))["token"]
    bag = bag_id(load_truematch(folder).bags.bags[0])
    good = json.dumps({"bag": bag, "decision": "keep", "reason": None})
    assert ask(server, "POST", "/decisions", good)[0] == 403
    assert ask(server, "POST", "/decisions", good, X_Review_Token="guess")[0] == 403
    assert ask(server, "POST", "/decisions", good, X_Review_Token=token, Host="evil.test")[0] == 403
    assert ask(server, "GET", "/", Host="evil.test")[0] == 403
    assert ask(server, "POST", "/elsewhere", good, X_Review_Token=token)[0] == 404
    for bad in ("{", "[" * 5000):
        assert ask(server, "POST", "/decisions", bad, X_Review_Token=token)[0] == 400
    for bad in ('{"bag": "3-0", "decision": "keep"}', json.dumps({"bag": bag, "decision": "shoot"})):
        assert ask(server, "POST", "/decisions", bad, X_Review_Token=token)[0] == 422
    assert ask(server, "POST", "/decisions", "x" * 2**17, X_Review_Token=token)[0] == 413
    assert lines(folder) == []
    assert ask(server, "POST", "/decisions", good, X_Review_Token=token)[0] == 200
    assert lines(folder) == [("keep", None)]


def test_server_serves_only_images(server):
    status, content = ask(server, "GET", "/image/0")
    assert status == 200
    assert content.startswith(b"\x89PNG")
    for path in ("/image/12", "/image/-1", "/image/x", "/decisions.jsonl", "/../truematch.json", "/image/"):
        assert ask(server, "GET", path)[0] == 404


def test_other_sites_and_huge_numbers_are_refused(server, folder, capsys):
    assert ask(server, "GET", "/", Origin=f"http://127.0.0.1:{server.port}")[0] == 200
    assert ask(server, "GET", "/", Origin="http://127.0.0.1:1")[0] == 403
    digits = "9" * 5000  # more than Python reads as a number
    assert ask(server, "GET", f"/image/{digits}") == (404, b"Not found.")
    for length in (digits, "-1", "1e3", "\u0661", ""):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.putrequest("POST", "/decisions")
        connection.putheader("Content-Length", length.encode())
        connection.endheaders()
        assert connection.getresponse().status == 411
        connection.close()
    assert lines(folder) == []
    assert "Traceback" not in capsys.readouterr().err


def test_second_review_and_used_port_are_refused(server, folder, capsys):
    rows = review_images(load_truematch(folder), DatasetOptions(dataset=""))
    with pytest.raises(ValueError, match="Another process is writing"):
        ReviewServer(folder, rows)
    make(folder.parent / "second")
    assert main(["truematch", "review", str(folder.parent / "second"), "--port", str(server.port)]) == 2
    assert "--port" in capsys.readouterr().err


def test_missing_images_are_named(folder):
    found = load_truematch(folder)
    for path in (folder / "data").glob("*.parquet"):
        os.remove(path)
    rows = load_scenes(num_train=0, num_validation=0, num_test=12)["test"].select(range(11))
    write_data(folder, rows)
    with pytest.raises(ValueError, match="1 images of the bags are not in the data set"):
        review_images(found, DatasetOptions(dataset=""))
