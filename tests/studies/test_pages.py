"""The pages of human studies in headless Chromium, with scripted participants."""

import json
import random
import re

import pytest
from PIL import Image

from hf_captionrl.apps.studies.build import (
    ANSWERS_FORMAT,
    KEY_FORMAT,
    PARTICIPANT,
    collect_answers,
    rating_parts,
    read_answers,
    render_study_page,
    retrieval_parts,
    study_fingerprint,
)
from hf_captionrl.apps.studies.results import score_answers, study_html, study_markdown
from tests.browser import CHROMIUM, Browser

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

HOSTILE = (
    "a </script><script>document.title='caught'</script><img src=x onerror=\"document.title='caught'\"> & 'dog' \u202e"
)


def pictures(ids):
    """One colour per image, so that wrong images are detected."""
    return {i: Image.new("RGB", (8, 8), (37 * n % 256, 101 * n % 256, 59 * n % 256)) for n, i in enumerate(ids)}


def write_study(folder, kind, key, images, **more):
    key = {"format": KEY_FORMAT, "kind": kind, **key}
    key["fingerprint"] = study_fingerprint(key)
    pages = {}
    for part, questions in key["parts"].items():
        pages[part] = folder / f"{part}.html"
        html = render_study_page(
            kind,
            questions,
            images.__getitem__,
            study=key["fingerprint"],
            part=part,
            answers_format=ANSWERS_FORMAT,
            participant_pattern=PARTICIPANT,
            **more,
        )
        pages[part].write_text(html, encoding="utf-8")
    return key, pages


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory):
    """Two blocks of 20 questions and 5 controls, the second system's captions hostile."""
    ids = [f"SECRET-{n}" for n in range(310)]
    sets = [ids[n : n + 10] for n in range(0, 200, 10)]
    controls = [(ids[n : n + 10], f"control caption {n}") for n in range(200, 300, 10)]
    captions = {"SYSTEM-A": [f"caption {n}" for n in range(20)], "SYSTEM-B": [HOSTILE] * 19 + [""]}
    parts = retrieval_parts(sets, captions, controls, block_size=20, seed=3)
    key = {"systems": list(captions), "settings": {"set_size": 10}, "parts": parts}
    example = ("an example", ids[300:], 4)
    return write_study(
        tmp_path_factory.mktemp("retrieval"), "retrieval", key, pictures(ids), example=example, consent="One.\nTwo."
    )


@pytest.fixture(scope="module")
def rating(tmp_path_factory):
    ids = [f"SECRET-{n}" for n in range(3)]
    captions = {"SYSTEM-A": ["a dog", "a cat", "a cow"], "SYSTEM-B": [HOSTILE] * 3}
    parts = rating_parts(ids, captions, num_raters=2, seed=1)
    key = {"systems": list(captions), "settings": {}, "parts": parts}
    return write_study(tmp_path_factory.mktemp("rating"), "rating", key, pictures(ids))


@pytest.fixture(scope="module")
def browser():
    with Browser() as running:
        yield running


def start(browser, page, participant):
    browser.open(page.as_uri())
    browser.evaluate(f"document.getElementById('participant').value = {participant!r}")
    browser.evaluate("(() => { const box = document.getElementById('agree'); if (box) box.checked = true; })()")
    browser.click("#form button")


def saved(browser, part, participant):
    """The file of a click on a download button."""
    while browser.wait_for_event("Browser.downloadProgress")["state"] != "completed":
        pass
    path = browser.downloads / f"answers-{part}-{participant}.json"
    assert path.is_file()
    return path


def play(browser, study, part, participant, choose, folder):
    """Answer a whole page with the keyboard, and download the file."""
    key, pages = study
    start(browser, pages[part], participant)
    for question in key["parts"][part]:
        for value in choose(question):
            browser.key(str(value % 10))
        browser.key("Enter")
    assert browser.evaluate("document.getElementById('end').hidden") is False
    browser.click("#download")
    path = saved(browser, part, participant)
    folder.mkdir(exist_ok=True)
    return path.rename(folder / path.name)


def perfect(question):
    return [question["right"]]


def guessing(seed, *, careful):
    rng = random.Random(seed)

    def choose(question):
        return [question["right"] if careful and question["system"] is None else rng.randint(1, 10)]

    return choose


