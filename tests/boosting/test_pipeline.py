"""Boosting of rows: questions, resuming, and faulty rows."""

import json

import datasets
import pytest

from hf_captionrl.apps.boosting import (
    SceneDescriber,
    SceneWriter,
    UnfinishedError,
    boost_shard,
    boosted_rows,
    write_boosted_captions,
)
from hf_captionrl.apps.boosting.boost import journal_name, read_journal
from hf_captionrl.captioners.language_models import BackendError, Failure, Truncated
from hf_captionrl.data import QuarantineError, check_captions, load_captions
from hf_captionrl.data.columns import replace_column, undecoded
from tests.boosting.doubles import content, facts_of, pair, scenes


def write(rows, folder, backends, **options):
    return write_boosted_captions(rows, folder, boosted_rows(rows, folder, **backends), **options)


def boost(rows, folder, backends, **options):
    report = boost_shard(rows, folder, **backends, **options)
    return report, write(rows, folder, backends)


def quarantine(folder):
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def with_image(rows, number, value):
    images = undecoded(rows)["image"][:]
    images[number] = value
    return replace_column(rows, "image", images, datasets.Image())


def test_three_captions_per_row_and_one_parquet_row(tmp_path):
    rows, backends = scenes(), pair(scenes())
    report, merged = boost(rows, tmp_path, backends)
    assert (report.rows, report.done, report.asked, report.quarantined) == (12, 12, 36, 0)
    assert len(backends["text"].asked) == 24
    assert len(backends["vision"].asked) == 12
    loaded = datasets.load_dataset("parquet", data_files=str(merged.path), cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded["image_id"][:] == rows["image_id"][:]
    assert loaded["references"][:] == rows["captions"][:]
    # An oracle without the pipeline: the backends called by hand.
    from hf_captionrl.apps.boosting import blend_prompt, holistic_prompt, visual_prompt

    def by(backend, prompt):
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


def test_result_loads_with_load_captions(tmp_path):
    _, merged = boost(scenes(), tmp_path, pair(scenes()))
    loaded = load_captions(str(merged.path), split="train", split_fractions=(1, 0, 0))
    good, report = check_captions(loaded)
    assert len(good) == 12
    assert not report.entries
    assert good[3]["image"].size == scenes()[3]["image"].size
    blends = load_captions(str(merged.path), split="train", split_fractions=(1, 0, 0), caption_column="blend_caption")
    assert blends["captions"][0] == [good["blend_caption"][0]]


@pytest.mark.parametrize("embed", [True, False])
def test_embedded_images_have_no_local_paths(tmp_path, embed):
    image = undecoded(scenes())["image"][3]
    (tmp_path / "b.png").write_bytes(image["bytes"])
    rows = with_image(scenes(), 3, {"bytes": image["bytes"], "path": "/" + "home/me/private/a.png"})
    rows = with_image(rows, 4, {"bytes": None, "path": str(tmp_path / "b.png")})
    backends = pair(scenes())
    boost_shard(rows, tmp_path, **backends)
    merged = write(rows, tmp_path, backends, embed_images=embed)
    found = undecoded(datasets.Dataset.from_parquet(str(merged.path), cache_dir=str(tmp_path / "cache")))["image"]
    assert found[3] == {"bytes": image["bytes"], "path": "a.png"}
    embedded = {"bytes": image["bytes"], "path": "b.png"}
    assert found[4] == (embedded if embed else {"bytes": None, "path": str(tmp_path / "b.png")})


def test_finished_run_asks_nothing(tmp_path):
    first, second = pair(scenes()), pair(scenes())
    boost(scenes(), tmp_path, first)
    before = content(tmp_path / "captions.parquet")
    report, _ = boost(scenes(), tmp_path, second)
    assert report.resumed == 12
    assert report.asked == 0
    assert second["text"].asked == second["vision"].asked == []
    assert content(tmp_path / "captions.parquet") == before


def test_any_ranges_of_rows_give_the_same_file(tmp_path):
    rows = scenes()
    boost(rows, tmp_path / "one", pair(rows))
    backends = pair(rows)
    boost_shard(rows, tmp_path / "two", rows=range(3, 9), **backends)
    with pytest.raises(UnfinishedError, match="6 of 12 rows"):
        write(rows, tmp_path / "two", backends)
    # Other ranges of rows: answers of the first run are not asked again.
    reports = [boost_shard(rows, tmp_path / "two", rows=range(i, i + 4), **backends) for i in (0, 4, 8)]
    assert sum(report.resumed for report in reports) == 6
    assert len(backends["text"].asked) == 24
    write(rows, tmp_path / "two", backends)
    assert content(tmp_path / "two/captions.parquet") == content(tmp_path / "one/captions.parquet")


def test_blend_cap_is_kept_if_the_vision_model_fails(tmp_path):
    rows = scenes()
    failing = pair(rows, vision=lambda prompt, text: Failure("backend_failed", "overloaded"))
    report = boost_shard(rows, tmp_path, max_failures=99, **failing)
    assert report.done == 0
    assert len(failing["text"].asked) == 12
    with pytest.raises(ValueError, match="All 12 rows"):
        write(rows, tmp_path, failing)
    assert {entry["reason"] for entry in quarantine(tmp_path)} == {"backend_failed"}
    corrected = pair(rows)
    report, _ = boost(rows, tmp_path, corrected)
    assert report.done == 12
    assert [stage for stage, *_ in corrected["text"].asked] == ["holistic"] * 12
    assert quarantine(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "answer_empty"),
        ("I'm sorry, I cannot do that.", "answer_refuses"),
        ("Reference caption 1: a pig", "answer_repeats_prompt"),
        ("Zwei kleine Schweine auf dem Rücken", "answer_not_english"),
        ("a pig and " * 99, "answer_too_long"),
    ],
)
def test_bad_answers_are_retried_and_then_quarantined(tmp_path, answer, reason):
    rows = scenes()
    bad = rows["image_id"][2]
    backends = pair(rows, vision=lambda prompt, text: answer if prompt.image_id == bad else text)
    report, merged = boost(rows, tmp_path, backends, attempts=3)
    assert [attempt for _, image_id, attempt in backends["vision"].asked if image_id == bad] == [0, 1, 2]
    assert (report.done, report.quarantined, merged.rows) == (11, 1, 11)
    (entry,) = quarantine(tmp_path)
    assert (entry["row"], entry["image_id"], entry["column"], entry["reason"]) == (2, bad, "visual", reason)
    assert entry["detail"]
    assert entry["remedy"]
    assert entry["dropped"] == "row"
    # The next run does not ask a fourth time without --retry_quarantined.
    again = pair(rows)
    boost(rows, tmp_path, again)
    assert again["vision"].asked == []
    boost(rows, tmp_path, again, retry_quarantined=True)
    assert [attempt for _, _, attempt in again["vision"].asked] == [3]
    assert quarantine(tmp_path) == []


