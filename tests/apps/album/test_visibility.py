"""`--audit` and `--why`: numbers by hand, constructed albums and bags of the embedded world, photographs, bad input."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.phrases import GroupFacts, phrases_of, says, without_phrase
from hf_captionrl.apps.album.sources import saved_again
from hf_captionrl.apps.album.visibility import (
    CELLS,
    FALSE_ALARMS,
    MIN_COSINE,
    MIN_REFERENCES,
    PhrasePool,
    audit_phrase,
    audit_phrases,
    directions,
    explain_bag,
)
from hf_captionrl.cli import main
from hf_captionrl.metrics.bootstrap import exact_interval
from hf_captionrl.scenes import load_scenes
from hf_captionrl.scenes.dataset import scene_stream
from hf_captionrl.scenes.grammar import write_sentence
from hf_captionrl.scenes.render import render_scene
from hf_captionrl.scenes.truth_checker import check
from tests.apps.album.conftest import Axes, picture, write_images, write_rows
from tests.browser import CHROMIUM, Browser

PHOTOGRAPHS = Path(__file__).parents[2] / "photographs" / "images"

# --- Evidence and verdicts by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caption", "phrase", "rest"),
    [
        ("a dog in the rain", "the rain", "a dog"),
        ("a small dog on a sofa", "dog", "a small on a sofa"),  # also without its noun
        ("1girl, red hair, solo", "red hair", "1girl, solo"),
        ("a dog", "cat", "a dog"),
        ("a dog", "a dog", "a dog"),  # nothing would be left
        ("hot dogs", "dog", "hot dogs"),  # another word
    ],
)
def test_captions_without_a_phrase(caption, phrase, rest):
    assert without_phrase(caption, phrase) == rest
    assert says(caption, phrase) == (rest != caption or phrase == caption)


def test_phrases_of_a_caption():
    assert phrases_of("two red pigs, at night", 2) == {"two", "red", "pigs", "night", "two red", "red pigs"}


def test_a_direction_is_the_mean_difference_of_captions_with_and_without_the_phrase():
    def features(texts):
        return torch.tensor([[float(len(text)), float(text.count("a"))] for text in texts])

    carriers = {"red sofa": ["a cat on a red sofa", "a cat on a red sofa", "dogs on red sofa"], "cat": ["cat"]}
    found = directions(carriers, features)
    # Without the phrase: "a cat", "dogs"; each caption counts once, and "cat" alone has no rest.
    assert list(found) == ["red sofa"]
    assert torch.equal(found["red sofa"], torch.tensor([(14 + 12) / 2, (2 + 1) / 2]))
    assert directions({}, features) == {}
    # At most 16 captions, from the first to the last.
    many = directions({"sofa": [f"a {'x' * n} on sofa" for n in range(1, 32)]}, features)
    assert many["sofa"][0] == len(" on sofa")


REFERENCES = np.arange(100.0)  # the conformal quantile is the 96th value of 100, 95; the median 49.5


def audited(said, unsaid, references=REFERENCES):
    """The audit of images with evidence `said`, whose captions say the phrase, and `unsaid`."""
    evidence = np.array([*said, *unsaid], float)
    return audit_phrase(evidence, np.arange(len(evidence)) < len(said), references, group="g", phrase="p")


@pytest.mark.parametrize(
    ("said", "unsaid", "verdict"),
    [
        ([200] * 20, [], "in all"),
        ([200] * 19 + [0], [], "in all"),  # 1 of 20 is not above 5 %
        ([200] * 10 + [0] * 10, [], "careless"),
        ([200] * 14, [200] * 6, "omitted"),
        ([200] * 20, [200], "in all"),  # 1 of 1 shows nothing
        ([200] * 14, [0] * 6, "as said"),
        ([200] * 10 + [0] * 5, [200] * 5, "careless and omitted"),
        ([0] * 20, [], "cannot tell"),  # visible nowhere is what chance gives
        ([200] + [0] * 19, [], "cannot tell"),
        ([200] * 9 + [70] * 11, [], "cannot tell"),  # most are unclear
        ([200] * 10 + [70] * 10, [], "in all"),
    ],
)
def test_verdicts(said, unsaid, verdict):
    found = audited(said, unsaid)
    assert (found.verdict, found.group, found.phrase) == (verdict, "g", "p")
    assert bool(found.reason) == (verdict == "cannot tell")
    assert sorted(row for rows in found.cells.values() for row in rows) == list(range(len(said) + len(unsaid)))
    assert found.visible[1:] == exact_interval(sum(x > 95 for x in said + unsaid), len(said) + len(unsaid))


def test_cells_at_the_thresholds():
    found = audited([95, 95.5, 49.5, 50], [49, 96])
    assert found.cells == {
        "said_visible": [1],
        "said_absent": [2],
        "said_unclear": [0, 3],
        "unsaid_visible": [5],
        "unsaid_absent": [4],
        "unsaid_unclear": [],
    }
    assert set(found.cells) == set(CELLS)


def test_too_few_references():
    found = audited([200] * 20, [], REFERENCES[: MIN_REFERENCES - 1])
    assert (found.verdict, found.references, found.false_alarms) == ("cannot tell", 39, None)
    assert len(found.cells["said_unclear"]) == 20
    assert audited([200] * 20, [], REFERENCES[:MIN_REFERENCES]).verdict == "in all"


def test_images_without_the_phrase_are_called_visible_in_at_most_5_percent():
    rng = np.random.default_rng(0)
    alarms, measured, trials = 0, 0.0, 400
    for _ in range(trials):
        references = rng.standard_normal(59) ** 3  # skewed and heavy-tailed: the rule assumes no distribution
        found = audited(rng.standard_normal(20) ** 3, [], references)
        alarms += len(found.cells["said_visible"])
        measured += found.false_alarms[0] / trials
    assert exact_interval(alarms, 20 * trials)[0] <= FALSE_ALARMS
    assert alarms / (20 * trials) > 0.02
    assert measured == pytest.approx(alarms / (20 * trials), abs=0.02)


# --- Constructed albums of the embedded world, whose truth is known --------------------------------------------------

SHARED = [
    ("weather", "rain", "the rain"),
    ("weather", "snow", "the snow"),
    ("time", "night", "night"),
    ("pattern", "striped", "striped"),
    ("position", "top", "the top"),
    ("size", "small", "small"),
    ("colour", "red", "red"),
    ("orientation", "sideways", "sideways"),
    ("background", "blue", "blue background"),  # the scorer knows these two badly
    ("second", "book", "book"),
]
SIZE, NUM_REFERENCES, ALBUMS = 24, 60, 6


@pytest.fixture(scope="module")
def world(scorer):
    """Scenes with independent facts, and their features."""
    stream = scene_stream(1)
    pool = [next(stream) for _ in range(700)]
    return pool, scorer.image_features([render_scene(scene) for scene in pool])


def caption(rng, scene, attribute, value, is_said):
    """A caption with half of the facts, and with the value or without the attribute."""
    said = {
        n: v if n == "kind" or (v != "upright" and rng.random() < 0.5) else ""
        for n, v in scene.facts.to_dict().items()
    }
    said |= {"count": said["count"] or 0, "several": False}
    if not said["second"]:
        said |= {"relation": "", "second_colour": ""}
    if attribute is None:  # a word that means nothing
        first, _, rest = write_sentence(said).partition(" ")
        return f"{first} {value} {rest}" if is_said else f"{first} {rest}"
    return write_sentence(said | {attribute: value if is_said else ""})


def album_of(world, scorer, seed, attribute, value, phrase, design):
    """The audit of one constructed album, and whether each image shows the phrase."""
    pool, features = world
    rng = np.random.default_rng(seed)
    has = np.array([attribute is not None and getattr(scene.facts, attribute) == value for scene in pool])
    other = np.array([scene.facts.kind == value for scene in pool])  # shows a book, but not as the second thing
    yes, no = (rng.permutation(np.flatnonzero(mask & ~other)).tolist() for mask in (has, ~has))
    references, no = no[:NUM_REFERENCES], no[NUM_REFERENCES:]
    third = SIZE // 3
    rows, said = {
        "in all": (yes[:SIZE], [True] * SIZE),
        "careless": (yes[: SIZE // 2] + no[: SIZE // 2], [True] * SIZE),
        "omitted": (yes[:SIZE], [True] * (SIZE - third) + [False] * third),
        "as said": (yes[: SIZE - third] + no[:third], [True] * (SIZE - third) + [False] * third),
        "shuffled": (no[:SIZE], [True] * SIZE),  # captions of other images
    }[design]
    texts = [[caption(rng, pool[row], attribute, value, one)] for row, one in zip(rows, said, strict=True)]
    texts += [[caption(rng, pool[row], attribute, value, False)] for row in references]
    groups = ["set"] * len(rows) + ["others"] * len(references)
    shared = [GroupFacts("set", len(rows), (phrase,), ())]
    every = rows + references
    [found] = audit_phrases(shared, range(len(every)), groups, texts, features[every], scorer.text_features)
    return found, has[rows]


DESIGNS = ("in all", "careless", "omitted", "as said")


@pytest.fixture(scope="module")
def audits(world, scorer):
    """Six albums of each phrase and design."""
    return {
        (phrase, design, seed): album_of(world, scorer, seed, attribute, value, phrase, design)
        for attribute, value, phrase in SHARED
        for design in (*DESIGNS, "shuffled")
        for seed in range(ALBUMS)
    }


def test_verdicts_on_constructed_albums(audits):
    table = Counter((design, found.verdict) for (_, design, _), (found, _) in audits.items())
    print(table)
    for design in DESIGNS:
        decided = ALBUMS * len(SHARED) - table[design, "cannot tell"]
        low, high = exact_interval(table[design, design], decided)
        print(f"{design}: {table[design, design]} of {decided} [{low:.2f}, {high:.2f}]")
        assert decided >= 0.75 * ALBUMS * len(SHARED)
        assert low > 0.7
    # On shuffled images, a verdict is a false alarm.
    number = ALBUMS * len(SHARED)
    assert exact_interval(number - table["shuffled", "cannot tell"], number)[0] <= FALSE_ALARMS


def test_confusion_matrix_of_constructed_albums(audits):
    """2 x 2: shown or not, by visible or absent, over the albums that get a verdict."""
    cells: Counter = Counter()
    alarms = references = 0
    for (_, design, _), (found, shown) in audits.items():
        if design == "shuffled" or found.verdict == "cannot tell":
            continue
        for name, rows in found.cells.items():
            cells.update((bool(shown[row]), name.partition("_")[2]) for row in rows)
        alarms += round(found.false_alarms[0] * found.references)
        references += found.references
    print(cells, alarms, references)
    visible, absent = (
        (cells[True, "visible"], cells[False, "visible"]),
        (cells[True, "absent"], cells[False, "absent"]),
    )
    assert exact_interval(visible[0], sum(visible))[0] > 0.95
    assert exact_interval(absent[1], sum(absent))[0] > 0.9
    unclear = cells[True, "unclear"] + cells[False, "unclear"]
    assert unclear < 0.25 * sum(cells.values())
    assert exact_interval(alarms, references)[0] <= FALSE_ALARMS


def test_phrases_that_the_scorer_does_not_know_get_no_verdict(world, scorer):
    words = ["zorbic", "plaid", "lovely", "wooden", "blurry", "happy"]
    verdicts = [album_of(world, scorer, s, None, word, word, "shuffled")[0].verdict for word in words for s in (0, 1)]
    assert verdicts.count("cannot tell") >= 11


def test_groups_that_share_the_phrase_are_no_references(world, scorer):
    """Their images may show it where their captions omit it."""
    pool, features = world
    rng = np.random.default_rng(0)
    rain = [row for row, scene in enumerate(pool) if scene.facts.weather == "rain"]
    clear = [row for row, scene in enumerate(pool) if not scene.facts.weather]
    rows = rain[:SIZE] + rain[SIZE : 3 * SIZE] + clear[:NUM_REFERENCES]
    groups = ["a"] * SIZE + ["b"] * 2 * SIZE + ["c"] * NUM_REFERENCES
    says_it = [True] * SIZE + [True, False] * SIZE + [False] * NUM_REFERENCES
    texts = [[caption(rng, pool[row], "weather", "rain", one)] for row, one in zip(rows, says_it, strict=True)]
    facts = [GroupFacts("a", SIZE, ("the rain",), ()), GroupFacts("b", 2 * SIZE, ("rain",), ())]
    found = audit_phrases(facts, range(len(rows)), groups, texts, features[rows], scorer.text_features)
    assert [(one.verdict, one.references) for one in found] == [("in all", 60), ("omitted", 60)]
    # Without the knowledge of the second group, its omissions make the scorer unable to tell.
    [alone] = audit_phrases(facts[:1], range(len(rows)), groups, texts, features[rows], scorer.text_features)
    assert (alone.verdict, alone.references) == ("cannot tell", 84)


def test_a_phrase_that_is_the_whole_caption_gets_no_verdict(scorer):
    texts = [["the rain"]] * 3 + [["a dog"]] * 50
    groups = ["a"] * 3 + ["b"] * 50
    [found] = audit_phrases(
        [GroupFacts("a", 3, ("the rain",), ())], range(53), groups, texts, torch.eye(64)[:53], scorer.text_features
    )
    assert (found.phrase, found.verdict, found.false_alarms) == ("the rain", "cannot tell", None)
    assert "without it" in found.reason


# --- The command -----------------------------------------------------------------------------------------------------

SCORER = ["--scorer", "scenes:siglip-held-out", "--cache_dir", "cache"]


@pytest.fixture
def folders(tmp_path, monkeypatch, world):
    """Folders `half`, in which half of the images show the rain that all captions name, and `others`; captions.jsonl."""
    monkeypatch.chdir(tmp_path)
    pool, rng = world[0], np.random.default_rng(0)
    rain = [scene for scene in pool if scene.facts.weather == "rain"]
    clear = [scene for scene in pool if not scene.facts.weather]
    scenes = {"half": rain[:10] + clear[:10], "others": clear[10:60]}
    rows = []
    for name, mine in scenes.items():
        files = [f"{name}/{number:02d}.png" for number in range(len(mine))]
        write_images(map(render_scene, mine), files)
        texts = [caption(rng, scene, "weather", "rain", name == "half") for scene in mine]
        rows += [{"image_id": file, "caption": text} for file, text in zip(files, texts, strict=True)]
    write_rows("captions.jsonl", rows)
    return tmp_path


def test_the_audit_of_a_folder(folders, capsys):
    command = ["album", "photos", "--captions", "captions.jsonl", "--audit", *SCORER, "--output", "o.html", "o.jsonl"]
    assert main([*command, "--json"]) == 0
    [found] = [one for one in json.loads(capsys.readouterr().out)["audit"] if one["group"] == "half"]
    assert (found["phrase"], found["verdict"], found["references"]) == ("the rain", "careless", 50)
    absent = found["cells"]["said_absent"]
    assert absent
    assert set(absent) <= {f"half/{number:02d}.png" for number in range(10, 20)}
    shown = {f"half/{number:02d}.png" for number in range(10)}
    assert len(shown & set(found["cells"]["said_visible"])) >= 8
    page = Path("o.html").read_text(encoding="utf-8")
    counts = dict(re.findall(r'data-cell="(\w+)"><b>(\d+)</b>', page))
    assert counts == {name: str(len(rows)) for name, rows in found["cells"].items()}
    assert f'alt="{absent[0]}"' in page
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"'the rain' in 'half': careless. Said: {counts['said_visible']} visible, {len(absent)} absent" in said


def test_reference_images_of_another_folder(folders, capsys):
    command = ["album", "photos/half", "--captions", "half.jsonl", "--audit", *SCORER, "--json"]
    lines = Path("captions.jsonl").read_text().replace("half/", "").splitlines()[:20]
    Path("half.jsonl").write_text("\n".join(lines) + "\n")
    assert main(command) == 0
    [found] = json.loads(capsys.readouterr().out)["audit"]
    assert (found["verdict"], found["references"]) == ("cannot tell", 0)
    assert "40 are needed" in found["reason"]
    assert main([*command, "--audit_references", "photos/others"]) == 0
    [found] = json.loads(capsys.readouterr().out)["audit"]
    assert (found["verdict"], found["references"]) == ("careless", 50)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_pages_in_a_browser(folders):
    command = ["album", "photos", "--captions", "captions.jsonl", *SCORER, "--audit", "--output", "o.html"]
    assert main([*command, "--why", "half/00.png", "half/10.png"]) == 0
    with Browser() as page:
        page.open(Path("o.html").absolute().as_uri())
        assert page.problems() == []
        assert page.pale() == []
        page.phone()
        page.open(Path("o.html").absolute().as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--audit", "--drop_shared"], "audit"),
        (["--audit", "--trigger", "x"], "audit"),
        (["--audit_references", "photos"], "--audit_references"),
        (["--why", "half/00.png"], "why"),
        (["--why", "half/00.png", "half/00.png"], "why"),
        (["--why", "half/00.png", "none.png"], "none.png"),
        (["--why_phrases", "a cat"], "why_phrases"),
        (["--why", "half/00.png", "broken.png"], "broken.png"),
    ],
)
def test_bad_input(folders, capsys, arguments, named):
    Path("photos/broken.png").write_bytes(b"no image")
    command = ["album", "photos", "--captions", "captions.jsonl", *SCORER, "--max_images", "3", *arguments]
    assert main(command) == 2
    assert named in capsys.readouterr().err


def test_the_audit_of_photographs_by_a_scorer_that_does_not_know_them(tmp_path, monkeypatch, scorer):
    """The embedded scorer has seen no photograph: whatever their captions share, it cannot tell."""
    photographs = [Image.open(path).convert("RGB") for path in sorted(PHOTOGRAPHS.iterdir())]
    mine, others = photographs[:12], photographs[12:]
    others += [ImageOps.mirror(image) for image in others]
    features = scorer.image_features([*mine, *others])
    groups = ["set"] * len(mine) + ["others"] * len(others)
    verdicts: Counter = Counter()
    for phrase in ("rain", "snow", "night", "small", "red", "striped background", "kitchen", "people", "bicycle"):
        texts = [[f"a picture of a thing {number}, {phrase}"] for number in range(12)] + [["a picture"]] * len(others)
        facts = [GroupFacts("set", 12, (phrase,), ())]
        [found] = audit_phrases(facts, range(len(groups)), groups, texts, features, scorer.text_features)
        verdicts[found.verdict] += 1
    assert verdicts["cannot tell"] >= 8


# --- Why can these not be told apart? --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bags(captioner, scorer):
    """Look-alikes in bags of 7, their facts and features, and 16 sampled captions of each; other scenes than those that `MIN_COSINE`
    was chosen on."""
    rows = load_scenes(num_train=0, num_validation=0, num_test=210)["test"]
    images = list(rows["image"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = {"do_sample": True, "num_beams": 1, "temperature": 0.7, "num_return_sequences": 16}
        texts = []
        for start in range(0, len(images), 30):
            inputs = captioner.encode_images(images[start : start + 30])
            texts += captioner.generate(**inputs, **settings, max_new_tokens=40).captions
    samples = [texts[start : start + 16] for start in range(0, len(texts), 16)]
    return rows["facts"], scorer.image_features(images), samples


def claims(text, phrase, facts):
    """True and false claims that a phrase adds to a caption."""
    with_it, without = check(text, facts), check(without_phrase(text, phrase), facts)
    return tuple(
        {c[:2] for c in getattr(with_it, v)} - {c[:2] for c in getattr(without, v)} for v in ("right", "wrong")
    )


def judged(phrase, carriers, facts, others):
    """The kind of fact that a phrase states, and whether it is true of one image and false of each other one."""
    found: Counter = Counter()
    for text in carriers:
        right, wrong = claims(text, phrase, facts)
        for attribute, value in right | wrong:
            is_right = all((attribute, value) in claims(text, phrase, other)[1] for other in others)
            found[attribute, (attribute, value) in right and is_right] += 1
    # A phrase of several claims is right if one of them is.
    return max(found, key=lambda one: (one[1], found[one])) if found else ("no fact", False)


@pytest.mark.parametrize(("size", "least"), [(2, 0.65), (3, 0.75)])
def test_named_phrases_are_facts_that_differ(bags, scorer, size, least):
    facts, features, samples = bags
    named: Counter = Counter()
    random: list[bool] = []
    answers: Counter = Counter()
    rng = np.random.default_rng(0)
    for start in range(0, 210, 7):
        for first in range(start, start + 8 - size, size):
            bag = list(range(first, first + size))
            pool = PhrasePool([samples[row] for row in bag])
            captions = [samples[row][0] for row in bag]
            carriers = pool.carriers()[0]
            for found in explain_bag(bag, features[bag], captions, pool, scorer.text_features, 0.975):
                answers[found.answer] += 1
                others = [facts[row] for row in bag if row != found.row]
                drawn = sorted(carriers)[rng.integers(len(carriers))]
                random.append(judged(drawn, carriers[drawn][:2], facts[found.row], others)[1])
                if found.phrase:
                    assert found.strength >= MIN_COSINE
                    named[judged(found.phrase, carriers[found.phrase][:8], facts[found.row], others)] += 1
    for kind in ["", *sorted({kind for kind, _ in named})]:
        right, wrong = (
            sum(n for (k, r), n in named.items() if r is is_right and kind in ("", k)) for is_right in (True, False)
        )
        low, high = exact_interval(right, right + wrong)
        print(f"{kind or 'all'}: {right} of {right + wrong} [{low:.2f}, {high:.2f}]")
        assert kind or low > least
    print(answers, f"random phrase {np.mean(random):.2f}")
    assert np.mean(random) < 0.2
    assert answers["near-duplicates"] == 0
    assert answers["train"] >= 20


def test_answers_by_hand():
    """Axes: `image 2` fits image 2; `all` fits every image."""
    scorer = Axes()
    features = scorer.image_features([picture(number) for number in range(3)])
    pool = PhrasePool([["all, image 0", "all"], ["all"], ["all"]])

    def answers(captions, pool=pool, rows=(0, 1, 2), threshold=0.9):
        return explain_bag(rows, features[list(rows)], captions, pool, scorer.text_features, threshold)

    first, second, _ = answers(["all 0", "all", "all"])
    assert (first.answer, first.phrase, first.source, first.said) == ("told apart", "0", "candidates", 0.5)
    assert (second.answer, second.phrase) == ("train", "")
    # A tie counts against the caption.
    assert [one.answer for one in answers(["all", "all", "all"])] == ["train"] * 3
    # Phrases of the user come before captions of other images, and after the captioner's own.
    more = PhrasePool(pool.candidates, ["all, axis 1", "all, sea 0"], ["view 1", "1"])
    found = answers(["all", "all", "all"], more)
    assert [(one.phrase, one.source) for one in found] == [("0", "candidates"), ("view 1", "list"), ("", "")]
    assert answers(["all"] * 3, PhrasePool(pool.candidates, ["all, axis 1"]))[1].source == "neighbours"
    # What the scorer does not separate is not tried.
    [same, _] = answers(["all 0", "all"], rows=(0, 1), threshold=-0.1)
    assert (same.answer, same.phrase) == ("near-duplicates", "")


def test_why_in_an_album(captioner, scorer, scenes):
    images = [*scenes[:3], saved_again(scenes[0])]
    album = describe_album(images, captioner, scorer, num_beams=2, num_samples=6, why=["0", "3", "1"])
    by_row = {one.row: one for one in album.why}
    assert [by_row[row].answer for row in (0, 3)] == ["near-duplicates"] * 2
    assert by_row[1].answer in ("told apart", "train")
    assert album.summary()["why"][0] | {"phrase": "", "cosine": 1} == {
        **dict.fromkeys(("phrase", "source"), ""),
        "row": "0",
        "other": "3",
        "answer": "near-duplicates",
        "cosine": 1,
        "strength": 0.0,
        "said": 0.0,
    }
    assert describe_album(images[:3], captioner, scorer, num_beams=1).why == []
