"""Boosting of rows: questions, resuming, and faulty rows; journals, and the file of all captions.

tests/faults kills it at any call."""

import io
import json

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from hf_captionrl.apps.boosting import boost as boosted_file
from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
from hf_captionrl.apps.boosting.boost import (
    Journal,
    boost_shard,
    journals,
    write_boosted_captions,
)
from hf_captionrl.apps.boosting.prompts import STAGES, blend_prompt, holistic_prompt, visual_prompt
from hf_captionrl.captioners.language_models import BackendError, Failure, Truncated
from hf_captionrl.data import check_captions, load_captions
from hf_captionrl.data.columns import replace_column, undecoded
from tests.apps.boosting.doubles import content, facts_of, pair, scenes


def boost(rows, folder, backends, embed_images=False, **options):
    """The rows that are done, and the file; each prompt is counted by the backends."""
    found = boost_shard(rows, folder, **backends, **options)
    return number_done(found), write_boosted_captions(rows, folder, found, embed_images=embed_images)


def number_done(found):
    return sum(row["quarantine"] is None for row in found)


def asked(backends):
    return len(backends["text"].asked) + len(backends["vision"].asked)


def quarantine(folder):
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def with_image(rows, number, value):
    images = undecoded(rows)["image"][:]
    images[number] = value
    return replace_column(rows, "image", images, datasets.Image())


def test_three_captions_per_row_and_one_parquet_row(tmp_path):
    rows, backends = scenes(), pair(scenes())
    done, merged = boost(rows, tmp_path, backends)
    assert (done, merged.rows, merged.quarantined) == (12, 12, 0)
    assert len(backends["text"].asked) == 24
    assert len(backends["vision"].asked) == 12
    loaded = datasets.load_dataset("parquet", data_files=str(merged.path), cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded["image_id"][:] == rows["image_id"][:]
    assert loaded["references"][:] == rows["captions"][:]

    def by(backend, prompt):  # an oracle without the pipeline: the backends called by hand
        return next(iter(backend.complete([prompt])))[1]

    describer = SceneDescriber(facts_of(rows))
    for row in loaded:
        blend = by(SceneWriter(), blend_prompt(row["image_id"], row["references"]))
        visual = by(describer, visual_prompt(row["image_id"], None))
        prompt = holistic_prompt(row["image_id"], blend, visual)
        assert (row["blend_caption"], row["visual_caption"]) == (blend, visual)
        assert row["captions"] == [row["holistic_caption"]] == [by(SceneWriter(), prompt)]
        assert row["holistic_source"]["prompt_hash"] == prompt.hash
        assert row["visual_source"]["revision"] == describer.revision
        assert row["visual_source"]["time"].endswith("+00:00")
    # The file is a data set of captions, as training reads it.
    options = {"split": "train", "split_fractions": (1, 0, 0)}
    good, report = check_captions(load_captions(str(merged.path), **options))
    assert (len(good), len(report.entries)) == (12, 0)
    assert good[3]["image"].size == scenes()[3]["image"].size
    blends = load_captions(str(merged.path), caption_column="blend_caption", **options)
    assert blends["captions"][0] == [good["blend_caption"][0]]


def test_any_ranges_of_rows_give_the_same_file(tmp_path):
    rows = scenes()
    boost(rows, tmp_path / "one", pair(rows))
    backends = pair(rows)
    boost_shard(rows, tmp_path / "two", rows=range(3, 9), **backends)
    assert asked(backends) == 3 * 6
    # Other ranges of rows: answers of the first run are not asked again.
    parts = [boost_shard(rows, tmp_path / "two", rows=range(i, i + 4), **backends) for i in (0, 4, 8)]
    assert asked(backends) == 3 * 12
    write_boosted_captions(rows, tmp_path / "two", [row for part in parts for row in part])
    assert content(tmp_path / "two/captions.parquet") == content(tmp_path / "one/captions.parquet")
    assert len(journals(tmp_path / "two", range(4))) == 2  # those of rows 0 to 3, and 3 to 8
    # An answer that is lost is asked for again, and no other one.
    (path,) = journals(tmp_path / "one")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:10] + lines[11:]))
    again = pair(rows)
    assert boost(rows, tmp_path / "one", again)[0] == 12
    assert asked(again) == 1


def test_bad_answers_are_retried_and_then_quarantined(tmp_path):
    rows = scenes()
    bad = rows["image_id"][2]
    backends = pair(rows, vision=lambda prompt, text: "" if prompt.image_id == bad else text)
    done, merged = boost(rows, tmp_path, backends, attempts=3)
    assert [attempt for _, image_id, attempt in backends["vision"].asked if image_id == bad] == [0, 1, 2]
    assert (done, merged.quarantined, merged.rows) == (11, 1, 11)
    (entry,) = quarantine(tmp_path)
    assert (entry["row"], entry["image_id"], entry["column"]) == (2, bad, "visual")
    assert (entry["reason"], entry["dropped"]) == ("answer_empty", "row")
    assert entry["detail"]
    assert entry["remedy"]
    # The next run does not ask a fourth time without --retry_quarantined.
    again = pair(rows)
    boost(rows, tmp_path, again)
    assert again["vision"].asked == []
    boost(rows, tmp_path, again, retry_quarantined=True)
    assert [attempt for _, _, attempt in again["vision"].asked] == [3]
    assert quarantine(tmp_path) == []


