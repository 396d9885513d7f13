"""Questions of human studies, and which answers count."""

import json
import random
import re
from collections import Counter

import pytest
import torch
from PIL import Image

from hf_captionrl.apps.studies.build import (
    ANSWERS_FORMAT,
    KEY_FORMAT,
    answers_checksum,
    collect_answers,
    deal_blocks,
    draw_controls,
    draw_sets,
    rating_parts,
    read_answers,
    read_key,
    render_study_page,
    retrieval_parts,
    study_fingerprint,
)
from hf_captionrl.apps.studies.results import score_answers, study_html, study_markdown
from tests.browser import CHROMIUM, Browser
from tests.tolerances import resolution


@pytest.fixture
def features():
    return torch.randn(200, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("limit", [0.8, 1.0])
def test_sets_against_a_loop(features, limit):
    order = random.Random(1).sample(range(200), 180)
    sets = draw_sets(features, 12, rows=order, set_size=10, max_similarity=limit)
    assert len(sets) == 12
    unit = features / features.norm(dim=1, keepdim=True)
    free = set(order)
    targets = iter(order)
    for target, *neighbours in sets:
        # The next free image in order, then its nine nearest free neighbours below the limit.
        assert target == next(row for row in targets if row in free)
        free.remove(target)
        scores = {row: float(unit[row] @ unit[target]) for row in free}
        allowed = sorted((row for row in free if scores[row] <= limit), key=lambda row: -scores[row])
        assert neighbours == allowed[:9]
        free -= set(neighbours)
    used = [row for images in sets for row in images]
    assert len(set(used)) == len(used) == 120
    near = [float(unit[a] @ unit[images[0]]) for images in sets for a in images[1:]]
    assert max(near) <= limit + resolution(1)
    assert (max(near) > 0.8) == (limit == 1.0)  # without the limit, copies are included
    assert 10 < len(draw_sets(features, 500)) <= 20
    assert draw_sets(features, 5, max_similarity=-0.9) == []


def test_controls_are_found_with_high_probability():
    images = torch.eye(40)
    names = {f"caption {row}": row for row in range(40)}
    captions = [[f"caption {row}", "vague", " "] for row in range(40)]

    def encode(texts):
        vague = torch.ones(40) / 40**0.5
        return torch.stack([images[names[text]] if text in names else vague for text in texts])

    rows = random.Random(0).sample(range(40), 35)
    controls = draw_controls(images, captions, encode, 2, rows=rows)
    assert len(controls) == 2
    for group, text in controls:
        assert names[text] == group[0]
        assert sorted(group) in (sorted(rows[:10]), sorted(rows[10:20]), sorted(rows[20:30]))
    # With only the vague caption, or an unsure scorer, there is no control.
    assert draw_controls(images, [["vague"]] * 40, encode, 2, rows=rows) == []
    assert draw_controls(images, captions, encode, 2, rows=rows, logit_scale=1.0) == []


@pytest.mark.parametrize(("sets", "systems", "size"), [(500, 3, 100), (41, 2, 10), (1, 1, 1)])
def test_blocks_hold_every_pair_once(sets, systems, size):
    blocks = deal_blocks(sets, systems, size, random.Random(0))
    if (sets, systems, size) == (500, 3, 100):
        assert [len(block) for block in blocks] == [100] * 15  # the paper's design
        assert all(20 < Counter(k for _, k in block)[0] < 50 for block in blocks)
    assert sorted(pair for block in blocks for pair in block) == [(s, k) for s in range(sets) for k in range(systems)]
    for block in blocks:
        assert len(block) <= size
        assert len({s for s, _ in block}) == len(block)
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert blocks == deal_blocks(sets, systems, size, random.Random(0))
    if sets > 1:
        assert blocks != deal_blocks(sets, systems, size, random.Random(1))


def a_study(kind="retrieval", seed=0):
    ids = [f"i{n}" for n in range(120)]
    captions = {"A": [f"a{n}" for n in range(6)], "B": [f"b{n}" for n in range(6)]}
    if kind == "retrieval":
        sets = [ids[n : n + 10] for n in range(0, 60, 10)]
        controls = [(ids[n : n + 10], f"c{n}") for n in range(60, 120, 10)]
        parts = retrieval_parts(sets, captions, controls, block_size=6, seed=seed)
    else:
        parts = rating_parts(ids[:6], captions, num_raters=3, seed=seed)
    return key_of(kind, captions, parts, set_size=10)


def key_of(kind, systems, parts, **settings):
    key = {"format": KEY_FORMAT, "kind": kind, "systems": list(systems), "settings": settings, "parts": parts}
    return {**key, "fingerprint": study_fingerprint(key)}


def test_retrieval_questions():
    key = a_study()
    assert key == a_study()
    assert key["fingerprint"] != a_study(seed=1)["fingerprint"]
    assert list(key["parts"]) == ["block-1", "block-2"]
    ids = [q["id"] for questions in key["parts"].values() for q in questions]
    assert len(set(ids)) == len(ids) == 22
    for questions in key["parts"].values():
        assert sum(q["system"] is None for q in questions) == 5
        shown = [image for q in questions for image in q["images"]]
        assert len(set(shown)) == len(shown)
        for q in questions:
            start = int(q["images"][q["right"] - 1][1:])
            assert q["group"] == (f"set-{start // 10}" if q["system"] else f"control-{(start - 60) // 10}")
            assert q["caption"] == (f"{q['system'].lower()}{start // 10}" if q["system"] else f"c{start}")
            assert sorted(q["images"]) == sorted(f"i{n}" for n in range(start, start + 10))
    places = Counter(q["right"] for seed in range(20) for part in a_study(seed=seed)["parts"].values() for q in part)
    assert min(places[n] for n in range(1, 11)) > 20  # of 440: the position does not reveal the target


def test_rating_pages():
    key = a_study("rating")
    pages = list(key["parts"].values())
    assert len(pages) == 3
    for page in pages:
        assert sorted(q["id"] for q in page) == sorted(q["id"] for q in pages[0])
        # The two captions of an image follow each other.
        assert [a["group"] == b["group"] for a, b in zip(page[::2], page[1::2], strict=True)] == [True] * 6
    orders = {tuple(q["id"] for q in page) for page in pages}
    assert len(orders) == 3
    first = Counter(page[0]["system"] for seed in range(30) for page in a_study("rating", seed)["parts"].values())
    assert min(first.values()) > 25


def answers_of(key, part, participant, *, choose=lambda q: [q.get("right", 3)], count=None, **more):
    """Answers as the page downloads them."""
    value = {"format": ANSWERS_FORMAT, "study": key["fingerprint"], "part": part, "participant": participant}
    value |= {"started": "2026-01-02T03:04:05.678Z", "exported": "2026-01-02T04:04:05.678Z"}
    answers = [{"question": q["id"], "values": choose(q), "ms": 2500} for q in key["parts"][part][:count]]
    value |= {"answers": answers, **more}
    return {**value, "checksum": answers_checksum(value)}


def written(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_which_answers_count(tmp_path):
    key = a_study()
    other = a_study(seed=9)
    good = answers_of(key, "block-1", "p1")
    edited = json.loads(json.dumps(answers_of(key, "block-1", "p2")))
    edited["answers"][0]["values"][0] = edited["answers"][0]["values"][0] % 10 + 1
    files = {
        "a-good": good,
        "b-again": {**good},
        "c-edited": edited,
        "d-other": answers_of(other, "block-1", "p3"),
        "e-incomplete": answers_of(key, "block-2", "p4", count=3),
        "f-once": answers_of(key, "block-2", "p5"),
        "g-twice": answers_of(key, "block-2", "p5", started="2026-02-02T03:04:05.678Z"),
        "h-text": "what is this",
        "i-else": {"some": "thing"},
        "j-second": answers_of(key, "block-2", "p1"),
        "k-deep": "[" * 100_000,
    }
    for name, value in files.items():
        written(tmp_path / f"{name}.json", value)
    (tmp_path / "notes.txt").write_text("not looked at")
    found, rejected = collect_answers([tmp_path], key)
    assert [(a.participant, a.part) for a in found] == [("p1", "block-1"), ("p1", "block-2")]
    reasons = {entry["file"]: entry["reason"] for entry in rejected}
    wanted = {
        "b-again.json": "another download of the same answers of p1",
        "c-edited.json": "edited or damaged",
        "d-other.json": f"answers of another study, '{other['fingerprint']}'",
        "e-incomplete.json": "p4 answered 3 of 11 questions",
        "f-once.json": "p5 attempted block-2 more than once",
        "g-twice.json": "p5 attempted block-2 more than once",
        "h-text.json": "not JSON",
        "i-else.json": "not a file with the format",
        "k-deep.json": "not JSON",
    }
    assert set(reasons) == set(wanted)
    for name, reason in wanted.items():
        assert reason in reasons[name]
    found, _ = collect_answers([tmp_path], key, allow_incomplete=True)
    assert [(a.participant, len(a.values)) for a in found] == [("p1", 11), ("p1", 11), ("p4", 3)]
    # One file named twice is one file.
    found, rejected = collect_answers([tmp_path / "a-good.json", tmp_path / ".." / tmp_path.name / "a-good.json"], key)
    assert (len(found), rejected) == (1, [])


def test_edited_answers_are_refused(tmp_path):
    key = a_study()
    good = {"question": key["parts"]["block-1"][0]["id"], "values": [1], "ms": 1}
    for change in (
        {"part": "block-9"},
        {"participant": "me@example.test"},
        {"started": "yesterday"},
        {"answers": {}},
        {"answers": [good | {"question": "q0"}]},
        *({"answers": [good | {"values": values}]} for values in (1, [11], [True], [1, 2])),
        *({"answers": [good | {"ms": ms}]} for ms in (-1, 10**400)),
        {"answers": [good] * 2},
        {"checksum": "00000000"},
    ):
        path = written(tmp_path / "a.json", answers_of(key, "block-1", "p") | change)
        with pytest.raises(ValueError, match=next(iter(change)).removesuffix("s")):
            read_answers(path, key)


def test_rating_several_pages_does_not_count(tmp_path):
    key = a_study("rating")
    for part, name in (("rater-1", "p"), ("rater-2", "p"), ("rater-3", "q")):
        written(tmp_path / f"{part}.json", answers_of(key, part, name, choose=lambda q: [1, 2, 3]))
    found, rejected = collect_answers([tmp_path], key)
    assert [a.participant for a in found] == ["q"]
    assert ["on several pages: rater-1, rater-2" in entry["reason"] for entry in rejected] == [True, True]
    with pytest.raises(ValueError, match="3 whole numbers from 1 to 5"):
        read_answers(written(tmp_path / "a.json", answers_of(key, "rater-1", "r", choose=lambda q: [1, 2, 6])), key)


def test_edited_keys_are_refused(tmp_path):
    key = a_study()
    written(tmp_path / "key.json", key)
    assert read_key(tmp_path) == key
    key["parts"]["block-1"][0]["right"] = key["parts"]["block-1"][0]["right"] % 10 + 1
    for value, said in ((key, "was changed after it was written"), ("{}", r"key\.json"), ("{", r"key\.json")):
        written(tmp_path / "key.json", value)
        with pytest.raises(ValueError, match=said):
            read_key(tmp_path)
    (tmp_path / "key.json").unlink()
    for read, said in (
        (lambda: read_key(tmp_path), r"key\.json"),
        (lambda: collect_answers([tmp_path / "x"], key), "x"),
    ):
        with pytest.raises(FileNotFoundError, match=said):
            read()
    with pytest.raises(ValueError, match=r"no \.json file"):
        collect_answers([tmp_path], key)


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

HOSTILE = (
    "a </script><script>document.title='caught'</script><img src=x onerror=\"document.title='caught'\"> & 'dog' \u202e"
)


def pictures(ids):
    """One colour per image, so that wrong images are detected."""
    return {i: Image.new("RGB", (8, 8), (37 * n % 256, 101 * n % 256, 59 * n % 256)) for n, i in enumerate(ids)}


def write_study(folder, key, images, **more):
    pages = {}
    for part, questions in key["parts"].items():
        pages[part] = folder / f"{part}.html"
        more |= {"study": key["fingerprint"], "part": part}
        html = render_study_page(key["kind"], questions, images.__getitem__, **more)
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
    key = key_of("retrieval", captions, parts, set_size=10)
    more = {"example": ("an example", ids[300:], 4), "consent": "One.\nTwo."}
    return write_study(tmp_path_factory.mktemp("retrieval"), key, pictures(ids), **more)


@pytest.fixture(scope="module")
def rating(tmp_path_factory):
    ids = [f"SECRET-{n}" for n in range(3)]
    captions = {"SYSTEM-A": ["a dog", "a cat", "a cow"], "SYSTEM-B": [HOSTILE] * 3}
    key = key_of("rating", captions, rating_parts(ids, captions, num_raters=2, seed=1))
    return write_study(tmp_path_factory.mktemp("rating"), key, pictures(ids))


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


def press(browser, questions, choose):
    for question in questions:
        for value in choose(question):
            browser.key(str(value % 10))
        browser.key("Enter")


def play(browser, study, part, participant, choose, folder):
    """Answer a whole page with the keyboard, and download the file."""
    key, pages = study
    start(browser, pages[part], participant)
    press(browser, key["parts"][part], choose)
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


def test_page_holds_the_questions_and_not_the_key(retrieval, rating):
    for key, pages in (retrieval, rating):
        for part, page in pages.items():
            html = page.read_text(encoding="utf-8")
            data = json.loads(re.search(r'"application/json" id="data">(.*?)</script>', html, re.S).group(1))
            assert [set(q) for q in data["questions"]] == [{"id", "caption", "images"}] * len(data["questions"])
            assert [q["id"] for q in data["questions"]] == [q["id"] for q in key["parts"][part]]
            for word in ("SECRET", "SYSTEM", "set-", "control-", '"right"'):
                assert word not in html.replace("control caption", "")
            assert "SECRET" in json.dumps(key)  # the search would find it
            policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1)
            assert "default-src 'none'; img-src data:;" in policy
            assert not re.findall(r"(?:src|href)=\"(?!data:)", html)


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
    press(browser, key["parts"]["block-1"][:7], perfect)
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
    press(browser, key["parts"]["block-1"][7:], perfect)
    browser.click("#download")
    last = saved(browser, "block-1", "stops").rename(tmp_path / "last.json")
    answers, rejected = collect_answers([tmp_path], key)
    assert [found.path for found in answers] == [last]
    assert [entry["file"] for entry in rejected] == ["first.json"]
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


def radios(browser):
    """Names of the choices for screen readers; every other control has one, too."""
    found = {}
    for node in browser.call("Accessibility.getFullAXTree")["nodes"]:
        found.setdefault(node.get("role", {}).get("value"), []).append(node.get("name", {}).get("value"))
    assert all(name for role in ("button", "textbox", "progressbar") for name in found.get(role, ()))
    return found["radio"]


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
    press(browser, range(place), lambda _: [1])
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
    assert radios(browser) == [f"Image {n}" for n in range(1, 11)]
    key, pages = rating
    start(browser, pages["rater-1"], "keys")
    assert radios(browser) == ["1 terrible", "2 poor", "3 fair", "4 good", "5 excellent"] * 3
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


def test_tables_escape_names_of_participants_and_systems():
    """In HTML, tests/security/test_pages.py looks at them in a browser."""
    row = {"name": "<b>A|B</b>", "descriptiveness": 3.0, "accuracy": 4.0, "fluency": 5.0, "f1": 3.4, "ratings": 2}
    alpha = {"measure": "fluency", "level": "ordinal", "alpha": None, "alpha_reason": "r", "units": 0, "people": 0}
    result = {"kind": "rating", "study": "s", "signature": "x", "rows": [row], "paired": [], "agreement": [alpha]}
    result |= {"participants": [{"participant": "p", "answers": 2}], "dropped": [], "rejected": []}
    markdown = study_markdown(result)
    assert r"\<b\>A\|B\</b\>" in markdown
    assert "not run: r" in markdown
    del row["f1"]
    with pytest.raises(ValueError, match="no f1"):
        study_html(result)
