"""`captionrl boost`: the default run, an endpoint, and bad input."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_captionrl.cli import main
from hf_captionrl.utils.model_files import model_path
from tests.apps.boosting.doubles import content, endpoint_answer, scenes
from tests.apps.boosting.server import ChatServer
from tests.tiny import write_photos


def boost(folder, *more):
    return main(["boost", "--max_images", "8", "--output", str(folder), *more])


def test_default_run_needs_no_model(tmp_path, capsys):
    assert boost(tmp_path, "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["rows"], summary["skipped"]) == (8, 0)
    statistics = json.loads((tmp_path / "statistics.json").read_text())
    assert statistics["references"]["captions"] == 40
    captions = [row["holistic_caption"] for row in content(tmp_path / "captions.parquet")]
    assert statistics["HolisticCap"]["mean_words"] == sum(len(text.split()) for text in captions) / 8
    assert statistics["HolisticCap"]["vocabulary"] == len({word for text in captions for word in text.lower().split()})
    # Toks/Cap of Table 9, by the tokenizer of the held-out scorer.
    tokenizer = AutoTokenizer.from_pretrained(model_path("scenes:siglip-held-out"))
    tokens = [len(tokenizer(text).input_ids) for text in captions]
    assert statistics["HolisticCap"]["mean_tokens"] == pytest.approx(sum(tokens) / 8)
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    before = content(tmp_path / "captions.parquet")
    assert boost(tmp_path, "--error_rate", "0.5") == 0
    assert content(tmp_path / "captions.parquet") != before


def photographs(folder):
    """Scenes as a folder of images with captions."""
    write_photos(folder, scenes())
    return ["boost", "--dataset", "imagefolder", "--data_dir", str(folder), "--split", "train"]


def test_endpoint_boosts_a_folder_of_images(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    arguments = [*photographs(tmp_path / "photos"), "--output", str(tmp_path / "out"), "--api_key_env", "SOME_KEY"]
    arguments += ["--tries", "1"]
    with ChatServer(endpoint_answer(scenes()), lambda number, _: "ok" if number else 503) as server:
        arguments += ["--text", "openai:writer", "--vision", "openai:describer", "--text_url", server.url]
        assert main(arguments) == 0
        (line,) = (tmp_path / "out/skipped.jsonl").read_text().splitlines()
        assert json.loads(line)["reason"] == "backend_failed"
        assert main(arguments) == 0  # one question failed, and is asked again
        number = len(server.requests)
        assert main(arguments) == 0
        assert number == len(server.requests)
        assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
        said = capsys.readouterr()
        rows = content(tmp_path / "out/captions.parquet")
        assert len(rows) < 12  # the source has no validation and test split: they are taken from train
        assert main([*arguments, "--embed_images"]) == 0
        # Another reference: only its image is asked about again.
        file = tmp_path / "photos/metadata.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        changed = [
            row | {"captions": ["a pig", "two pigs"]} if row["file_name"] == rows[0]["image_id"] else row
            for row in lines
        ]
        file.write_text("\n".join(map(json.dumps, changed)))
        assert main(arguments) == 0
        assert len(server.requests) - number == 2  # BlendCap and HolisticCap
    for path in filter(Path.is_file, (tmp_path / "out").rglob("*")):
        assert b"secret" not in path.read_bytes()
    assert "secret" not in said.out + said.err
