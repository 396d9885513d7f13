"""Model cards: they contain the numbers of the run, their code examples run, and unfinished cards raise."""

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import yaml
from huggingface_hub import ModelCard, eval_result_entries_to_yaml, parse_eval_result_entries
from transformers.pipelines import SUPPORTED_TASKS

from hf_captionrl.apps.experiments.arguments import load_row
from hf_captionrl.cli import main
from hf_captionrl.hub import (
    check_card,
    folder_contents,
    push_folder,
    render_model_card,
    write_manifest,
    write_model_card,
)
from hf_captionrl.hub.cards import write_unmeasured_card
from hf_captionrl.scenes.dataset import CONFIGURATIONS
from hf_captionrl.trainers.publishing import write_run
from tests.apps.boosting.doubles import endpoint_answer, scenes
from tests.apps.boosting.server import ChatServer
from tests.apps.boosting.test_command import photographs
from tests.captioners.models import captioner_of
from tests.hub.folders import FACTS, make_results, make_row, publishable
from tests.hub.server import WRITE
from tests.tiny import tiny_captioner, tiny_images


def section(card, heading):
    return card.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_metadata_is_read_back_by_the_hub_client():
    data = ModelCard(render_model_card(make_results(), FACTS)).data
    assert data.license == "bsd-3-clause"
    assert data.base_model == "Salesforce/blip-image-captioning-base"
    assert data.pipeline_tag == "image-text-to-text"
    assert {result.task_type for result in data.eval_results} == {"image-text-to-text"}
    assert "arxiv:2306.13460" in data.tags
    values = {result.metric_type: result for result in data.eval_results}
    row = make_row("SMILE")
    assert {key: value.metric_value for key, value in values.items()} == {
        key: value for key, value in row.items() if key != "name" and not key.endswith("_ci")
    }
    assert values["rd100_recall_at_1"].metric_args == {"interval_95": [0.637, 0.679]}
    assert values["length"].dataset_split == "test"


def test_terms_in_words_are_a_licence_without_an_identifier():
    terms = "trained on Flickr8k: research use"
    assert load_row(Path("recipes/configs"), "photographs/flickr8k/sr-curriculum").settings["model_license"] == terms
    card = render_model_card(make_results(), replace(FACTS, license=terms))
    data = ModelCard(card).data
    assert (data.license, data.license_name) == ("other", "trained-on-flickr8k-research-use")
    assert section(card, "Licence").strip().startswith(f"{terms}.")


def test_card_has_all_required_parts():
    card = render_model_card(make_results(), FACTS)
    assert re.findall(r"^## (.*)$", card, re.MULTILINE) == [
        *("How to use it", "Data", "Objective", "Results", "Decoding", "Scorer", "Limitations", "Licence", "Citation")
    ]
    # A retrieval number stands beside the share of what is hallucinated.
    limitations = section(card, "Limitations")
    assert "| SMILE | 0.658 ±0.021 | 0.325 | 0.760 |" in limitations
    assert "| MLE | 0.528 | 0.065 | 0.760 |" in limitations
    assert "a share of 0.325 is wrong" in limitations
    assert "siglip-held-out @ 1f2e (float32)" in section(card, "Scorer")
    assert "at most 77 tokens" in section(card, "Scorer")
    assert "0.013" in section(card, "Scorer")
    assert "`num_beams=3`, `max_new_tokens=12`" in section(card, "Decoding")
    assert "seed 3" in section(card, "Results")
    assert "torch 2.15" in card
    assert not re.search(r"\{\{|\{%|Undefined|None\b", card)