def scored(study, *folders):
    key, _ = study
    answers, rejected = collect_answers(folders, key)
    return {**score_answers(key, answers), "kind": key["kind"], "study": key["fingerprint"], "rejected": rejected}


# --- what is in the page --------------------------------------------------------------------------------------------


def test_page_holds_the_questions_and_not_the_key(retrieval, rating):
    for key, pages in (retrieval, rating):
        for part, page in pages.items():
            html = page.read_text(encoding="utf-8")
            data = json.loads(
                re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S).group(1)
            )
            assert [set(q) for q in data["questions"]] == [{"id", "caption", "images"}] * len(data["questions"])
            assert [q["id"] for q in data["questions"]] == [q["id"] for q in key["parts"][part]]
            for word in ("SECRET", "SYSTEM", "set-", "control-", '"right"'):
                assert word not in html.replace("control caption", "")
            assert "SECRET" in json.dumps(key)  # the search would find it
            policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
            assert "default-src 'none'; img-src data:;" in policy
            assert not re.findall(r"(?:src|href)=\"(?!data:)", html)


def test_invalid_pages_are_refused():
    more = {"study": "s", "part": "p", "answers_format": "f", "participant_pattern": "."}
    with pytest.raises(ValueError, match="no questions"):
        render_study_page("retrieval", [], {}.__getitem__, **more)
    uneven = [{"id": "a", "caption": "", "images": ["1"]}, {"id": "b", "caption": "", "images": ["1", "2"]}]
    with pytest.raises(ValueError, match=r"\[1, 2\] images"):
        render_study_page("retrieval", uneven, pictures(["1", "2"]).__getitem__, **more)
    with pytest.raises(KeyError):
        render_study_page("retrieval", uneven[1:], pictures(["1"]).__getitem__, **more)


# --- participants ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # three participants click through a study
@needs_chromium
def test_perfect_random_and_careless_participants(browser, retrieval, tmp_path):
    play(browser, retrieval, "block-1", "perfect", perfect, tmp_path / "perfect")
    play(browser, retrieval, "block-2", "perfect", perfect, tmp_path / "perfect")
    play(browser, retrieval, "block-1", "careless", guessing(1, careful=False), tmp_path / "careless")
    for number in range(3):
        for part in ("block-1", "block-2"):
            choose = guessing(f"{number} {part}", careful=True)
            play(browser, retrieval, part, f"guesses.{number}", choose, tmp_path / "guessing")
    assert browser.problems() == []

    best = scored(retrieval, tmp_path / "perfect", tmp_path / "careless")
    assert [row["accuracy"] for row in best["rows"]] == [1.0, 1.0]
    assert [row["answers"] for row in best["rows"]] == [20, 20]
    assert [entry["participant"] for entry in best["dropped"]] == ["careless"]
    assert "of 5 controls wrong, but at most 1 are allowed" in best["dropped"][0]["reason"]
    assert best["rejected"] == []

    chance = scored(retrieval, tmp_path / "guessing")
    assert chance["dropped"] == []
    assert sum(row["answers"] for row in chance["rows"]) == 120
    for row in chance["rows"]:
        assert row["accuracy_ci"][0] <= 0.1 <= row["accuracy_ci"][1]
        assert row["accuracy_exact_ci"][0] <= 0.1 <= row["accuracy_exact_ci"][1] < 0.5
    assert abs(chance["agreement"][0]["alpha"]) < 0.15

    # With the perfect participant, the interval excludes chance: the check above can fail.
    mixed = scored(retrieval, tmp_path / "guessing", tmp_path / "perfect")
    assert sum(row["correct"] for row in mixed["rows"]) == sum(row["correct"] for row in chance["rows"]) + 40
    assert mixed["rows"][0]["accuracy_exact_ci"][0] > 0.1


@needs_chromium
def test_ratings_of_two_raters_are_scored(browser, rating, tmp_path):
    wanted = {"SYSTEM-A": [2, 4, 5], "SYSTEM-B": [4, 1, 3]}
    for part, name in (("rater-1", "anna"), ("rater-2", "ben")):
        play(browser, rating, part, name, lambda question: wanted[question["system"]], tmp_path / "answers")
    result = scored(rating, tmp_path / "answers")
    assert [[row[s] for s in ("descriptiveness", "accuracy", "fluency")] for row in result["rows"]] == list(
        wanted.values()
    )
    assert result["rows"][0]["f1"] == pytest.approx(2 * 2 * 4 / 6)
    assert [entry["alpha"] for entry in result["agreement"]] == [1.0] * 6
    assert browser.problems() == []


