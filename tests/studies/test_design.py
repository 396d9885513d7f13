"""Questions of human studies, and which answers count."""

import json
import random
from collections import Counter

import pytest
import torch

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
    retrieval_parts,
    study_fingerprint,
)
from tests.tolerances import resolution


@pytest.fixture
def features():
    return torch.randn(200, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("limit", [0.5, 0.8, 1.0])
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


def test_too_few_images_for_all_sets(features):
    assert 10 < len(draw_sets(features, 500)) <= 20
    assert draw_sets(features, 5, max_similarity=-0.9) == []
    with pytest.raises(ValueError, match="set_size is 1"):
        draw_sets(features, 5, set_size=1)
    with pytest.raises(ValueError, match="max_similarity is 80"):
        draw_sets(features, 5, max_similarity=80)


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


@pytest.mark.parametrize(("sets", "systems", "size"), [(500, 3, 100), (7, 3, 100), (41, 2, 10), (1, 1, 1)])
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
    with pytest.raises(ValueError, match="at least 1"):
        deal_blocks(0, 1, 1, random.Random(0))


def a_study(kind="retrieval", seed=0):
    ids = [f"i{n}" for n in range(120)]
    if kind == "retrieval":
        sets = [ids[n : n + 10] for n in range(0, 60, 10)]
        controls = [(ids[n : n + 10], f"c{n}") for n in range(60, 120, 10)]
        captions = {"A": [f"a{n}" for n in range(6)], "B": [f"b{n}" for n in range(6)]}
        parts = retrieval_parts(sets, captions, controls, block_size=6, seed=seed)
    else:
        captions = {"A": [f"a{n}" for n in range(6)], "B": [f"b{n}" for n in range(6)]}
        parts = rating_parts(ids[:6], captions, num_raters=3, seed=seed)
    key = {"format": KEY_FORMAT, "kind": kind, "systems": ["A", "B"], "settings": {"set_size": 10}, "parts": parts}
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
    with pytest.raises(ValueError, match="There are 1 controls"):
        retrieval_parts([["a", "b"]], {"A": ["x"]}, [(["c", "d"], "y")])
    with pytest.raises(ValueError, match="2 captions for 1 sets"):
        retrieval_parts([["a", "b"]], {"A": ["x", "y"]}, [], controls_per_block=0)


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
    with pytest.raises(ValueError, match="num_raters is 0"):
        rating_parts(["a"], {"A": ["x"]}, num_raters=0)
    with pytest.raises(ValueError, match="2 captions for 1 images"):
        rating_parts(["a"], {"A": ["x", "y"]})


def answers_of(key, part, participant, *, choose=lambda q: [q.get("right", 3)], count=None, **more):
    value = {
        "format": ANSWERS_FORMAT,
        "study": key["fingerprint"],
        "part": part,
        "participant": participant,
        "started": "2026-01-02T03:04:05.678Z",
        "exported": "2026-01-02T04:04:05.678Z",
        "answers": [{"question": q["id"], "values": choose(q), "ms": 1500} for q in key["parts"][part][:count]],
        **more,
    }
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
        "i-else.json": "not a file of answers",
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": "block-9"}, "the page is 'block-9'"),
        ({"participant": "me@example.test"}, "the participant is"),
        ({"participant": 7}, "the participant is"),
        ({"started": "yesterday"}, "must be times"),
        ({"answers": {}}, "answer 1 is not valid"),
        ({"answers": [{"question": "q0", "values": [1], "ms": 1}]}, "which block-1 does not ask"),
        ({"answers": [{"question": "FIRST", "values": [11], "ms": 1}]}, "1 whole numbers from 1 to 10"),
        ({"answers": [{"question": "FIRST", "values": [True], "ms": 1}]}, "1 whole numbers from 1 to 10"),
        ({"answers": [{"question": "FIRST", "values": [1, 2], "ms": 1}]}, "1 whole numbers from 1 to 10"),
        ({"answers": [{"question": "FIRST", "values": [1], "ms": -1}]}, "answer 1 is not valid"),
        ({"answers": [{"question": "FIRST", "values": [1], "ms": 1}] * 2}, "answered twice"),
        ({"checksum": "00000000"}, "the checksum does not match"),
    ],
)
def test_edited_answers_are_refused(change, message, tmp_path):
    key = a_study()
    first = key["parts"]["block-1"][0]["id"]
    value = {**answers_of(key, "block-1", "p"), **json.loads(json.dumps(change).replace("FIRST", first))}
    with pytest.raises(ValueError, match=message):
        read_answers(written(tmp_path / "a.json", value), key)


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
    written(tmp_path / "key.json", key)
    with pytest.raises(ValueError, match="was changed after it was written"):
        read_key(tmp_path)
    written(tmp_path / "key.json", "{}")
    with pytest.raises(ValueError, match="is not a 'captionrl study key"):
        read_key(tmp_path)
    written(tmp_path / "key.json", "{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_key(tmp_path)
    (tmp_path / "key.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"There is no key\.json"):
        read_key(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        collect_answers([tmp_path / "nothing"], key)
    with pytest.raises(ValueError, match=r"no \.json file"):
        collect_answers([tmp_path], key)