@pytest.mark.parametrize(
    ("changes", "there", "not_there"),
    [
        ({}, ["V_D", "whole vocabulary, so"], ["lambda"]),
        ({"mle_weight": 0.01}, ["V_D", r"\lambda = 0.01"], []),
        ({"first_token": "smile"}, ["The first word, too"], ["whole vocabulary, so"]),
        ({"mle_weight": 1.0}, ["Maximum likelihood"], ["V_D", "lambda"]),
        ({"objective": "mle"}, ["Maximum likelihood"], ["V_D", "lambda"]),
        (
            {"objective": "self_retrieval", "reward": "Found by *X*."},
            ["REINFORCE", r"Found by \*X"],
            ["V_D", "lambda"],
        ),
        ({"objective": "sle", "reward": "CIDEr-D and distance."}, ["REINFORCE", "CIDEr-D and distance"], ["V_D"]),
    ],
)
def test_formula_matches_the_objective(changes, there, not_there):
    objective = section(render_model_card(make_results(), replace(FACTS, **changes)), "Objective")
    assert all(text in objective for text in there)
    assert not any(text in objective for text in not_there)


def not_measured(reason, *keys):
    return dict.fromkeys(keys) | {f"{key}_reason": reason for key in keys}


def test_missing_measurements_are_listed():
    reason = "photographs have no known truth"
    card = render_model_card(make_results(**not_measured(reason, "hallucination", "fact_recall")), FACTS)
    assert f"not run: {reason}" in section(card, "Limitations")
    assert "was not measured" in section(card, "Limitations")
    assert "hallucination" not in {result.metric_type for result in ModelCard(card).data.eval_results}
    results = make_results()
    del results["rows"][1]["fact_recall"]
    with pytest.raises(ValueError, match="has no fact_recall"):
        render_model_card(results, FACTS)


def test_malicious_texts_are_escaped():
    text = "a | b <script>alert(1)</script> `x`\n# heading"
    facts = replace(FACTS, dataset_description=text, prompt='"); import os #\n```\n', row="<b>S|M")
    results = make_results()
    results["rows"][1]["name"] = "<b>S|M"
    card = render_model_card(results, facts)
    assert "<script>" not in card
    assert "\n# heading" not in card
    assert r"\<b\>S\|M" in card
    for code in re.findall(r"```python\n(.*?)\n```", card, re.DOTALL):
        compile(code, "card", "exec")
    assert card.count("```") == 6


@pytest.mark.parametrize(
    ("row", "facts", "name"),
    [
        ({}, {"objective": "magic"}, "objective"),
        ({}, {"mle_weight": 1.5}, "mle_weight"),
        ({}, {"row": "base"}, "'base'"),
        ({"hallucination": None}, {}, "hallucination"),
        ({"rd100_recall_at_1": 65.8}, {}, "rd100_recall_at_1"),
        ({}, {"dataset_description": f"with hf_{'a' * 30}"}, "token"),
    ],
)
def test_cards_that_are_unfinished_or_must_not_be_published_raise(tmp_path, row, facts, name):
    with pytest.raises(ValueError, match=re.escape(name)):
        write_model_card(tmp_path / "model", make_results(**row), replace(FACTS, **facts))
    assert not (tmp_path / "model").exists()


def blocks(card):
    return re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)


def run_block(code):
    out, names = io.StringIO(), {}
    with contextlib.redirect_stdout(out):
        exec(compile(code, "card", "exec"), names)
    return out.getvalue().strip(), names