@needs_chromium
def test_closing_the_page_loses_no_answers(browser, retrieval, tmp_path):
    key, pages = retrieval
    start(browser, pages["block-1"], "stops")
    for question in key["parts"]["block-1"][:7]:
        browser.key(str(question["right"] % 10))
        browser.key("Enter")
    browser.click("#partial")
    first = read_answers(saved(browser, "block-1", "stops").rename(tmp_path / "first.json"), key)
    assert len(first.values) == 7
    browser.open("about:blank")
    start(browser, pages["block-1"], "somebody-else")
    assert browser.evaluate("document.getElementById('count').textContent") == "Question 1 of 25"
    start(browser, pages["block-2"], "stops")
    assert browser.evaluate("document.getElementById('count').textContent") == "Question 1 of 25"
    browser.open(pages["block-1"].as_uri())
    start(browser, pages["block-1"], "stops")
    assert browser.evaluate("document.getElementById('count').textContent") == "Question 8 of 25"
    # Back shows the choice, which can be changed.
    browser.click("#back")
    right = key["parts"]["block-1"][6]["right"]
    assert browser.evaluate("document.querySelector('#task input:checked').value") == str(right)
    browser.key(str((right + 1) % 10))
    browser.key("Enter")
    for question in key["parts"]["block-1"][7:]:
        browser.key(str(question["right"] % 10))
        browser.key("Enter")
    browser.click("#download")
    last = saved(browser, "block-1", "stops").rename(tmp_path / "last.json")
    answers, rejected = collect_answers([tmp_path], key)
    assert [found.path for found in answers] == [last]
    assert rejected == [
        {
            "file": "first.json",
            "reason": "another download of the same answers of stops; the later last.json counts",
        }
    ]
    assert answers[0].started == first.started
    assert sum(answers[0].values[q["id"]] == (q["right"],) for q in key["parts"]["block-1"]) == 24


@needs_chromium
def test_page_without_storage_warns_and_exports_answers(retrieval, tmp_path):
    key, pages = retrieval
    with Browser() as browser:
        browser.open(pages["block-1"].as_uri())
        assert browser.evaluate("document.getElementById('warning').hidden") is True
        script = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('denied'); } })"
        added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
        path = play(browser, retrieval, "block-1", "p", perfect, tmp_path / "answers")
        assert "cannot store answers" in browser.evaluate("document.getElementById('warning').textContent")
        assert len(read_answers(path, key).values) == 25
        # Storage is full later: the page warns, and answering continues.
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added)
        start(browser, pages["block-2"], "q")
        assert browser.evaluate("document.getElementById('warning').hidden") is True
        browser.evaluate("(() => { Storage.prototype.setItem = () => { throw new Error('full'); }; })()")
        browser.key("1")
        browser.key("Enter")
        assert "cannot keep more" in browser.evaluate("document.getElementById('warning').textContent")
        assert browser.evaluate("document.getElementById('count').textContent") == "Question 2 of 25"


