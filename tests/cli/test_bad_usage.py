"""Bad usage of the commands: exit code 2, a last line that names what is wrong, and no file is written or changed."""

import json
import shlex

import pytest
from PIL import Image

from hf_captionrl.cli import main

CAPTION = "caption scenes:blip-mle --output x.jsonl"
ENDPOINT = "caption seer --endpoint http://127.0.0.1:9/v1 --dataset photos --output x.jsonl --tries 1"
EVALUATE = "evaluate --captions a.jsonl"
PAIRS = "pairs --captions a.jsonl b.jsonl --dataset scenes --max_images 6 --output pairs.parquet"
ALBUM = "album photos --scorer scenes:siglip-held-out"
AGREEMENT = "agreement --benchmark flickr8k-expert --data_root ."
USES = [
    ("bags --output bags.csv", "--output"),
    ("bags --mode neighbours --bag_sizes 3", "--bag_sizes"),
    ("bags --bag_sizes 5 --max_images 4", "--bag_sizes"),
    (f"{CAPTION} --num_return_sequences 5", "--num_beams"),
    (f"{CAPTION} --temperature 0", "temperature"),
    (f"{CAPTION} --split nowhere", "'nowhere'"),
    (f"{CAPTION} --dataset no/such/file.jsonl", "no/such/file.jsonl"),
    (f"{CAPTION} --data_dir photos", "--data_dir"),
    (f"{CAPTION} --output x.tsv", "--output"),
    (f"{CAPTION} --output photos", "--output"),
    (f"{CAPTION} --api_key_env SOME_KEY", "--api_key_env"),
    (f"{CAPTION} --processes 1", "x'"),
    (f"{CAPTION} --output x --batch_size 2 --processes 2 --rows_per_shard 5", "--batch_size"),
    (f"{ENDPOINT} --num_beams 4", "--num_beams"),
    (f"{ENDPOINT} --num_return_sequences 3", "--do_sample"),
    (f"{ENDPOINT} --processes 2", "--processes"),
    (f"{ENDPOINT} --dtype bfloat16", "--dtype"),
    (f"{ENDPOINT} --min_new_tokens 5", "--min_new_tokens"),
    (f"{ENDPOINT} --top_k 5", "--top_k"),
    (f"{ENDPOINT} --timeout_s 0", "timeout_s"),
    (f"{ENDPOINT} --timeout_s inf", "timeout_s"),
    (f"{ENDPOINT} --do_not_mention a ' '", "--do_not_mention"),
    (f"{ENDPOINT} --endpoint http://me:secret@127.0.0.1/v1", "api_key_env"),
    (f"{ENDPOINT} --endpoint ftp://127.0.0.1", "ftp://127.0.0.1"),
    (f"{ENDPOINT} --endpoint 'http://[::1/v1'", "base_url"),
    (f"{ENDPOINT} --endpoint http://127.0.0.1:99999/v1", "base_url"),
    (f"{ENDPOINT} --endpoint 'http://127.0.0.1/v1\n'", "base_url"),
    (f"{ENDPOINT} --endpoint http://127.0.0.1/v1#part", "base_url"),
    (f"{ENDPOINT} --api_key_env NO_SUCH_KEY", "NO_SUCH_KEY"),
    (f"{EVALUATE} --names a b", "--names"),
    (f"{EVALUATE} --names references", "'references'"),
    (f"{EVALUATE} --bags nowhere.json", "nowhere.json"),
    (f"{EVALUATE} --bags b.jsonl --suite smile", "--bags"),
    (f"{EVALUATE} --pool b.jsonl --scorer none", "--pool"),
    (f"{EVALUATE} --references nowhere.json", "nowhere.json"),
    (f"{EVALUATE} --references others.jsonl", "others.jsonl"),
    (f"{EVALUATE} --references b.jsonl --scorer scenes:clip-reward", "--scorer"),
    (f"{EVALUATE} --references b.jsonl --split test", "--split"),
    (f"{EVALUATE} --references b.jsonl --dataset imagefolder --data_dir nowhere", "nowhere"),
    (f"{PAIRS} --reward cider --output captions.jsonl", "--output"),
    (f"{PAIRS} --reward meteorite", "'meteorite'"),
    (f"{PAIRS} --reward cider --margin 99", "--margin"),
    (f"{PAIRS} --reward cider --captions a.jsonl", "two different"),
    (f"{ALBUM} --output o.txt", "--output"),
    (f"{ALBUM} --output mine.csv", "--overwrite"),
    (f"{ALBUM} --captions nothing.jsonl", "nothing.jsonl"),
    (f"{ALBUM} --endpoint http://127.0.0.1:9/v1", "--model"),
    (f"{ALBUM} --endpoint http://127.0.0.1:9/v1 --model seer --num_beams 3", "--num_beams"),
    (f"{ALBUM} --endpoint http://127.0.0.1:9/v1 --model seer --min_new_tokens 41", "--min_new_tokens"),
    (f"{ALBUM} --endpoint http://127.0.0.1:9/v1 --model seer --trigger ''", "trigger"),
    ("boost --output out --text captioner:scenes:blip-mle", "text"),
    ("boost --output out --text openai:m --text_url ''", "text_url"),
    ("boost --output out --embed_images --no_images", "embed_images"),
    (f"{AGREEMENT} --benchmark flickr8k-cf", "CrowdFlowerAnnotations.txt"),
    (f"{AGREEMENT} --metrics clip_score", "--scorer"),
    (f"{AGREEMENT} --metrics clair --judge gpt-4", "--judge"),
    (f"{AGREEMENT} --judge transformers:m --judge_url http://127.0.0.1:1/v1", "--judge_url"),
    ("train --processes 0 smile", "processes is 0"),
    ("train gan", "invalid choice"),
    ("train smile --config nowhere.yaml", "recipes/configs/smile_blip/nowhere.yaml is neither"),
]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("words", "named"), USES)
def test_bad_usage_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, named):
    monkeypatch.chdir(tmp_path)
    for name, image, caption in (("a", "test-00000", "a pig"), ("b", "test-00000", "two pigs"), ("others", "z", "?")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"image_id": image, "caption": caption}) + "\n")
    (tmp_path / "mine.csv").write_text("mine")
    rated = [{"filename": f"{n}.jpg", "sentences": [{"raw": "a pig"}, {"raw": f"{n} pigs"}]} for n in range(2)]
    (tmp_path / "dataset_flickr8k.json").write_text(json.dumps({"images": rated}))
    (tmp_path / "ExpertAnnotations.txt").write_text("0.jpg\t1.jpg#0\t1\t1\t2\n1.jpg\t0.jpg#1\t1\t3\t1\n")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    before = contents(tmp_path)
    assert main(shlex.split(words)) == 2
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith(f"captionrl {words.split()[0]}")
    assert named in last
    assert "Traceback" not in error
    assert "secret" not in last
    assert contents(tmp_path) == before
