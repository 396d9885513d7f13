"""`captionrl evaluate` in parts: every number equals that of one process, to the last bit."""

import json
import random
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from hf_captionrl.cli import main
from hf_captionrl.data.columns import ColumnView, replace_column, undecoded
from hf_captionrl.evaluation import evaluator as paper_tables
from hf_captionrl.evaluation import scored_captions as caption_scores
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.evaluation.evaluator import draw_references
from hf_captionrl.evaluation.options import load_evaluators
from hf_captionrl.evaluation.scored_captions import BLOCK, CaptionScoring, ScoreParts, whole_columns, write_inputs
from hf_captionrl.metrics import caption_perplexity
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.options import EngineOptions
from hf_captionrl.utils.parts import part_files, read_parts, run_parts, split_rows
from tests.evaluation.test_evaluator import write_captions
from tests.tolerances import close

IMAGES = 105
MODELS = ("scenes", "scenes:siglip-held-out", "scenes:gpt2-perplexity")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A data set with a copy of an image and one that cannot be read."""
    scenes = load_scenes(num_train=0, num_validation=0)["test"].select(range(IMAGES))
    images = undecoded(scenes)["image"][:]
    images[2], images[70] = {"bytes": b"no image", "path": None}, images[3]
    changed = replace_column(scenes.select_columns(["image_id", "captions"]), "image", images, datasets.Image())
    folder = tmp_path_factory.mktemp("photos")
    changed.to_parquet(folder / "images.parquet")
    texts = {"full": scenes["full_caption"][:], "generic": ["an animal", ""] * 52 + ["a thing"]}
    for name, captions in texts.items():
        write_captions(folder / f"{name}.jsonl", scenes, captions)
    return folder


def sizes(folder):
    return [pq.read_metadata(path).num_rows for path in part_files(folder)]


def evaluate(photos, folder, *more):
    files = ["--captions", str(photos / "full.jsonl"), str(photos / "generic.jsonl")]
    data = ["--dataset", str(photos / "images.parquet"), "--max_bad_fraction", "0.1", "--suite", "all"]
    models = ["--scorer", MODELS[1], "--language_model", MODELS[2], "--clip_prefix", "A picture of"]
    places = ["--output_dir", str(folder), "--cache_dir", str(folder / "cache")]
    return main(["evaluate", *files, *data, *models, *places, *more])


def test_tables_equal_those_without_engine_and_are_not_computed_again(photos, tmp_path, monkeypatch, capsys):
    for name in ("meteor", "spice"):
        monkeypatch.setattr(paper_tables, name, Mock(side_effect=RuntimeError("not run: there is no Java")))
    assert evaluate(photos, tmp_path / "one") == 0
    printed = capsys.readouterr().out
    shards = ["--processes", "1", "--rows_per_shard", str(BLOCK)]
    assert evaluate(photos, tmp_path / "shards", *shards) == 0
    assert capsys.readouterr().out == printed.replace(str(tmp_path / "one"), str(tmp_path / "shards"))

    def result(folder):
        found = json.loads((tmp_path / folder / "comparison.json").read_text())
        return {name: value for name, value in found.items() if name != "config"}

    def compare(found, expected, where=""):
        if isinstance(found, float):
            assert found == close(expected, dtype="float32"), where
        elif isinstance(found, dict | list):
            assert len(found) == len(expected), where
            pairs = found.items() if isinstance(found, dict) else enumerate(found)
            for key, value in pairs:
                compare(value, expected[key], f"{where}/{key}")
        else:
            assert found == expected, where

    compare(result("shards"), result("one"))  # batches of another size may round differently
    assert (tmp_path / "shards/comparison.md").read_text() == (tmp_path / "one/comparison.md").read_text()
    assert result("one")["num_duplicate_images"] == 1
    images, captions = (next((tmp_path / "shards/shards").glob(f"{kind}-*")) for kind in ("images", "captions"))
    assert len(list(read_parts(images))) == IMAGES - 2
    assert sizes(captions) == [IMAGES - 1] * 3  # the files and the references

    monkeypatch.setattr(ScoreParts, "load", None)  # nothing is loaded
    assert evaluate(photos, tmp_path / "shards", *shards) == 0
    compare(result("shards"), result("one"))


def captions_of(seed, number=2 * BLOCK + 1):
    """Captions with copies in other blocks and an empty one, which is a block of its own."""
    words = ["red", "blue", "pig", "two", "on", "the", "grass", "small"]
    drawn = np.random.default_rng(seed).integers(len(words), size=(number, 6))
    texts = [" ".join(words[w] for w in row[: 1 + row[0] % 6]) for row in drawn]
    return [*texts[:-2], texts[0], ""]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_shards_equal_blocks_of_this_process_and_plain_numbers(tmp_path, processes):
    scorer, language_model, _ = load_evaluators(*MODELS)
    sources = [captions_of(0), captions_of(1)]
    number, width = len(sources[0]), scorer.text_features(["a"]).size(1)
    images = torch.randn(number + 7, width, generator=torch.Generator().manual_seed(0))
    pools = {"image_rank": images[:number], "pool_rank": images}
    scoring = CaptionScoring(scorer, language_model, clip_prefix="Photo: ", pools=pools)
    columns = ["image_rank", "pool_rank", "text", "clip_text", "tokens", "nats", "scored_tokens"]

    write_inputs(tmp_path, sources, pools)
    make_part = ScoreParts(tmp_path, 4 * BLOCK, MODELS, "Photo: ", columns)
    parts = split_rows(2 * 4 * BLOCK, 2 * BLOCK)
    run_parts(tmp_path, parts, make_part, EngineOptions(processes=processes), settings={})
    assert sizes(tmp_path) == [2 * BLOCK, 1] * 2
    rows = list(read_parts(tmp_path))
    for place, captions in enumerate(sources):
        expected = whole_columns(scoring.blocks(captions), number)
        part = rows[place * number : (place + 1) * number]
        assert set(expected) == set(columns)
        for name in columns:
            assert np.array([row[name] for row in part], expected[name].dtype).tobytes() == expected[name].tobytes()
        # Each number by itself: a feature of one caption, ranks by counting, losses of the whole list.
        text = torch.cat([scorer.text_features([caption or "."]) for caption in captions[-3:]])
        assert expected["text"][-3:].flatten().tolist() == close(text.flatten().tolist(), dtype="float32", magnitude=1)
        unit = torch.nn.functional.normalize(images, dim=1).double()
        for row in range(0, number, 50):
            scores = unit @ torch.from_numpy(expected["text"][row]).double()
            assert expected["pool_rank"][row] == 1 + int((scores > scores[row]).sum())
            assert expected["image_rank"][row] == 1 + int((scores[:number] > scores[row]).sum())
        whole = caption_perplexity([caption or "." for caption in captions], *language_model)
        assert expected["scored_tokens"].tolist() == whole["tokens"].tolist()
        assert expected["nats"].tolist() == close(whole["nats"].tolist(), dtype="float32", magnitude=50)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--rows_per_shard", "100", "--processes", "2"], f"100 is not a multiple of {BLOCK}"),
        (["--rows_per_shard", "256"], "Use --processes or --engine"),
    ],
)
def test_engine_options_that_do_not_fit_are_refused(photos, tmp_path, capsys, more, said):
    assert evaluate(photos, tmp_path, *more) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


REFERENCES = [["a", "b", "c"], ["d", "d"], ["e"], [], ["f", "g"]]


def references(rows=REFERENCES):
    features = datasets.Features({"captions": datasets.List(datasets.Value("string"))})
    return datasets.Dataset.from_dict({"captions": rows}, features=features)


def test_drawn_references_equal_a_plain_loop():
    seed, expected = 3, []
    rng = random.Random(seed)
    for group in REFERENCES:
        place = rng.randrange(len(group)) if group else 0
        expected.append([*group[place : place + 1], *(c for i, c in enumerate(group) if i != place)])
    drawn = draw_references(ColumnView(references(), "captions"), seed)
    assert list(drawn) == expected
    assert [drawn[row] for row in range(len(drawn))] == expected


def test_aligned_captions_are_in_arrow_unless_they_have_no_utf8_form(tmp_path):
    rows = {"b": ["x", ""], "a": ["y"]}

    def aligned():
        lines = (json.dumps({"image_id": i, "captions": texts}) + "\n" for i, texts in rows.items())
        (tmp_path / "c.jsonl").write_text("".join(lines))
        return read_caption_file(tmp_path / "c.jsonl").aligned(["a", "b"], {"a", "b"})

    found = aligned()
    assert isinstance(found, ColumnView)
    assert list(found) == [["y"], ["x", ""]]
    rows["a"] = ["lone \ud83d"]
    assert aligned() == [["lone \ud83d"], ["x", ""]]


def test_large_columns_are_in_a_file_that_disappears(tmp_path, monkeypatch):
    number = 2 * BLOCK + 3

    def parts():
        for rows in np.array_split(np.arange(7, 7 + number), 3):
            yield {"text": np.stack([rows, rows**2], 1).astype(np.float32), "rank": rows}

    memory = whole_columns(parts(), number)
    monkeypatch.setattr(caption_scores, "_IN_MEMORY", 8 * number)
    assert not isinstance(whole_columns([next(parts())], number // 3 + 1, tmp_path)["rank"], np.memmap)
    found = whole_columns(parts(), number, folder=tmp_path / "new")
    assert all(isinstance(found[name], np.memmap) and not isinstance(memory[name], np.memmap) for name in found)
    assert list((tmp_path / "new").iterdir()) == []
    expected = np.arange(7, 7 + number)
    for columns in (memory, found):
        np.testing.assert_array_equal(columns["rank"], expected)
        np.testing.assert_array_equal(columns["text"][:, 1], expected.astype(np.float32) ** 2)
    torch.from_numpy(found["text"])[0] = 5.0  # writable
    assert found["text"][0].tolist() == [5.0, 5.0]