@needs_chromium
def test_keyboard_names_and_hostile_captions(browser, retrieval, rating):
    key, pages = retrieval
    browser.open(pages["block-2"].as_uri())
    # The page needs consent and an id; an e-mail address is not an id.
    browser.click("#form button")
    assert browser.evaluate("document.getElementById('task').hidden") is True
    browser.evaluate("document.getElementById('agree').click()")
    browser.evaluate("document.getElementById('participant').value = 'me@example.test'")
    browser.click("#form button")
    assert browser.evaluate("document.getElementById('task').hidden") is True
    start(browser, pages["block-2"], "keys")
    place = next(n for n, q in enumerate(key["parts"]["block-2"]) if q["caption"] == HOSTILE)
    for _ in range(place):
        browser.key("1")
        browser.key("Enter")
    assert browser.evaluate("document.getElementById('caption').textContent") == HOSTILE
    assert browser.evaluate("document.title") == "Which image is it?"
    # Enter without a choice shows a message.
    browser.key("Enter")
    assert browser.evaluate("document.getElementById('status').textContent") == "Choose an image first."
    browser.key("0")
    assert browser.evaluate("document.querySelector('#task input:checked').value") == "10"
    outline = "getComputedStyle(document.querySelector('label.choice:has(input:focus-visible)')).outlineStyle"
    assert browser.evaluate(outline) == "solid"
    browser.key("ArrowLeft")
    assert browser.evaluate("document.querySelector('#task input:checked').value") == "9"
    # The page shows the images of the question in order.
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    names = [node["name"]["value"] for node in tree if node.get("role", {}).get("value") == "radio"]
    assert names == [f"Image {n}" for n in range(1, 11)]
    assert all(
        node["name"]["value"]
        for node in tree
        if node.get("role", {}).get("value") in ("button", "textbox", "progressbar")
    )
    key, pages = rating
    start(browser, pages["rater-1"], "keys")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    names = [node["name"]["value"] for node in tree if node.get("role", {}).get("value") == "radio"]
    assert names == ["1 terrible", "2 poor", "3 fair", "4 good", "5 excellent"] * 3
    browser.key("4")
    browser.key("Enter")
    assert browser.evaluate("document.getElementById('status').textContent") == "Rate all three first."
    assert browser.problems() == []


@needs_chromium
def test_images_are_at_the_positions_of_the_key(browser, retrieval):
    key, pages = retrieval
    question = key["parts"]["block-1"][0]
    start(browser, pages["block-1"], "looks")
    browser.wait("[...document.querySelectorAll('#task img')].every((image) => image.complete && image.naturalWidth)")
    seen = browser.evaluate(
        "[...document.querySelectorAll('#task img')].map((image) => { const c = document.createElement('canvas'); "
        "c.width = c.height = 1; const x = c.getContext('2d'); x.drawImage(image, 0, 0, 1, 1); "
        "return [...x.getImageData(0, 0, 1, 1).data].slice(0, 3); })"
    )
    colours = pictures([f"SECRET-{n}" for n in range(310)])
    assert seen == [list(colours[i].getpixel((0, 0))) for i in question["images"]]


@needs_chromium
def test_page_is_narrow_in_both_colour_schemes(retrieval, rating):
    with Browser() as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        for _, pages in (retrieval, rating):
            page = next(iter(pages.values()))
            browser.open(page.as_uri())
            wide = "document.documentElement.scrollWidth"
            assert browser.evaluate(wide) <= 390
            start(browser, page, "p")
            assert browser.evaluate("document.getElementById('task').hidden") is False
            assert browser.evaluate(wide) <= 390
            grounds = []
            for scheme in ("light", "dark"):
                browser.scheme(scheme)
                grounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert grounds[0] != grounds[1]
        browser.evaluate("(() => { document.body.style.minWidth = '500px'; })()")
        assert browser.evaluate(wide) > 390  # the check above can fail


# --- the tables -----------------------------------------------------------------------------------------------------


def test_tables_escape_names_of_participants_and_systems():
    result = {
        "kind": "rating",
        "study": "s",
        "signature": "x",
        "rows": [
            {"name": "<b>A|B</b>", "descriptiveness": 3.0, "accuracy": 4.0, "fluency": 5.0, "f1": 3.4, "ratings": 2}
        ],
        "paired": [],
        "agreement": [
            {"measure": "fluency", "level": "ordinal", "alpha": None, "alpha_reason": "r", "units": 0, "people": 0}
        ],
        "participants": [{"participant": "p", "answers": 2}],
        "dropped": [],
        "rejected": [{"file": "<i>.json", "reason": "a | b"}],
    }
    markdown, html = study_markdown(result), study_html(result)
    assert r"\<b\>A\|B\</b\>" in markdown
    assert "not run: r" in markdown
    assert "&lt;b&gt;A|B&lt;/b&gt;" in html
    assert "<b>A" not in html
    assert "&lt;i&gt;.json" in html
    with pytest.raises(ValueError, match="no f1"):
        study_html({**result, "rows": [{"name": "A", "descriptiveness": 3.0, "accuracy": 4.0, "fluency": 5.0}]})
