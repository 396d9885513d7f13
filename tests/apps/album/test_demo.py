"""`captionrl demo`: clicks in headless Chromium, compared with plain loops; and the functions behind the page."""

import csv
import json
import os
import runpy
from pathlib import Path

import pytest
from PIL import Image

from hf_captionrl import load_captioner, load_scorer, pipeline
from hf_captionrl.apps.album import page
from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.options import DemoOptions
from hf_captionrl.apps.album.page import AlbumDemo, albums_of, named_models, serve
from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser
from hf_captionrl.hub import PushError
from hf_captionrl.hub.push import check_card
from hf_captionrl.hub.spaces import push_demo, write_demo_space
from hf_captionrl.scenes import load_scenes
from hf_captionrl.scenes.truth_checker import check
from hf_captionrl.utils.model_files import model_path
from tests.apps.album.conftest import write_images
from tests.apps.album.demo_server import TAB, compare, open_demo, pick, running_demo, wait_for_images
from tests.browser import CHROMIUM, Browser
from tests.hub.server import READ, WRITE

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
HOSTILE = "<marquee>{{oops}}${alert(1)}"
MODELS = {"MLE": "scenes:blip-mle", HOSTILE: "scenes:blip-sr"}
CELLS = """[...document.querySelectorAll('#compared td')].map((e) => [e.dataset.method, e.querySelector('.words').textContent,
    +e.dataset.rank, +e.dataset.found, e.querySelector('.finding').innerText.replace(/\\s+/g, ' ').trim()])"""
CARDS = """[...document.querySelectorAll('#album li')].map((e) => [e.querySelector('.words').textContent, +e.dataset.rank,
    e.querySelector('.margin').textContent])"""


@pytest.fixture(scope="module")
def rows():
    return load_scenes(num_train=0, num_validation=0, num_test=45)["test"]


@pytest.fixture(scope="module")
def scorer():
    return load_scorer(model_path("scenes:siglip-held-out"))


def second_bag(rows):
    """The rows behind '3 similar images (2)'."""
    return [row for row in rows if row["bag_id"] == "001"][:3]


def false(caption, facts):
    """What the page says of a caption's claims."""
    wrong = [claim.text for claim in check(caption, facts).wrong]
    return f"false: {', '.join(wrong)}" if wrong else "no false claim"


def plain(models, scorer, rows):
    """Rows of the page's table: captions by the pipeline, ranks and finds by a loop; a tie counts against the caption."""
    images = [row["image"] for row in rows]
    features = scorer.image_features(images)
    columns = []
    for name, model in models.items():
        found = []
        for own, caption in enumerate(pipeline(model, num_beams=3, max_new_tokens=40, device="cpu")(images)):
            text = scorer.text_features([caption])[0]
            scores = [float((text * image).sum()) for image in features]
            rank = sum(score >= scores[own] for score in scores)
            best = own if rank == 1 else max((i for i in range(len(images)) if i != own), key=scores.__getitem__)
            said = "finds its image" if best == own else f"finds image {best + 1}"
            said += f" {false(caption, rows[own]['facts'])}"
            found.append([name, caption, rank, best, f"rank {rank} of {len(images)} {said}"])
        columns.append(found)
    return [column[row] for row in range(len(images)) for column in columns]


