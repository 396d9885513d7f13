"""Push, then download in a new process and folder: captions are equal, and the code examples run."""

import json

import pytest
import torch

from hf_captionrl.hub import push_folder, push_metric
from tests.hub.conftest import holders_of_tokens, running_hub
from tests.hub.folders import publishable
from tests.hub.server import READ, WRITE
from tests.hub.test_push import fresh_process
from tests.tiny import tiny_captioner, tiny_images

SETTINGS = {"num_beams": 2, "max_new_tokens": 8}


def captions(captioner):
    return captioner.generate(**captioner.encode_images(tiny_images(3)), **SETTINGS).captions


def with_lora(base, base_name):
    """A captioner with a LoRA that generates other captions than its base model."""
    base.add_lora("language", r=4)
    torch.manual_seed(0)
    for name, parameter in base.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0, 0.3)
    base.model.peft_config["default"].base_model_name_or_path = str(base_name)
    return base


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A Hub with all models, their captions before the push, and those of a new process."""
    folder = tmp_path_factory.mktemp("hub")
    for i, image in enumerate(tiny_images(3)):
        image.save(folder / f"{i}.png")
    tiny_images(1)[0].save(folder / "photo.jpg")
    with running_hub(folder) as hub:
        want = {}

        def publish(name, family, captioner=None, **facts):
            captioner = captioner or tiny_captioner(family)
            want[f"tester/{name}"] = captions(captioner)
            made = publishable(folder / name, family, captioner, model_id=name, **facts)
            return push_folder(made, name, token=WRITE)

        publish("blip", "blip", dataset_id="tester/photos")
        publish("clipcap", "clipcap")
        publish("prompted", "blip", tiny_captioner("blip", prompt="a picture of "))
        adapter = {"is_adapter": True, "base_model": "tester/blip"}
        publish("lora", "blip", with_lora(tiny_captioner("blip"), "tester/blip"), **adapter)
        base = folder / "base"  # a local folder
        tiny_captioner("blip").save_pretrained(base)
        publish("merged", "blip", with_lora(tiny_captioner("blip"), base), base_model="tiny-blip")
        push_metric("self_retrieval", "tester", private=False, token=WRITE)
        asked = {
            "captioners": dict.fromkeys(want, "main"),
            "pipelines": dict.fromkeys(("tester/blip", "tester/clipcap"), "main"),
            "cards": list(want),
            "photo": str(folder / "photo.jpg"),
            "images": [str(folder / f"{i}.png") for i in range(3)],
            "generation": SETTINGS,
            "prompt": "",
        }
        yield hub, want, ask(asked, hub, folder / "fresh"), asked, folder
        assert holders_of_tokens(hub, folder) == []


def ask(asked, hub, home):
    run = fresh_process(["-m", "tests.hub.fresh_process"], hub, home, READ, json.dumps(asked))
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.partition("FOUND ")[2])


def test_captions_are_identical(world):
    _, want, found, _, _ = world
    for name, captions in want.items():
        assert found[name] == captions, name
        assert len(set(captions)) > 1  # captions differ between images
    for name in ("tester/blip", "tester/clipcap"):
        assert found[f"pipeline {name}"] == want[name]
    assert want["tester/lora"] == want["tester/merged"] != want["tester/blip"]


@pytest.mark.parametrize("name", ["blip", "clipcap", "prompted", "lora", "merged"])
def test_code_on_the_card_runs_as_printed(world, name):
    hub, _, found, _, _ = world
    said = found[f"card tester/{name}"]
    assert len(said) == 2
    assert said[0]
    assert said[0] == said[1]
    card = hub.repo(f"tester/{name}").files["README.md"].decode()
    code = "".join(block.partition("```")[0] for block in card.split("```python")[1:])
    assert code.count(f'"tester/{name}", revision="main"') > 0 == code.count('"."')


@pytest.mark.slow  # a fresh process
def test_stock_models_need_transformers_only(world):
    hub, want, _, asked, folder = world
    first = list(hub.repo("tester/blip").commits)[1]
    stock = {**asked, "captioners": {}, "cards": [], "pipelines": {"tester/blip": first, "tester/clipcap": "main"}}
    found = ask({**stock, "without_package": True}, hub, folder / "stock")
    assert found["pipeline tester/blip"] == want["tester/blip"]
    assert "refused" in found["pipeline tester/clipcap"]  # ClipCap needs the package
    assert "clipcap" in found["pipeline tester/clipcap"]


METRIC = """
import evaluate
metric = evaluate.load("tester/self_retrieval", revision=%r)
found = metric.compute(
    predictions=["a red kite", "a kite"], references=["sky", "field"], text_features=[[0.8, 0.6], [0.6, 0.8]],
    image_features={"field": [1.0, 0.0], "sky": [0.6, 0.8]}, bags=[[0, 1]], num_bootstrap=0,
)
print(found["ranks"])
"""


@pytest.mark.slow  # fresh processes
def test_metric_is_loaded_from_its_space_by_name(world):
    hub, _, _, _, folder = world
    repo = hub.repo("tester/self_retrieval", "space")
    first = list(repo.commits)[1]
    run = fresh_process(["-c", METRIC % first], hub, folder / "metric", READ)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "[2, 1]" in run.stdout
    assert 'evaluate.load("tester/self_retrieval")' in repo.files["README.md"].decode()
    assert ("GET", f"/spaces/tester/self_retrieval/resolve/{first}/self_retrieval.py", 200) in hub.requests
