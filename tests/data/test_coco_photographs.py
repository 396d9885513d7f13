"""The photographs of the benchmark of recipes: their licences, and how they are cycled."""

import json

import numpy as np
from PIL import Image

from tests.data.coco_photographs import FOLDER, make_photographs, read_rows


def test_the_notice_has_source_and_licence_of_every_photograph():
    notice = (FOLDER / "NOTICE").read_text(encoding="utf-8")
    rows = read_rows()
    for row in rows:
        assert row["license"] == "CC BY 2.0"
        assert f"{row['file_name']}  {row['source']}  {row['license']}\n" in notice
    assert notice.count(".jpg  http") == len(rows)
    assert sorted(row["file_name"] for row in rows) == sorted(path.name for path in FOLDER.glob("*.jpg"))
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1.5e6


def test_photographs_are_cycled_as_different_images(tmp_path):
    make_photographs(tmp_path, 24)
    rows = read_rows()
    lines = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["file_name"] for line in lines] == [f"{i}.jpg" for i in range(24)]
    assert [line["captions"] for line in lines] == [rows[i % 10]["captions"] for i in range(24)]
    contents = [(tmp_path / f"{i}.jpg").read_bytes() for i in range(24)]
    assert contents[:10] == [(FOLDER / row["file_name"]).read_bytes() for row in rows]
    assert len(set(contents)) == 24
    assert len({Image.open(tmp_path / f"{i}.jpg").size for i in range(10)}) >= 4
    first, mirrored, narrower = (np.asarray(Image.open(tmp_path / f"{i}.jpg"), float) for i in (0, 10, 20))
    assert abs(first[8:-8, 8:-8] - mirrored[:, ::-1]).mean() < 5 < abs(first[8:-8, 8:-8] - mirrored).mean()
    assert abs(first[16:-16, 16:-16] - narrower).mean() < 5
