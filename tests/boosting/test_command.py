"""`captionrl boost`: the default run, shards, processes, and bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_captionrl.cli import main
from hf_captionrl.data import open_image
from hf_captionrl.scenes.models import model_path
from tests.boosting.doubles import content, endpoint_answer, scenes
from tests.boosting.server import ChatServer

ROOT = Path(__file__).resolve().parents[2]


def boost(folder, *more):
    return main(["boost", "--max_images", "8", "--output", str(folder), *more])


def test_default_run_needs_no_model(tmp_path, capsys):
    assert boost(tmp_path, "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["done"] == 8
    assert summary["merged"]["rows"] == 8
    statistics = json.loads((tmp_path / "statistics.json").read_text())
    assert statistics["references"]["captions"] == 40
    lengths = [len(row["holistic_caption"].split()) for row in content(tmp_path / "captions.parquet")]
    assert statistics["HolisticCap"]["mean_words"] == sum(lengths) / 8
    # Toks/Cap of Table 9, by the tokenizer of the held-out scorer.
    tokenizer = AutoTokenizer.from_pretrained(model_path("scenes:siglip-held-out"))
    tokens = [len(tokenizer(row["holistic_caption"]).input_ids) for row in content(tmp_path / "captions.parquet")]
    assert statistics["HolisticCap"]["mean_tokens"] == pytest.approx(sum(tokens) / 8)
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert boost(tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["asked"] == 0


def test_last_shard_merges(tmp_path, capsys):
    assert boost(tmp_path / "one") == 0
    assert boost(tmp_path / "two", "--shard", "1/2") == 0
    assert not (tmp_path / "two/captions.parquet").exists()
    assert "4 of 8 rows" in capsys.readouterr().err
    assert boost(tmp_path / "two", "--merge") == 2
    assert boost(tmp_path / "two", "--shard", "0/2") == 0
    assert content(tmp_path / "two/captions.parquet") == content(tmp_path / "one/captions.parquet")
    assert boost(tmp_path / "two", "--merge") == 0


@pytest.mark.slow  # launched by accelerate; shards are compared with one run above
def test_two_processes_equal_one_process(tmp_path):
    assert boost(tmp_path / "one") == 0
    # The command of the docs page; without --config_file, `accelerate launch` silently starts one process.
    launch = "accelerate launch --config_file recipes/accelerate/ddp.yaml -m hf_captionrl.cli boost"
    assert launch in (ROOT / "docs/boosting.md").read_text()
    words = launch.split()
    command = [sys.executable, "-m", "accelerate.commands.launch", *words[2:4], "--num_processes", "2"]
    command += ["--main_process_port", "0", *words[4:], "--max_images", "8", "--output", str(tmp_path / "two")]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "two/captions.parquet") == content(tmp_path / "one/captions.parquet")
    assert sorted(path.name for path in (tmp_path / "two").glob("journal-*")) == [
        "journal-00000-of-00002.jsonl",
        "journal-00001-of-00002.jsonl",
    ]


def photographs(folder):
    """Scenes as a folder of images with captions."""
    folder.mkdir()
    lines = []
    for number, row in enumerate(scenes()):
        open_image(row["image"]).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "captions": row["captions"]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
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
    for path in (tmp_path / "out").iterdir():
        assert b"secret" not in path.read_bytes()
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err
    rows = content(tmp_path / "out/captions.parquet")
    assert all(Path(row["image"]["path"]).is_absolute() and row["image"]["bytes"] is None for row in rows)
    assert main([*arguments, "--merge", "--embed_images"]) == 0
    assert all(row["image"]["bytes"] for row in content(tmp_path / "out/captions.parquet"))


def test_skipped_splits_are_reported_and_split_all_boosts_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "*")
    arguments = photographs(tmp_path / "photos")
    with ChatServer(endpoint_answer(scenes())) as server:
        arguments += ["--text", "openai:w", "--vision", "openai:d", "--text_url", server.url]
        assert main([*arguments, "--output", str(tmp_path / "train")]) == 0
        one = len(content(tmp_path / "train/captions.parquet"))
        said = capsys.readouterr().err
        assert one < 12  # the source has no validation and test split: they are taken from train
        assert f"{one} of 12 images are boosted" in said
        assert "--split all" in said
        assert main([*arguments, "--split", "all", "--output", str(tmp_path / "all")]) == 0
    assert len({row["image_id"] for row in content(tmp_path / "all/captions.parquet")}) == 12
    assert "images are boosted" not in capsys.readouterr().err
    assert main([*arguments, "--split", "gone", "--output", str(tmp_path / "gone")]) == 2
    assert "no split 'gone'" in capsys.readouterr().err


def test_truncated_annotation_file_is_named(tmp_path, capsys):
    arguments = photographs(tmp_path / "photos")
    file = tmp_path / "photos/metadata.jsonl"
    file.write_text(file.read_text()[:-40])
    assert main([*arguments, "--output", str(tmp_path / "out"), "--text", "scenes", "--vision", "scenes"]) == 2
    assert "metadata.jsonl is not valid JSON" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "2/2"], "--shard '2/2'"),
        (["--shard", "one"], "--shard 'one'"),
        (["--text", "gpt"], "--text is 'gpt'"),
        (["--text", "captioner:scenes:blip-mle"], "--text is"),
        (["--text", "openai:m"], "needs an address"),
        (["--error_rate", "15"], "not in percent"),
        (["--embed_images", "--no_images"], "Use one of them"),
    ],
)
def test_bad_arguments_are_named(tmp_path, capsys, arguments, message):
    assert boost(tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
