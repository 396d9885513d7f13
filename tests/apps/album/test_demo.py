"""`captionrl demo`: clicks in headless Chromium, compared with plain loops; and the functions behind the page."""

import json
import os
import runpy
from pathlib import Path

import pytest

from hf_captionrl import load_scorer, pipeline
from hf_captionrl.apps.album.demo import Demo, albums_of, named_models, serve
from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser
from hf_captionrl.hub.push import check_card
from hf_captionrl.hub.spaces import push_demo, write_demo_space
from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.model_files import model_path
from tests.apps.album.demo_server import compare, open_demo, pick, running_demo, wait_for_images
from tests.browser import CHROMIUM, Browser
from tests.hub.server import WRITE

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
HOSTILE = "<marquee>{{oops}}${alert(1)}"
MODELS = {"MLE": "scenes:blip-mle", HOSTILE: "scenes:blip-sr"}
CELLS = """[...document.querySelectorAll('#%s tbody tr')].map(
    (row) => [...row.querySelectorAll('td')].map((cell) => cell.textContent))"""


@pytest.fixture(scope="module")
def rows():
    return load_scenes(num_train=0, num_validation=0, num_test=45)["test"]


@pytest.fixture(scope="module")
def scorer():
    return load_scorer(model_path("scenes:siglip-held-out"))


def second_bag(rows):
    """The images behind '3 similar images (2)'."""
    return [row["image"] for row in rows if row["bag_id"] == "001"][:3]


def plain(models, scorer, images):
    """Rows of the page's table: captions by the pipeline, ranks and finds by a loop; a tie counts against the caption."""
    features = scorer.image_features(images)
    table = [[] for _ in images]
    for model in models.values():
        captions = pipeline(model, num_beams=3, max_new_tokens=40, device="cpu")(images)
        for own, caption in enumerate(captions):
            text = scorer.text_features([caption])[0]
            scores = [float((text * image).sum()) for image in features]
            rank = sum(score >= scores[own] for score in scores)
            best = own if rank == 1 else max((i for i in range(len(images)) if i != own), key=scores.__getitem__)
            table[own] += [caption, str(rank), str(best + 1)]
    return table


def lines_of_page(models, table):
    """A line per image and captioner, as the page shows them."""
    return [
        [str(number), name, *row[3 * place : 3 * place + 3]]
        for number, row in enumerate(table, start=1)
        for place, name in enumerate(models)
    ]


@pytest.mark.slow  # a server and a browser
@needs_chromium
def test_page_shows_the_numbers_of_the_library(rows, scorer, captioner, tmp_path):
    images = second_bag(rows)
    arguments = [f"--model={name}={model}" for name, model in reversed(MODELS.items())]
    (tmp_path / "temporary").mkdir()
    with running_demo(*arguments, temporary=tmp_path / "temporary") as url, Browser(1200, 1000) as page:
        open_demo(page, url, 3)
        pick(page, "3 similar images (2)", 3)
        compare(page, 3)
        shown = page.evaluate(CELLS % "compared")
        models = dict(reversed(MODELS.items()))
        assert shown == lines_of_page(models, plain(models, scorer, images))
        # The negative control: the other album would not do.
        assert shown != lines_of_page(models, plain(models, scorer, rows["image"][:3]))
        assert page.evaluate("document.querySelectorAll('marquee').length") == 0
        assert page.evaluate("document.title") == "captionrl demo"

        # An upload is a new album. A file that cannot be read is named, and the others are used.
        for name, row in (("own.png", rows[40]), ("two.png", rows[41])):
            row["image"].save(tmp_path / name)
        (tmp_path / "broken.png").write_bytes(b"no image")
        before = page.evaluate("[...document.querySelectorAll('#frame img')].map((e) => e.src)")
        node = page.call("Runtime.evaluate", expression="document.querySelector('input[type=file]')")
        files = [str(tmp_path / name) for name in ("own.png", "two.png", "broken.png")]
        page.call("DOM.setFileInputFiles", files=files, objectId=node["result"]["objectId"])
        wait_for_images(page, 2, before)
        page.wait("document.body.innerText.includes('broken.png cannot be used.')")
        compare(page, 2)
        expected = plain(models, scorer, [rows[40]["image"], rows[41]["image"]])
        assert page.evaluate(CELLS % "compared") == lines_of_page(models, expected)

        assert list((tmp_path / "temporary").glob("captionrl-demo-*/*/own.png"))
        events = [event["params"] for event in page.events if event.get("method") == "Network.requestWillBeSent"]
        addresses = {event["request"]["url"] for event in events}
        assert len(addresses) > 20
        assert [one for one in addresses if not one.startswith((url + "/", "data:", "blob:"))] == []
        # Leaving a page aborts the transfer of its images; everything shown was compared above.
        assert [problem for problem in page.problems() if "ERR_CONTENT_LENGTH_MISMATCH" not in problem] == []
    assert not list((tmp_path / "temporary").rglob("*.png")), "uploads are gone with the demo"


@pytest.fixture
def small(rows, scorer, captioner):
    return Demo({"MLE": captioner, "<b>": captioner}, scorer, {"bag": rows["image"][:2]})


def test_ranks_and_finds_are_those_of_a_loop(small, rows, scorer):
    images = second_bag(rows)
    table = small.compare(images)
    assert table.astype(str).to_numpy().tolist() == plain(
        {"MLE": MODELS["MLE"], "again": MODELS["MLE"]}, scorer, images
    )
    assert "<b>" not in table.to_html()


