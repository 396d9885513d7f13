"""`captionrl boost`: the default run, shards, processes, and bad input."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_captionrl.apps.boosting.boost import journals, read_journals
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
    assert (summary["rows"], summary["resumed"], summary["shards"]) == (8, 0, 1)
    assert summary["captions"]["rows"] == 8
    statistics = json.loads((tmp_path / "statistics.json").read_text())
    assert statistics["references"]["captions"] == 40
    lengths = [len(row["holistic_caption"].split()) for row in content(tmp_path / "captions.parquet")]
    assert statistics["HolisticCap"]["mean_words"] == sum(lengths) / 8
    words = {
        word for row in content(tmp_path / "captions.parquet") for word in row["holistic_caption"].lower().split()
    }
    assert statistics["HolisticCap"]["vocabulary"] == len(words)
    # Toks/Cap of Table 9, by the tokenizer of the held-out scorer.
    tokenizer = AutoTokenizer.from_pretrained(model_path("scenes:siglip-held-out"))
    tokens = [len(tokenizer(row["holistic_caption"]).input_ids) for row in content(tmp_path / "captions.parquet")]
    assert statistics["HolisticCap"]["mean_tokens"] == pytest.approx(sum(tokens) / 8)
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    (journal,) = journals(tmp_path)
    before = journal.stat().st_mtime_ns
    assert boost(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["resumed"] == 8
    assert journal.stat().st_mtime_ns == before  # nothing is asked


def test_shards_give_the_same_file(tmp_path, capsys):
    assert boost(tmp_path / "one") == 0
    assert boost(tmp_path / "three", "--rows_per_shard", "3") == 0
    assert content(tmp_path / "three/captions.parquet") == content(tmp_path / "one/captions.parquet")
    assert len(journals(tmp_path / "three")) == len(list((tmp_path / "three/shards").glob("part-*"))) == 3
    # Other settings need --overwrite; the answers that stay valid are not asked for again.
    three = tmp_path / "three", "--rows_per_shard", "3"
    blends = [entry for entry in read_journals(three[0]) if entry["stage"] == "blend"]
    assert boost(*three, "--error_rate", "0.5") == 2
    assert "written with error_rate 0.15, but error_rate is now 0.5" in capsys.readouterr().err
    assert boost(*three, "--error_rate", "0.5", "--overwrite") == 0
    assert content(three[0] / "captions.parquet") != content(tmp_path / "one/captions.parquet")
    assert [entry for entry in read_journals(three[0]) if entry["stage"] == "blend"] == blends


def test_shards_that_may_gain_rows_are_worked_on_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "*")
    arguments = [*photographs(tmp_path / "photos"), "--split", "all", "--output", str(tmp_path / "out")]
    arguments += ["--rows_per_shard", "4", "--tries", "1", "--backoff_s", "0.01", "--max_failures", "99"]
    begun = []
    with ChatServer(endpoint_answer(scenes()), lambda number, _: 503 if number < 1 and not begun else "ok") as server:
        arguments += ["--text", "openai:w", "--vision", "openai:d", "--text_url", server.url]
        assert main(arguments) == 0
        assert len(content(tmp_path / "out/captions.parquet")) == 11  # one question failed
        begun.append(True)
        asked = len(server.requests)
        parts = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/shards").glob("part-*")}
        assert main(arguments) == 0
        assert len(content(tmp_path / "out/captions.parquet")) == 12
        assert "images are boosted" not in capsys.readouterr().err
        assert sum(path.stat().st_mtime_ns != before for path, before in parts.items()) == 1
        assert 1 <= len(server.requests) - asked <= 3
        # Another reference: only its image is asked about again.
        file, asked = tmp_path / "photos/metadata.jsonl", len(server.requests)
        first, *others = file.read_text().splitlines()
        file.write_text("\n".join([json.dumps(json.loads(first) | {"captions": ["a pig", "two pigs"]}), *others]))
        assert main(arguments) == 2
        assert "written with references" in capsys.readouterr().err
        assert main([*arguments, "--overwrite"]) == 0
        assert len(server.requests) - asked == 2  # BlendCap and HolisticCap


@pytest.mark.slow  # each process imports everything; shards are compared with one run above
def test_two_processes_equal_one_process(tmp_path):
    assert boost(tmp_path / "one") == 0
    assert boost(tmp_path / "spawned", "--processes", "2", "--rows_per_shard", "2") == 0
    assert content(tmp_path / "spawned/captions.parquet") == content(tmp_path / "one/captions.parquet")


def photographs(folder):
    """Scenes as a folder of images with captions."""
    write_photos(folder, scenes())
    return ["boost", "--dataset", "imagefolder", "--data_dir", str(folder), "--split", "train"]


def test_endpoint_boosts_a_folder_of_images(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    arguments = [*photographs(tmp_path / "photos"), "--output", str(tmp_path / "out"), "--api_key_env", "SOME_KEY"]
    with ChatServer(endpoint_answer(scenes())) as server:
        arguments += ["--text", "openai:writer", "--vision", "openai:describer", "--text_url", server.url]
        assert main(arguments) == 0
        asked = len(server.requests)
        assert main(arguments) == 0
        assert asked == len(server.requests) > 0
        assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    for path in filter(Path.is_file, (tmp_path / "out").rglob("*")):
        assert b"secret" not in path.read_bytes()
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err
    rows = content(tmp_path / "out/captions.parquet")
    assert len(rows) < 12  # the source has no validation and test split: they are taken from train
    assert f"{len(rows)} of 12 images are boosted" in said.err
    assert "--split all" in said.err
    assert all(Path(row["image"]["path"]).is_absolute() and row["image"]["bytes"] is None for row in rows)
    assert main([*arguments, "--embed_images"]) == 0
    assert all(row["image"]["bytes"] for row in content(tmp_path / "out/captions.parquet"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--address", "auto"],
        ["--text", "captioner:scenes:blip-mle"],
        ["--text_url", "", "--text", "openai:m"],
        ["--embed_images", "--no_images"],
    ],
)
def test_bad_arguments_are_named(tmp_path, capsys, arguments):
    assert boost(tmp_path / "out", *arguments) == 2
    assert arguments[0].strip("-") in capsys.readouterr().err
