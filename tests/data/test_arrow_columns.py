"""Columns that stay in Arrow give the values of lists."""

import datasets
import numpy as np
import pyarrow as pa
import pytest

from hf_captionrl.data.columns import (
    ColumnView,
    SourceArguments,
    arrow_column,
    caption_column,
    id_column,
    replace_column,
    select_rows,
    to_caption_columns,
)

NUMBERS = [7, 0, 3, 3, 9]


def numbered(rows=5):
    return datasets.Dataset.from_dict({"image_id": NUMBERS[:rows], "captions": [["a", "b"]] * rows})


def test_column_view_is_a_sequence_of_converted_values():
    column, texts = id_column(numbered()), list(map(str, NUMBERS))
    assert len(column) == 5
    assert list(column) == texts
    assert column[1] == "0"
    assert column[-1] == "9"
    assert column[1:4] == texts[1:4]
    assert column[[4, 0, 4]] == ["9", "7", "9"]
    with pytest.raises(IndexError):
        column[5]
    shuffled = id_column(numbered().select([4, 1, 2]))
    assert list(shuffled) == ["9", "0", "3"]
    assert shuffled[1] == "0"


def test_caption_column_makes_lists_of_texts_and_of_nothing():
    rows = datasets.Dataset.from_dict({"captions": ["a dog", None, "a cat"]})
    assert list(caption_column(rows)) == [["a dog"], [], ["a cat"]]
    assert caption_column(numbered())[1] == ["a", "b"]


@pytest.mark.parametrize("number", [0, 1, 1024, 2500])
def test_arrow_column_holds_the_values_of_an_iterator(number):
    values = [None if i % 7 == 0 else f"é {i}" for i in range(number)]
    column = arrow_column(iter(values), pa.string())
    assert column.type == pa.string()
    assert column.to_pylist() == values


@pytest.mark.parametrize("rows", [[], [2], [1, 2, 3], [0, 2, 4], [4, 0, 3]])
@pytest.mark.parametrize("before", [None, [3, 1, 4, 0, 2]])
def test_select_rows_is_select(rows, before):
    ds = datasets.Dataset.from_dict({"name": [*"abcde"]})
    ds = ds if before is None else ds.select(before)
    found = select_rows(ds, np.array(rows, np.int64))
    assert found[:] == ds.select(rows)[:]
    assert len(found) == len(rows)


@pytest.mark.parametrize("order", [[0, 2, 4], [4, 0, 2], [3]])
def test_replaced_column_of_a_selection_follows_its_order(order, monkeypatch):
    monkeypatch.setattr("hf_captionrl.data.columns._ROWS_OF_CHUNK", 2)
    chosen = datasets.Dataset.from_dict({"name": [*"abcde"]}).select(order)
    values = [f"new {i}" for i in range(len(order))]
    column = arrow_column(values, pa.string())
    for given in (values, column, ColumnView(datasets.Dataset.from_dict({"x": values}), "x")):
        found = replace_column(chosen, "more", given, datasets.Value("string"))
        assert found["more"][:] == values
        assert found["name"][:] == chosen["name"][:]


def converted(columns, **arguments):
    rows = datasets.Dataset.from_dict({"image": [b"x"] * 2, **columns})
    return rows, to_caption_columns(rows, SourceArguments(**arguments), split="train", where="test")


def test_clean_captions_and_ids_are_not_copied():
    texts = [["a dog"], ["a cat", "it"]]
    rows, found = converted({"key": ["x", "y"], "text": texts}, image_id_column="key")
    for ours, theirs in (("image_id", "key"), ("captions", "text")):
        assert _address(found, ours) == _address(rows, theirs)
    assert found["image_id"][:] == ["x", "y"]
    assert found["captions"][:] == [["a dog"], ["a cat", "it"]]
    _, changed = converted({"key": ["x", ""], "text": [["a  dog"], ["a cat"]]}, image_id_column="key")
    assert changed["captions"][:] == [["a dog"], ["a cat"]]
    assert changed["image_id"][:] == ["x", "train-000001"]


def _address(ds, name):
    """Where the last buffer of a column, its text, is in memory."""
    return ds.data.column(name).chunk(0).buffers()[-1].address


def test_columns_may_have_each_others_names():
    _, found = converted(
        {"captions": ["x", "y"], "image_id": [["a dog"], ["a cat"]]},
        image_id_column="captions",
        caption_column="image_id",
    )
    assert found["image_id"][:] == ["x", "y"]
    assert found["captions"][:] == [["a dog"], ["a cat"]]
