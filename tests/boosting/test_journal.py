"""Journals: complete lines count, an incomplete last line does not, and only one process writes."""

import json

import pytest

from hf_captionrl.apps.boosting.boost import JournalWriter, journal_name, journals, read_journal

ENTRY = {"image_id": "1", "stage": "blend", "text": "half \ud83d of an emoji\u2028and a line"}


def test_entries_are_readable_immediately(tmp_path):
    path = tmp_path / "out" / journal_name(range(64, 128))
    with JournalWriter(path) as journal:
        journal.append(ENTRY)
        assert read_journal(path) == [ENTRY]  # not closed, not flushed
        journal.append(ENTRY | {"image_id": "2"})
    assert [entry["image_id"] for entry in read_journal(path)] == ["1", "2"]
    assert journals(tmp_path / "out") == [path]
    assert path.name == "journal-000000064-000000128.jsonl"


def test_journals_of_rows_are_those_that_overlap(tmp_path):
    names = [journal_name(rows) for rows in (range(4), range(4, 8), range(6, 9))] + ["journal-older.jsonl"]
    for name in names:
        (tmp_path / name).touch()

    def found(rows):
        return {path.name for path in journals(tmp_path, rows)}

    assert found(range(4)) == {names[0], names[3]}
    assert found(range(5, 6)) == {names[1], names[3]}
    assert found(range(3, 7)) == set(names)
    assert found(range(9, 12)) == {names[3]}
    assert {path.name for path in journals(tmp_path)} == set(names)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_incomplete_last_line_is_skipped_and_removed(tmp_path, cut):
    path = tmp_path / "journal-x.jsonl"
    whole = json.dumps(ENTRY) + "\n"
    path.write_text(whole + whole[:-cut])
    assert read_journal(path) == [ENTRY]
    with JournalWriter(path) as journal:
        assert journal.torn == len(whole) - cut
        journal.append(ENTRY | {"stage": "visual"})
    assert [entry["stage"] for entry in read_journal(path)] == ["blend", "visual"]


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"image_id": "1"}', ""])
def test_broken_line_in_the_middle_is_named_and_kept(tmp_path, line):
    path = tmp_path / "journal-x.jsonl"
    text = json.dumps(ENTRY) + f"\n{line}\n" + json.dumps(ENTRY) + "\n"
    path.write_text(text)
    with pytest.raises(ValueError, match="line 2"):
        JournalWriter(path)
    with pytest.raises(ValueError, match="line 2"):
        read_journal(path)
    assert path.read_text() == text


def test_second_writer_of_a_journal_is_refused(tmp_path):
    path = tmp_path / "journal-x.jsonl"
    with JournalWriter(path), pytest.raises(ValueError, match="Another process"):
        JournalWriter(path)
    with JournalWriter(path):
        pass