@pytest.mark.slow  # a server and a browser
@needs_chromium
def test_page_shows_the_numbers_of_the_library(rows, scorer, tmp_path):
    bag = second_bag(rows)
    images = [row["image"] for row in bag]
    arguments = [f"--model={name}={model}" for name, model in MODELS.items()]
    (tmp_path / "temporary").mkdir()
    with running_demo(*arguments, temporary=tmp_path / "temporary") as url, Browser(1200, 1000) as page:
        open_demo(page, url, 3)
        pick(page, "3 similar images (2)", 3)
        compare(page, 3 * len(MODELS))
        shown = page.evaluate(CELLS)
        wanted = plain(MODELS, scorer, bag)
        assert shown == wanted
        # The negative control: the other album would not do.
        assert shown != plain(MODELS, scorer, [rows[i] for i in range(3)])
        assert page.evaluate("document.querySelectorAll('marquee').length") == 0
        assert page.evaluate("document.title") == "captionrl demo"

        page.evaluate(TAB.format("One caption per image"))
        page.wait("document.querySelector('#album-button')?.offsetParent")
        page.evaluate("document.querySelector('#captioner label:last-of-type input').click()")
        page.click("#album-button")
        page.wait("document.querySelectorAll('#album li').length === 3", 120)
        captioner = load_captioner(model_path("scenes:blip-sr"), device="cpu")
        chosen = describe_album(images, captioner, scorer)
        assert page.evaluate(CARDS) == [[c.caption, c.rank, f"margin {c.margin:+.3f}"] for c in chosen.images]
        distinct = sum(c.is_distinct for c in chosen.images)
        assert distinct > 1
        assert f"{distinct} of 3 images have" in page.evaluate("document.querySelector('#album').innerText")

        # Uploads start a new album; more are added to it. A file that cannot be read is named, and the others are used.
        own = [rows[8], rows[9]]
        own[0]["image"].save(tmp_path / "own.png")
        own[1]["image"].save(tmp_path / "two.png")
        (tmp_path / "broken.png").write_bytes(b"no image")
        page.evaluate(TAB.format("Side by side"))
        for names, shown in ((["own.png"], 1), (["two.png", "broken.png"], 3)):
            before = page.evaluate("[...document.querySelectorAll('#frame img')].map((e) => e.src)") * (shown == 1)
            node = page.call("Runtime.evaluate", expression="document.querySelector('#frame input[type=file]')")
            files = [str(tmp_path / name) for name in names]
            page.call("DOM.setFileInputFiles", files=files, objectId=node["result"]["objectId"])
            wait_for_images(page, shown, before)
        assert page.evaluate("document.querySelector('#picker input').value") == ""
        compare(page, 2 * len(MODELS))
        assert page.evaluate(CELLS) == plain(MODELS, scorer, own)
        page.wait("document.querySelector('#compared [role=status]')")
        note = page.evaluate("document.querySelector('#compared [role=status]').innerText")
        assert note.startswith("broken.png cannot be used.")
        assert note.endswith("The other images are used.")

        assert list((tmp_path / "temporary").glob("captionrl-demo-*/*/own.png"))
        events = [event["params"] for event in page.events if event.get("method") == "Network.requestWillBeSent"]
        asked = {event["request"]["url"] for event in events}
        assert len(asked) > 20
        assert [address for address in asked if not address.startswith((url + "/", "data:", "blob:"))] == []
        # Leaving a page aborts the transfer of its images; everything shown was compared above.
        assert [problem for problem in page.problems() if "ERR_CONTENT_LENGTH_MISMATCH" not in problem] == []
        # The browser refuses and reports what the policy forbids.
        page.evaluate(
            "new Promise((done) => { const i = new Image(); i.onerror = done; i.src = 'http://127.0.0.1:9/x'; })"
        )
        assert any("Content Security Policy" in problem for problem in page.problems())
    assert not list((tmp_path / "temporary").rglob("*.png")), "uploads are gone with the demo"


SMALL = DemoOptions(max_images=3, num_candidates=3, max_new_tokens=8)


@pytest.fixture
def small(rows, scorer, captioner):
    albums = {"bag": [row["image"] for row in rows.select(range(2))]}
    return AlbumDemo({"MLE": captioner}, scorer, albums, SMALL)