def test_truncated_answer_is_retried_and_never_published(tmp_path):
    rows = scenes()
    backends = pair(rows, text=lambda prompt, text: text if prompt.attempt else Truncated(text[: len(text) // 2]))
    done, _ = boost(rows, tmp_path / "again", backends)
    assert (done, asked(backends)) == (12, 12 + 2 * 24)  # the second answers are kept, with their attempt
    assert {row["blend_source"]["attempt"] for row in content(tmp_path / "again/captions.parquet")} == {1}
    always = pair(
        rows, vision=lambda prompt, text: Truncated(text) if prompt.image_id == rows[3]["image_id"] else text
    )
    boost(rows, tmp_path / "never", always, attempts=2)
    (entry,) = quarantine(tmp_path / "never")
    assert entry["reason"] == "answer_truncated"
    assert "max_new_tokens" in entry["remedy"]
    # The model started another turn before the limit: the caption is complete.
    chatty = pair(rows, text=lambda prompt, text: Truncated(text + "\n\nUser : Reference"))
    boost(rows, tmp_path / "chatty", chatty)
    assert asked(chatty) == 36


def test_another_vision_model_keeps_the_blend_caps(tmp_path):
    rows = scenes()
    boost(rows, tmp_path, pair(rows))
    other = pair(rows)
    other["vision"].revision = "another"
    other["vision"].model = "/" + "home/me/models/mine/"  # the file may be published
    done, merged = boost(rows, tmp_path, other)
    assert len(other["vision"].asked) == 12
    assert done == 12
    # Equal descriptions give equal questions, so the writer is not asked again.
    assert other["text"].asked == []
    sources = [row["visual_source"] for row in content(merged.path)]
    assert {(source["model"], source["revision"]) for source in sources} == {("mine", "another")}


def test_unreachable_backend_stops_the_run_without_loss(tmp_path):
    rows = scenes()
    dead = pair(rows, vision=lambda prompt, text: Failure("backend_failed", "connection refused"))
    with pytest.raises(BackendError, match="5 times in a row"):
        boost_shard(rows, tmp_path, max_failures=5, **dead)
    with pytest.raises(ValueError, match="All 12 rows"):
        boost(rows, tmp_path, dead, max_failures=99)
    assert {entry["reason"] for entry in quarantine(tmp_path)} == {"backend_failed"}
    assert len(dead["text"].asked) == 12
    again = pair(rows)
    assert boost(rows, tmp_path, again)[0] == 12
    assert [stage for stage, *_ in again["text"].asked] == ["holistic"] * 12
    assert quarantine(tmp_path) == []


def test_broken_image_is_quarantined_and_asked_about_when_repaired(tmp_path):
    whole = undecoded(scenes(40))["image"][7]["bytes"]
    backends = pair(scenes(40))
    for _ in range(2):
        broken = with_image(scenes(40), 7, {"path": None, "bytes": whole[: len(whole) // 2]})
        assert boost(broken, tmp_path, backends, attempts=1)[1].rows == 39
        (entry,) = quarantine(tmp_path)
        assert (entry["row"], entry["column"]) == (7, "visual")
        assert entry["reason"].startswith("image_")
    assert len(backends["text"].asked) == 78
    assert boost(scenes(40), tmp_path, backends, attempts=1)[1].rows == 40
    bad = scenes(40)["image_id"][7]
    assert [attempt for _, image_id, attempt in backends["vision"].asked if image_id == bad] == [0]
    # Rows whose images are all missing cost no request.
    gone = with_image(scenes().select([0]), 0, {"bytes": None, "path": "elsewhere.png"})
    nothing = pair(scenes())
    (row,) = boost_shard(gone, tmp_path / "gone", **nothing)
    assert (json.loads(row["quarantine"])["reason"], asked(nothing)) == ("image_not_found", 0)


TEXT = "half \ud83d of an emoji\u2028and a line"
ENTRY = {"image_id": "1", "stage": "blend", "text": TEXT}
JOURNAL = "journal-000000000-000000004.jsonl"


@pytest.mark.parametrize("line", ["{broken", '{"image_id": "1"}'])
def test_broken_line_in_the_middle_is_named_and_kept(tmp_path, line):
    path = tmp_path / JOURNAL
    text = json.dumps(ENTRY) + f"\n{line}\n" + json.dumps(ENTRY) + "\n"
    path.write_text(text)
    with pytest.raises(ValueError, match="line 2"):
        Journal(tmp_path, range(4))
    assert path.read_text() == text


STRING = datasets.Value("string")
SOURCE = dict.fromkeys(("model", "revision", "prompt_hash", "time"), STRING) | {"attempt": datasets.Value("int32")}
TEXTS = datasets.List(STRING)


def png(number):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (number % 256, 200, 30)).save(file, "PNG")
    return file.getvalue()


def row_of(number):
    """A finished row, as in the shards; every seventh is in quarantine and every fifth has a conflict."""
    bad = json.dumps({"row": number, "reason": "answer_empty"}) if number % 7 == 3 else None
    row = {"row": number, "image_id": f"{number:05d}", "quarantine": bad, "references": [f"a thing {number}", "two"]}
    row |= {"captions": [f"a holistic thing {number}"], "conflicts": ["colour"] if number % 5 == 0 else []}
    for stage in STAGES:
        row[f"{stage}_caption"] = f"{stage} {number} été"
        row[f"{stage}_source"] = dict.fromkeys(("model", "revision", "prompt_hash", "time"), f"{stage}-{number}")
        row[f"{stage}_source"] |= {"attempt": number % 3}
    return row


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """250 rows: images embedded with and without a path, files, and a column of captions that is replaced."""
    folder = tmp_path_factory.mktemp("files")
    images = []
    for number in range(250):
        path = folder / f"{number}.png"
        path.write_bytes(png(number))
        name = None if number % 3 else "/somewhere/else.png"
        images.append({"bytes": png(number), "path": name} if number % 2 else {"bytes": None, "path": str(path)})
    columns = {"image": images, "image_id": [f"{n:05d}" for n in range(250)]}
    columns |= {"captions": [[f"{n}"] for n in range(250)], "split": [n % 100 for n in range(250)]}
    features = {"image": datasets.Image(), "image_id": STRING, "captions": TEXTS, "split": datasets.Value("int8")}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def at_once(dataset, done, embed_images, with_images):
    """The table of a data set that holds all rows, written by `datasets`."""
    file = io.BytesIO()
    rows = dataset.cast_column("image", datasets.Image(decode=False)).select([row["row"] for row in done])
    columns = {"image_id": rows["image_id"][:], "split": rows["split"][:]}
    features = {name: dataset.features[name] for name in columns}
    if with_images:
        features["image"], columns["image"] = datasets.Image(), []
        for image in rows["image"]:
            path, data = image["path"], image["bytes"]
            if data is None and embed_images:
                with open(path, "rb") as source:
                    data = source.read()
            columns["image"].append({"bytes": data, "path": path.split("/")[-1] if data and path else path})
    features |= {"references": TEXTS, "captions": TEXTS, "conflicts": TEXTS}
    for stage in STAGES:
        features |= {f"{stage}_caption": STRING, f"{stage}_source": SOURCE}
    columns |= {name: [row[name] for row in done] for name in features if name not in columns}
    columns = {name: columns[name] for name in features}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(file)
    return pa.parquet.ParquetFile(pa.BufferReader(file.getvalue())).read()


@pytest.mark.parametrize(
    ("embed_images", "with_images", "is_shuffled"), [(False, True, True), (True, True, False), (False, False, True)]
)
def test_blocks_equal_a_file_that_is_written_at_once(
    tmp_path, monkeypatch, mixed, embed_images, with_images, is_shuffled
):
    monkeypatch.setattr(boosted_file, "_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(boosted_file, "_GROUP_BYTES", 20_000)
    dataset = mixed.shuffle(seed=3) if is_shuffled else mixed
    found = [row_of(number) for number in range(250)]
    options = {"embed_images": embed_images, "with_images": with_images}
    written = write_boosted_captions(dataset, tmp_path, iter(found), **options)
    done = [row for row in found if row["row"] % 7 != 3]
    expected = at_once(dataset, done, embed_images, with_images)
    with pa.parquet.ParquetFile(written.path) as file:
        assert file.metadata.num_row_groups > 3
        table = file.read()
    assert table.schema.equals(expected.schema, check_metadata=True)
    assert table.to_pylist() == expected.to_pylist()
    lines = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == list(range(3, 250, 7))
    assert (written.rows, written.quarantined) == (len(done), 250 - len(done))
    assert written.conflicts == sum(row["row"] % 5 == 0 for row in done)
    again = write_boosted_captions(dataset, tmp_path / "again", iter(found), **options)
    assert again.path.read_bytes() == written.path.read_bytes()


def test_error_in_the_middle_keeps_the_old_files(tmp_path, mixed):
    write_boosted_captions(mixed, tmp_path, map(row_of, range(100)))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def broken():
        yield from map(row_of, range(150))
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        write_boosted_captions(mixed, tmp_path, broken())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match="All 250 rows are in quarantine"):
        write_boosted_captions(mixed, tmp_path, [row_of(3)])
    assert (tmp_path / "captions.parquet").read_bytes() == before["captions.parquet"]
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 1
    assert len(list(tmp_path.iterdir())) == 2  # no temporary file