def test_names_of_models():
    assert list(named_models(None)) == ["MLE", "SMILE", "SR"]
    assert named_models(["A=me/b", "SR=outputs/a=b"]) == {"A": "me/b", "SR": "outputs/a=b"}
    for bad in (["A=b", "A=c"], ["=me/b"], ["A="], ["me/b"]):
        with pytest.raises(ValueError, match="--model"):
            named_models(bad)


def test_albums_of_a_folder(tmp_path):
    hidden = ("a/.x.jpg", "__MACOSX/a/._x.jpg", "a/Thumbs.db", "a/z.heic", "c/notes.txt")
    for name in ("b/2.PNG", "b/10.jpg", "a/x.JP2", "a/deep/y.tiff", "top.png", *hidden):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(b"")
    assert {name: [Path(file).name for file in files] for name, files in albums_of(tmp_path / "p").items()} == {
        "p": ["top.png"],
        "a": ["x.JP2"],
        "a/deep": ["y.tiff"],
        "b": ["10.jpg", "2.PNG"],
    }
    for name in ("c", "d"):  # no images, no folder
        with pytest.raises(FileNotFoundError, match=f"p/{name}"):
            albums_of(tmp_path / "p" / name)
    (tmp_path / "secret.png").write_bytes(b"")
    (tmp_path / "p" / "a" / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match=r"link\.png.* is not below"):
        albums_of(tmp_path / "p")


@pytest.mark.parametrize("more", [[], ["--host", "0.0.0.0"]])
def test_page_is_local_by_default(small, monkeypatch, capsys, more):
    import gradio
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    launched = {}

    def launch(self, **settings):
        launched.update(settings, analytics=(os.environ["GRADIO_ANALYTICS_ENABLED"], self.analytics_enabled))
        return None, "http://127.0.0.1:7860/", None

    monkeypatch.setattr(gradio.Blocks, "launch", launch)
    monkeypatch.setattr(gradio.Blocks, "block_thread", lambda self: None)
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    serve(small, build_parser().parse_args(["demo", "--no_browser", *more]))
    assert "http://127.0.0.1:7860 " in capsys.readouterr().out
    assert (launched["server_name"] == "127.0.0.1", launched["inbrowser"]) == (not more, False)
    assert launched["analytics"] == ("False", False)
    assert not [font for font in launched["theme"]._stylesheets if "//" in font]
    # A name of another site that points to this machine gets no answer, unless the page is public.
    page = Starlette(routes=[Route("/", lambda request: PlainTextResponse("page"))], **launched["app_kwargs"])
    assert TestClient(page, base_url="http://localhost:7860").get("/").text == "page"
    assert (TestClient(page, base_url="http://evil.test").get("/").text == "page") == bool(more)


MODELS_HUB_SPACE = {"MLE": "Salesforce/blip-image-captioning-base", "my SR": "me/blip-sr"}


def test_page_of_the_space_starts_the_demo(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr("hf_captionrl.cli.main", lambda argv: called.append(argv) or 0)
    for models, scorer in ((MODELS_HUB_SPACE, "openai/clip-vit-base-patch32"), (None, "scenes:siglip-held-out")):
        folder = write_demo_space(tmp_path / "space", models)
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(folder / "app.py"), run_name="__main__")
        assert stop.value.code == 0
        asked = build_parser().parse_args(called.pop())
        assert named_models(asked.model) == (models or named_models(None))
        assert asked.scorer == scorer
        assert (asked.host, asked.port, asked.no_browser) == ("0.0.0.0", 7860, True)


def test_card_of_the_space(tmp_path):
    folder = write_demo_space(tmp_path, {"<b>*A*</b>": "me/a|b"}, scorer="me/clip")
    card = (folder / "README.md").read_text()
    meta = check_card(card)
    assert (meta["sdk"], meta["app_file"]) == ("gradio", "app.py")
    assert "<b>" not in card.replace("\\<b", "")
    assert "me/clip" in card
    assert (folder / "requirements.txt").read_text().startswith("hf-captionrl[demo]")


def test_a_token_in_the_models_of_a_space_is_refused(tmp_path):
    with pytest.raises(ValueError, match="token"):
        write_demo_space(tmp_path / "space", {"A": "me/hf_" + "a" * 34})
    assert not (tmp_path / "space").exists()


def test_push_and_repeated_push(hub, monkeypatch, capfd):
    address = push_demo("tester/album", MODELS_HUB_SPACE, token=WRITE)
    repo = hub.repo("tester/album", "space")
    assert set(repo.files) - {".gitattributes"} == {"README.md", "app.py", "arguments.txt", "requirements.txt"}
    assert repo.private
    assert "tester/album" in address
    assert repo.files["arguments.txt"].decode().splitlines()[1:] == [
        f"--model={n}={m}" for n, m in MODELS_HUB_SPACE.items()
    ]
    # The command does the same, and knows the Space as one of ours.
    monkeypatch.setenv("HF_TOKEN", WRITE)
    command = ["push", "demo", "--type", "space", "--repo_id", "tester/album", "--json"]
    assert main([*command, "--model", "SR=me/blip-sr"]) == 0
    assert json.loads(capfd.readouterr().out)["repo_id"] == "tester/album"
    assert repo.files["arguments.txt"].decode().splitlines()[1:] == ["--model=SR=me/blip-sr"]