def test_uploaded_files_and_the_exported_table(small, rows, tmp_path):
    paths = [
        str(write_images([row["image"]], ["same.png"], tmp_path / str(n)) / "same.png")
        for n, row in enumerate(rows.select(range(2)))
    ]
    assert small.compare(paths) == small.compare(small.album("bag"))
    shown, table = small.distinct(paths, "MLE")
    assert shown == small.distinct(small.album("bag"), "MLE")[0]
    with open(table, encoding="utf-8-sig", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["image_id"] for row in found] == ["1: same.png", "2: same.png"]
    assert all(row["caption"] and row["caption"] in shown for row in found)
    assert str(tmp_path) not in Path(table).read_text(encoding="utf-8"), "no local path"
    Image.new("CMYK", (40, 30), (10, 20, 30, 40)).save(tmp_path / "print.jpg")
    assert small.compare([str(tmp_path / "print.jpg")]).count("<td") == 1


def test_unusable_uploads_are_refused(small, tmp_path):
    (tmp_path / "secret-folder").mkdir()
    bad = tmp_path / "secret-folder" / "no.png"
    bad.write_text("<script>")
    with pytest.raises(ValueError, match=r"^no\.png cannot be used") as failure:
        small.compare([str(bad)])
    assert "secret-folder" not in str(failure.value)
    bag = small.album("bag")
    shown = small.compare([bag[0], str(bad)])
    assert shown.count("<td") == 1, "the other image is used"
    assert "no.png cannot be used." in shown
    assert "secret-folder" not in shown
    _, table = small.distinct([str(bad), bag[1]], "MLE")
    assert Path(table).read_text(encoding="utf-8-sig").splitlines()[1].startswith("image.png,")
    assert small.uploads([bag[0], str(bad)]) == [str(bad)]
    for call, name in (
        (lambda: small.compare([]), "frame"),
        (lambda: small.distinct(bag * 2, "MLE"), "max_images"),
        (lambda: small.distinct(bag, "SR"), "captioner 'SR'"),
        (lambda: small.album("x"), "album 'x'"),
        (lambda: AlbumDemo(small.captioners, small.scorer, {"bag": bag}, DemoOptions(max_images=1)), "'bag'"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
    # Without max_images there is no limit.
    assert len(AlbumDemo(small.captioners, small.scorer, {"many": bag * 20}).album("many")) == 40


def test_names_of_models():
    assert list(named_models(None)) == ["MLE", "SMILE", "SR"]
    assert named_models(["A=me/b", "me/blip-sr", "outputs/model/"]) == {
        "A": "me/b",
        "blip-sr": "me/blip-sr",
        "model": "outputs/model/",
    }
    with pytest.raises(ValueError, match="Two captioners are called 'b'"):
        named_models(["a/b", "c/b"])
    for bad in ("=me/b", "A=", ""):
        with pytest.raises(ValueError, match="Use NAME=MODEL"):
            named_models([bad])


def test_albums_of_a_folder(tmp_path, caplog):
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
    assert "2 other files (1 .heic, 1 .txt)" in caplog.text
    for name in ("c", "d"):  # no images, no folder
        with pytest.raises(FileNotFoundError, match=f"p/{name}"):
            albums_of(tmp_path / "p" / name)
    (tmp_path / "secret.png").write_bytes(b"")
    (tmp_path / "p" / "a" / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match=r"link\.png.* is not below"):
        albums_of(tmp_path / "p")


def test_album_of_files_is_shown_without_loss(small, rows, tmp_path, monkeypatch):
    names = [f"{number}.tiff" for number in range(3)]
    write_images(rows["image"][:3], names, tmp_path)
    paths = [str(tmp_path / name) for name in names]
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    demo = AlbumDemo(small.captioners, small.scorer, {"files": paths}, SMALL)
    shown = demo.album("files")
    assert [Path(path).suffix for path in shown] == [".png"] * 3
    assert [Image.open(path).tobytes() for path in shown] == [Image.open(path).tobytes() for path in paths]
    assert demo.album("files") == shown  # written once
    assert demo.compare(shown) == demo.compare(paths)


def test_embedded_albums(rows):
    albums = albums_of(None)
    assert [len(images) for images in albums.values()] == [3] * 6 + [5] * 6 + [7] * 6
    assert albums["3 similar images (2)"] == [row["image"] for row in second_bag(rows)]


def test_missing_gradio_gives_one_error_line(monkeypatch, capsys):
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("captionrl demo: error: The demo needs gradio")
    assert "pip install 'hf-captionrl[demo]'" in said
    assert len(said.splitlines()) == 1


def test_page_is_local_by_default(small, monkeypatch):
    import gradio

    given = {}

    def launch(self, **settings):
        given.update(settings)
        given["analytics"] = (os.environ["GRADIO_ANALYTICS_ENABLED"], self.analytics_enabled)
        return None, "http://127.0.0.1:7860/", None

    monkeypatch.setattr(gradio.Blocks, "launch", launch)
    monkeypatch.setattr(gradio.Blocks, "block_thread", lambda self: None)
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    monkeypatch.setattr(page, "load_demo", lambda arguments: small)
    assert main(["demo", "--no_browser"]) == 0
    assert (given["share"], given["server_name"], given["inbrowser"]) == (False, "127.0.0.1", False)
    assert given["analytics"] == ("False", False)
    assert not [font for font in given["theme"]._stylesheets if "//" in font]
    # With --share the public address is announced.
    monkeypatch.setattr(gradio.Blocks, "launch", lambda self, **_: (None, "http://127.0.0.1:7860/", "https://x.test/"))
    told = []
    serve(small, DemoOptions(share=True, no_browser=True), told.append)
    assert told == ["https://x.test"]
    (guard,) = given["app_kwargs"]["middleware"]
    assert not guard.kwargs["hosts"].accepts(["evil.test"])


def test_port_in_use_is_refused(small, monkeypatch):
    import gradio

    def launch(self, **settings):
        raise OSError("Cannot find empty port in range: 80-80.")

    monkeypatch.setattr(gradio.Blocks, "launch", launch)
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("GRADIO_TEMP_DIR", "")
    with pytest.raises(ValueError, match="port 80"):
        serve(small, DemoOptions(port=80))


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
        assert (asked.host, asked.port, asked.no_browser, asked.share) == ("0.0.0.0", 7860, True, False)


def test_card_of_the_space(tmp_path):
    folder = write_demo_space(tmp_path, {"<b>*A*</b>": "me/a|b"}, scorer="me/clip")
    card = (folder / "README.md").read_text()
    meta = check_card(card)
    assert (meta["sdk"], meta["app_file"]) == ("gradio", "app.py")
    assert "<b>" not in card.replace("\\<b", "")
    assert "me/clip" in card
    assert (folder / "requirements.txt").read_text().startswith("hf-captionrl[demo]")


def test_unusable_models_of_a_space_are_refused(tmp_path):
    for models, message in (
        ({"A": "outputs/sr/model"}, "is a local folder"),
        ({"A": "me/a\n--share"}, "invisible character"),
        ({"A": "scenes:nothing"}, "no shipped model"),
        ({"A": "me/hf_" + "a" * 34}, "token"),
    ):
        with pytest.raises(ValueError, match=message):
            write_demo_space(tmp_path / "space", models)
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
    hub.fail("POST .*/commit/", 500)
    with pytest.raises(PushError, match="500"):
        push_demo("tester/album", token=WRITE, sleep=lambda seconds: None)
    hub.end_fault()
    hub.add("tester/other", {"app.py": b"print()"}, repo_type="space")
    with pytest.raises(FileExistsError, match="has other content"):
        push_demo("tester/other", token=WRITE)
    with pytest.raises(PermissionError):
        push_demo("tester/album", token=READ)
    assert main(["push", "self_retrieval", "--type", "space", "--repo_id", "me/self_retrieval", "--model", "A=b"]) == 2
    assert "--model and --scorer belong to the demo" in capfd.readouterr().err
