"""Every command of README.md runs (tests/test_fresh_processes.py runs its Python), on small stand-ins for the models and photographs that it names."""

import base64
import importlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from PIL import Image, PngImagePlugin

from hf_captionrl.cli.main import main
from hf_captionrl.cli.train import METHODS, _with_config
from hf_captionrl.scenes import load_scenes
from tests.browser import CHROMIUM, Browser
from tests.test_docs import blocks
from tests.tiny import write_photos
from tests.tiny.chat import tiny_chat

README = Path(__file__).parents[1] / "README.md"
BLIP, SMOL = "Salesforce/blip-image-captioning-base", "HuggingFaceTB/SmolVLM-256M-Instruct"
# The smallest training that still passes through every part of a recipe.
SHORT = [
    *("--max_steps", "1", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1"),
    *("--max_test_images", "4", "--generation_max_new_tokens", "6", "--report_to", "none"),
    *("--scorer_name_or_path", "scenes:clip-reward", "--held_out_scorer_name_or_path", "scenes:siglip-held-out"),
    *("--perplexity_name_or_path", "none"),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photographs with captions in metadata.jsonl, the same ones without, and a Karpathy-split JSON."""
    root = tmp_path_factory.mktemp("readme")
    scenes = load_scenes(num_train=0, num_validation=0, num_test=30)["test"]
    karpathy = []
    for folder in ("captioned/photos", "bare/photos/sub", "karpathy/coco/images"):
        captions = write_photos(root / folder, scenes)
        if folder != "captioned/photos":
            captions.unlink()
    for index, row in enumerate(scenes):
        sentences = [{"raw": caption, "tokens": caption.split()} for caption in row["captions"]]
        split = "train" if index < 18 else "val" if index < 24 else "test"
        karpathy.append({"filename": f"{index}.png", "imgid": index, "split": split, "sentences": sentences})
    (root / "karpathy/dataset_coco.json").write_text(json.dumps({"images": karpathy}))
    model, processor = tiny_chat("idefics3")
    model.save_pretrained(root / "smol")
    processor.save_pretrained(root / "smol")
    return root


def run(line, root):
    """Run one command of the page in this process."""
    words = shlex.split(line.replace(BLIP, "scenes:blip-mle").replace(SMOL, str(root / "smol")))
    assert words[0] == "captionrl"
    if words[1] != "train":
        extra = ["--scorer", "scenes:siglip-held-out", "--language_model", "none"] if words[1] == "evaluate" else []
        assert main([*words[1:], *extra]) == 0
        return
    recipe = METHODS[words[2]][0]
    arguments = _with_config(words[3:], recipe)
    if "--model_name_or_path" not in arguments:
        arguments += ["--model_name_or_path", "scenes:blip-mle"]
    module = importlib.import_module(f"recipes.{recipe.removesuffix('.py')}")
    assert module.main([*arguments, *SHORT]).is_file()


def commands(block):
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip()]


SHELL = [block for block in blocks(README, "bash") if "make demo" not in block]
PYTHON = blocks(README, "python")

STYLE = """body { font: 16px/1.5 sans-serif; margin: 24px auto; max-width: 838px; padding: 0 16px }
code { font-size: 85% } pre { background: #f6f8fa; overflow: auto; padding: 16px } img { max-width: 100% }
table { border-collapse: collapse; display: block; overflow: auto } td, th { border: 1px solid #d1d9e0; padding: 6px 13px }"""
"""Widths of a page on GitHub."""


def first_part():
    """README up to its second heading."""
    return README.read_text(encoding="utf-8").split("## Which path")[0]


def first_screens(folder):
    """Write README's first part as a desktop and a phone show it, and return what is wrong with it."""
    page, wrong = folder / "readme.html", []
    body = MarkdownIt().enable("table").render(README.read_text(encoding="utf-8"))
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><base href='{README.parent.as_uri()}/'><style>{STYLE}</style>"
    page.write_text(f"<!doctype html>{head}{body}", encoding="utf-8")
    metadata = PngImagePlugin.PngInfo()
    metadata.add_text("README", first_part())
    for name, width, height in (("desktop", 1280, 800), ("phone", 390, 844)):
        with Browser(width, height) as browser:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": name == "phone"}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.open(page.as_uri())
            end = browser.evaluate("document.querySelector('h2').getBoundingClientRect().top")
            clip = {"x": 0, "y": 0, "width": width, "height": end, "scale": 1}
            shot = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
            with Image.open(io.BytesIO(base64.b64decode(shot))) as image:
                image.convert("RGB").quantize(128).save(folder / f"readme_{name}.png", optimize=True, pnginfo=metadata)
            if browser.evaluate("document.documentElement.scrollWidth") > width:
                wrong.append(f"{name}: the page is wider than the screen")
            if browser.evaluate("document.querySelector('img').getBoundingClientRect().top") > height:
                wrong.append(f"{name}: the picture is below the first screen")
            code = "[...document.querySelectorAll('pre')].slice(0, 2).map((e) => e.scrollWidth - e.clientWidth)"
            if name == "desktop" and (wider := browser.evaluate(code)) != [0, 0]:
                wrong.append(f"the first programs are wider than their boxes by {wider} pixels")
    return wrong


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_first_screens(tmp_path):
    assert first_screens(tmp_path) == []


def test_the_committed_pictures_show_this_readme():
    for name in ("desktop", "phone"):
        with Image.open(README.parent / f"docs/images/readme_{name}.png") as picture:
            assert picture.info["README"] == first_part(), "draw them again with first_screens"


def test_the_paths_have_a_block_each():
    assert [len(SHELL), len(PYTHON)] == [5, 1]
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 110


def test_the_files_to_read_have_the_lines_that_stand_beside_them():
    listed = re.findall(r"`(\w+/\w+\.py)` \((\d+)\)", README.read_text(encoding="utf-8"))
    package = README.parent / "hf_captionrl"
    assert len(listed) == 6
    assert {name: len((package / name).read_text(encoding="utf-8").splitlines()) for name, _ in listed} == {
        name: int(number) for name, number in listed
    }


def test_photos_without_captions(photos, monkeypatch, capsys):
    monkeypatch.chdir(photos / "bare")
    run(commands(SHELL[0])[0], photos)
    assert "captions of 30 of 30 images" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("captions.jsonl").read_text().splitlines()]
    assert {row["image_id"] for row in rows} == {f"sub/{index}.png" for index in range(30)}


def test_photos_with_captions_and_measuring(photos, monkeypatch, capsys):
    monkeypatch.chdir(photos / "captioned")
    train, caption = commands(SHELL[1])
    run(f"{train} --max_completion_length 20", photos)  # the stand-in for CLIP reads 38 tokens
    assert Path("outputs/photos/model/model.safetensors").is_file()
    run(caption, photos)
    run(commands(SHELL[0])[0], photos)
    capsys.readouterr()
    run(commands(SHELL[2])[0], photos)
    assert "after" in capsys.readouterr().out


def test_a_row_of_a_paper(photos, monkeypatch):
    monkeypatch.chdir(photos / "karpathy")
    run(commands(SHELL[3])[0], photos)


def test_a_chat_model(photos, monkeypatch):
    monkeypatch.chdir(photos / "captioned")
    run(commands(SHELL[4])[0], photos)
    assert Path("outputs/chat/model/adapter_model.safetensors").is_file()