@pytest.mark.parametrize("name", ["llava", "git", "vit-gpt2"])  # the others: test_end_to_end.py
def test_code_of_the_card_runs_as_printed(name, tmp_path, monkeypatch):
    captioner = captioner_of(name, prompt="What is in the picture?" if name == "llava" else "")
    publishable(tmp_path / "model", captioner=captioner, model_id="model", generation={"max_new_tokens": 4})
    tiny_images(1, size=64)[0].save(tmp_path / "model" / "photo.jpg")
    monkeypatch.chdir(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    said = [run_block(code)[0] for code in blocks(card)]
    assert len(said) == (2 if name == "llava" else 1)
    assert said[0]
    assert said[0] == said[-1]
    assert ("apply_chat_template" in card) == (name == "llava")
    assert "https://huggingface.co/papers/2306.13460" in card


@pytest.mark.parametrize("family", ["blip", "chat"])
def test_adapter_card_contains_the_pinned_base_model(family):
    facts = replace(FACTS, family=family, prompt="Say.", is_adapter=True, base_model="o/base", base_revision="b" * 40)
    card = render_model_card(make_results(), facts)
    data = yaml.safe_load(card.split("---")[1])
    assert (data["base_model"], data["base_model_relation"], data["library_name"]) == ("o/base", "adapter", "peft")
    assert f'"o/base", revision="{"b" * 40}"' in card
    assert "PeftModel.from_pretrained" in card
    for code in blocks(card):
        compile(code, "card", "exec")


@pytest.mark.parametrize(("objective", "paper"), [("sle", "2003.03749"), ("mle", None)])
def test_cards_link_the_paper_of_their_objective(objective, paper, tmp_path):
    tiny_captioner("blip").save_pretrained(tmp_path)
    write_run(tmp_path, training={"objective": objective})
    unmeasured = write_unmeasured_card(tmp_path, model_id="me/model").read_text()
    measured = render_model_card(make_results(), replace(FACTS, objective=objective, reward="CIDEr-D."))
    for card in (unmeasured, measured):
        linked = re.findall(r"\(https://huggingface.co/papers/(.*?)\)", card)
        assert linked == ([paper] if paper else [])
        assert [tag for tag in ModelCard(card).data.tags if "arxiv" in tag] == [f"arxiv:{name}" for name in linked]
        assert ModelCard(card).data.pipeline_tag in SUPPORTED_TASKS


def test_benchmarks_have_tasks_of_their_configurations():
    """The keys that the Hub documents; it also wants a known framework, which cannot be checked here."""
    for name, configurations in (("truematch", ["default"]), ("scenes", list(CONFIGURATIONS))):
        benchmark = yaml.safe_load(Path("hub_cards", f"{name}.eval.yaml").read_text())
        assert benchmark.keys() == {"name", "description", "evaluation_framework", "tasks"}
        assert [(task["config"], task["split"]) for task in benchmark["tasks"]] == [
            (c, "test") for c in configurations
        ]
        entries = [{"dataset": {"id": "me/bench", "task_id": task["id"]}, "value": 0.5} for task in benchmark["tasks"]]
        assert eval_result_entries_to_yaml(parse_eval_result_entries(entries)) == entries


def test_card_of_a_model_without_results(tmp_path, capfd):
    folder = tmp_path / "smile run"
    tiny_captioner("blip").save_pretrained(folder)
    assert main(["push", str(folder), "--repo_id", "smile"]) == 2
    assert f"captionrl card {folder}" in capfd.readouterr().err
    assert main(["card", str(folder), "--base_model", "someone/blip", "--dataset", "photos"]) == 0
    message = capfd.readouterr().out
    assert "without results" in message
    assert "--license" in message
    card = (folder / "README.md").read_text()
    assert check_card(card)["license"] == "other"
    assert "No results are in this card" in card
    assert "finetuned from someone/blip on photos" in card
    assert main(["card", str(folder), "--check"]) == 0
    assert main(["push", str(folder), "--dry_run"]) == 0


def test_texts_that_must_not_be_published_raise(tmp_path, capfd):
    tiny_captioner("blip").save_pretrained(tmp_path / "model")
    assert main(["card", str(tmp_path / "model"), "--base_model", WRITE]) == 2
    assert "an access token" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["card", str(tmp_path / "empty")]) == 2
    assert "no captioner.json" in capfd.readouterr().err
    assert main(["card", str(tmp_path / "nowhere")]) == 2


