"""Every row on photographs runs: from the folder that Flickr8k has, on 40 photographs, with tiny parts."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from hf_captionrl.apps.instruct.instructions import tiny_llama
from hf_captionrl.utils.model_files import model_path
from recipes import mle_clipcap, scorer, self_retrieval_clipcap, sle_blip, smile_blip
from reproduction import real
from tests.tiny import tiny_tower

PHOTOGRAPHS = Path(__file__).parents[1] / "photographs"
RECIPES = {
    f"recipes/{m.__name__.split('.')[-1]}.py": m
    for m in (mle_clipcap, scorer, self_retrieval_clipcap, sle_blip, smile_blip)
}
SHORT = ["--eval_steps", "1", "--save_steps", "1", "--disable_tqdm", "true"]
STEPS = {"photographs/flickr8k/sr-curriculum": "6"}  # three epochs
OWN = {
    "recipes/scorer.py": ["--num_train_epochs", "1", "--per_device_train_batch_size", "8", "--disable_tqdm", "true"],
    "recipes/sle_blip.py": [*SHORT, "--guard", "off", "--sample_images", "4", "--per_device_train_batch_size", "10"],
    "recipes/self_retrieval_clipcap.py": [*SHORT, "--guard", "off", "--total_train_batch_size", "10"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A data root like that of Flickr8k, and the folder of the runs."""
    data = tmp_path_factory.mktemp("data")
    shutil.copytree(PHOTOGRAPHS / "images", data / "images")
    shutil.copy(PHOTOGRAPHS / "dataset_photographs.json", data / "dataset_flickr8k.json")
    models = data / "models"
    for number in (0, 1):
        tiny_tower(models / f"google/efficientnet-b{number}", seed=number)
    rows = json.loads((data / "dataset_flickr8k.json").read_text())["images"]
    language = models / "HuggingFaceTB/SmolLM2-135M"
    for part in tiny_llama([s["raw"] for row in rows for s in row["sentences"]]):
        part.save_pretrained(language)
    (models / "sentence-transformers").mkdir()
    shutil.copytree(model_path("scenes:clip-reward"), models / "sentence-transformers/all-MiniLM-L6-v2")
    return data, tmp_path_factory.mktemp("runs")


# The curriculum starts from the row of maximum likelihood, and has both scorers.
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.endswith("/sle"))
        for name in real.preset_names()
        if name.startswith("photographs/flickr8k/")
    ],
)
def test_a_row_runs_on_photographs(folders, preset, monkeypatch):
    data, runs = folders
    monkeypatch.setenv("CAPTIONRL_CACHE", str(runs / "cache"))
    torch.manual_seed(0)
    for name in real.with_makers([preset], data):
        recipe, *words = real.arguments_of(name, data, 0, runs)
        folder = Path(words[words.index("--output_dir") + 1])
        if not (folder / "results.json").exists():
            steps = [] if recipe == "recipes/scorer.py" else ["--max_steps", STEPS.get(name, "2")]
            RECIPES[recipe].main([*words, *OWN.get(recipe, SHORT), *steps])
        results = json.loads((folder / "results.json").read_text())
        assert len(results["rows"]) >= 1
        assert (folder / "model" / "README.md").is_file()
        assert not list((folder / "model").rglob("*.bin"))
    if "recall_at_1" not in results["rows"][0]:
        assert {"cider_d", "rd100_recall_at_1"} <= results["rows"][0].keys()
    assert "photographs" not in json.dumps(results["rows"])


def test_every_photograph_has_its_licence():
    rows = json.loads((PHOTOGRAPHS / "dataset_photographs.json").read_text())["images"]
    assert {row["filename"] for row in rows} == {path.name for path in (PHOTOGRAPHS / "images").iterdir()}
    assert {row["license"].split("/")[-3] for row in rows} == {"by", "by-sa"}
    assert all("flickr.com" in row["source"] for row in rows)
    assert len(rows) == 40