def test_second_answer_is_kept_with_its_attempt(tmp_path):
    rows = scenes()
    backends = pair(rows, text=lambda prompt, text: "" if prompt.stage == "blend" and not prompt.attempt else text)
    report, merged = boost(rows, tmp_path, backends)
    assert report.done == 12
    assert report.asked == 48
    assert {row["blend_source"]["attempt"] for row in content(merged.path)} == {1}


def test_truncated_answer_is_retried_and_never_published(tmp_path):
    rows = scenes()
    backends = pair(rows, text=lambda prompt, text: text if prompt.attempt else Truncated(text[: len(text) // 2]))
    report, _ = boost(rows, tmp_path / "again", backends)
    assert (report.done, report.asked) == (12, 12 + 2 * 24)
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
    assert boost(rows, tmp_path / "chatty", chatty)[0].asked == 36


def test_attempts_are_counted_across_runs(tmp_path):
    rows = scenes()
    boost_shard(rows, tmp_path, attempts=1, **pair(rows, vision=lambda prompt, text: ""))
    more = pair(rows, vision=lambda prompt, text: "")
    boost_shard(rows, tmp_path, attempts=3, **more)
    assert len(more["vision"].asked) == 24


def test_another_vision_model_keeps_the_blend_caps(tmp_path):
    rows = scenes()
    boost(rows, tmp_path, pair(rows))
    other = pair(rows)
    other["vision"].revision = "another"
    report, merged = boost(rows, tmp_path, other)
    assert len(other["vision"].asked) == 12
    assert report.done == 12
    # Equal descriptions give equal questions, so the writer is not asked again.
    assert other["text"].asked == []
    assert {r["visual_source"]["revision"] for r in content(merged.path)} == {"another"}


def test_rejected_prompt_is_not_asked_twice(tmp_path):
    rows = scenes()
    bad = rows["image_id"][0]

    def answer(prompt, text):
        return Failure("backend_rejected", "HTTP 400: too large") if prompt.image_id == bad else text

    boost(rows, tmp_path, pair(rows, vision=answer))
    assert quarantine(tmp_path)[0]["reason"] == "backend_rejected"
    again = pair(rows)
    boost(rows, tmp_path, again)
    assert again["vision"].asked == []


def test_unreachable_backend_stops_the_run_without_loss(tmp_path):
    rows = scenes()
    dead = pair(rows, vision=lambda prompt, text: Failure("backend_failed", "connection refused"))
    with pytest.raises(BackendError, match="5 times in a row"):
        boost_shard(rows, tmp_path, max_failures=5, **dead)
    again = pair(rows)
    assert boost_shard(rows, tmp_path, **again).done == 12
    assert sum(stage == "blend" for stage, *_ in again["text"].asked) == 0


def test_backend_that_rejects_everything_stops_the_run(tmp_path):
    rows = scenes()
    rude = pair(rows, text=lambda prompt, text: Failure("backend_rejected", "HTTP 400: unknown parameter"))
    with pytest.raises(BackendError, match="retry_quarantined"):
        boost_shard(rows, tmp_path, max_failures=4, **rude)
    assert boost_shard(rows, tmp_path, **pair(rows)).quarantined == 4
    assert boost_shard(rows, tmp_path, retry_quarantined=True, **pair(rows)).quarantined == 0


def test_backend_with_missing_answers_is_an_error(tmp_path):
    class Lossy(SceneWriter):
        def complete(self, prompts):
            yield from list(super().complete(prompts))[1:]

    rows = scenes()
    with pytest.raises(BackendError, match="answered 11 of 12"):
        boost_shard(rows, tmp_path, text=Lossy(), vision=SceneDescriber(facts_of(rows)))


def test_missing_image_is_quarantined_without_requests(tmp_path):
    rows = with_image(scenes(40), 7, {"bytes": None, "path": "gone.png"})
    backends = pair(rows)
    report, merged = boost(rows, tmp_path, backends)
    assert (report.done, merged.rows) == (39, 39)
    assert len(backends["text"].asked) == 78
    (entry,) = quarantine(tmp_path)
    assert (entry["row"], entry["reason"]) == (7, "image_not_found")
    assert "gone.png" in entry["detail"]


def test_truncated_image_is_quarantined(tmp_path):
    whole = undecoded(scenes(40))["image"][7]["bytes"]
    rows = with_image(scenes(40), 7, {"bytes": whole[: len(whole) // 2], "path": None})
    backends = pair(rows)
    for _ in range(2):
        boost(rows, tmp_path, backends)
        (entry,) = quarantine(tmp_path)
        assert entry["row"] == 7
        assert entry["column"] == "visual"
        assert entry["reason"].startswith("image_")
    journal = read_journal(tmp_path / journal_name(range(40)))
    assert sum("reason" in line for line in journal) == 1  # written once
    # After a repair, the row is finished.
    assert boost(scenes(40), tmp_path, backends)[1].rows == 40


@pytest.mark.parametrize("part", ["missing", "half"])
def test_repaired_image_is_asked_about(tmp_path, part):
    whole = undecoded(scenes(40))["image"][7]["bytes"]
    value = {"bytes": None, "path": "gone.png"} if part == "missing" else {"bytes": whole[: len(whole) // 2]}
    backends = pair(scenes(40))
    boost(with_image(scenes(40), 7, {"path": None, **value}), tmp_path, backends, attempts=1)
    with pytest.raises(UnfinishedError, match="1 of 40"):  # the image is no longer broken
        write(scenes(40), tmp_path, backends)
    assert boost(scenes(40), tmp_path, backends, attempts=1)[1].rows == 40
    bad = scenes(40)["image_id"][7]
    assert [attempt for _, image_id, attempt in backends["vision"].asked if image_id == bad] == [0]


def test_rows_with_missing_images_stop_without_requests(tmp_path):
    images = undecoded(scenes())["image"][:]
    images[6:] = [{"bytes": None, "path": f"elsewhere/{i}.png"} for i in range(6)]
    rows = replace_column(scenes(), "image", images, datasets.Image())
    backends = pair(rows)
    assert boost_shard(rows, tmp_path, rows=range(6), **backends).done == 6
    asked = len(backends["text"].asked)
    with pytest.raises(QuarantineError, match="image_not_found"):
        boost_shard(rows, tmp_path, rows=range(6, 12), **backends)
    # Without a limit, as in a shard, all rows are quarantined.
    assert boost_shard(rows, tmp_path, rows=range(6, 12), max_bad_fraction=None, **backends).quarantined == 6
    assert len(backends["text"].asked) == asked
    found = boosted_rows(rows, tmp_path, rows=range(6, 12), **backends)
    assert [(row["row"], json.loads(row["quarantine"])["reason"]) for row in found] == [
        (row, "image_not_found") for row in range(6, 12)
    ]
    assert boost_shard(scenes(), tmp_path, rows=range(6, 12), **backends).done == 6


def test_row_without_captions_is_quarantined(tmp_path):
    captions = scenes(40)["captions"][:]
    captions[3] = ["", "..."]
    rows = replace_column(scenes(40), "captions", captions, scenes(40).features["captions"])
    _, merged = boost(rows, tmp_path, pair(rows))
    assert merged.rows == 39
    assert quarantine(tmp_path)[0]["row"] == 3


def test_vision_backend_must_see_images(tmp_path):
    with pytest.raises(ValueError, match="does not see images"):
        boost_shard(scenes(), tmp_path, text=SceneWriter(), vision=SceneWriter())