def test_captioner_push_to_hub(hub, monkeypatch):
    captioner = tiny_captioner("git")
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert "commit" in captioner.push_to_hub("git-tiny")
    repo = hub.repo("tester/git-tiny")
    assert repo.private
    assert {"README.md", "training_manifest.json", "model.safetensors"} <= set(repo.files)
    assert 'load_captioner("tester/git-tiny", revision="' in repo.files["README.md"].decode()
    # A key in the prompt is not uploaded.
    captioner.prompt = f"key {WRITE} "
    with pytest.raises(ValueError, match="contains an access token"):
        captioner.push_to_hub("leak")
    assert "tester/leak" not in {name for _, name in hub.repos}


def test_galleries_of_local_images_are_only_uploaded_on_request(hub, tmp_path, monkeypatch, capfd):
    folder = publishable(tmp_path / "model")
    (folder / "gallery.html").write_text("<img src='data:image/jpeg;base64,AAAA'>")
    (folder / "curves.png").write_bytes(b"\x89PNG")
    monkeypatch.setenv("HF_TOKEN", WRITE)
    assert "gallery.html" in folder_contents(folder).left_out
    assert "curves.png" in folder_contents(folder).published
    assert main(["push", str(folder), "--repo_id", "smile", "--dry_run"]) == 0
    assert "- gallery.html" in capfd.readouterr().out
    push_folder(folder, "smile")
    assert "gallery.html" not in hub.repo("tester/smile").files
    push_folder(folder, "smile", gallery=True)
    assert "gallery.html" in hub.repo("tester/smile").files
    write_manifest(folder, command=[], seeds={}, data={"public_images": True})
    assert "gallery.html" in folder_contents(folder).published
    assert "gallery.html" in folder_contents(folder, gallery=False).left_out


@pytest.fixture(scope="module")
def boosted(tmp_path_factory):
    """Boosted captions of the embedded world, with the images in the file."""
    folder = tmp_path_factory.mktemp("hub") / "scenes-boosted"
    assert main(["boost", "--max_images", "6", "--output", str(folder), "--license", "cc-by-4.0"]) == 0
    return folder


def test_card_describes_the_boosted_captions(boosted):
    card = (boosted / "README.md").read_text()
    metadata = check_card(card)
    assert metadata["license"] == "cc-by-4.0"
    assert metadata["configs"] == [{"config_name": "default", "data_files": "captions.parquet"}]
    assert "| test | 6 |" in card
    assert "The images are in the column `image`" in card
    assert "written by a model" in card
    assert "load_bags" not in card
    assert re.search(r"\d of 6 HolisticCaps contradict their BlendCap", card)
    rows = datasets.load_dataset(str(boosted), split="train", cache_dir=str(boosted.parent / "cache"))
    for name in rows.column_names:
        assert f"| {name} |" in card.replace("\\_", "_")
    manifest = json.loads((boosted / "boosting.json").read_text())
    assert (manifest["rows"], manifest["card"]["split"]) == (6, "test")


def test_local_paths_of_images_are_not_published(tmp_path):
    command = [*photographs(tmp_path / "photos"), "--output", str(tmp_path / "out")]
    with ChatServer(endpoint_answer(scenes())) as server:
        command += ["--text", "openai:writer", "--vision", "openai:describer", "--text_url", server.url]
        assert main(command) == 0
    with pytest.raises(ValueError, match=r"local paths") as error:
        folder_contents(tmp_path / "out", "dataset")
    assert str(tmp_path) not in str(error.value)
    assert main([*command, "--no_images"]) == 0
    assert "captions.parquet" in folder_contents(tmp_path / "out", "dataset").published
    card = (tmp_path / "out/README.md").read_text()
    assert "The images are not part of this data set" in card
    assert "| image |" not in card
    assert main([*command, "--embed_images"]) == 0
    assert "captions.parquet" in folder_contents(tmp_path / "out", "dataset").published
    assert str(tmp_path).encode() not in (tmp_path / "out/captions.parquet").read_bytes()
