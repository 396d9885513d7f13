"""Cards of metrics, data sets, adapters and chat models: their content is correct, and unfinished cards raise."""

import contextlib
import io
import re
from dataclasses import replace

import datasets
import pytest
import yaml
from huggingface_hub import DatasetCard

from hf_captionrl.cli.main import build_parser
from hf_captionrl.cli.main import main as captionrl
from hf_captionrl.hub import (
    DatasetCardFacts,
    ModelCardFacts,
    check_card,
    eval_results_yaml,
    read_facts,
    render_dataset_card,
    render_metric_card,
    render_model_card,
    write_dataset_card,
)
from hf_captionrl.metrics.evaluate_modules import MODULES
from hf_captionrl.retrieval import BagFile, load_bags, save_bags
from tests.hub.folders import publishable
from tests.hub.test_cards import FACTS, make_results, make_row
from tests.tiny import tiny_images

BAGS = DatasetCardFacts(
    dataset_id="me/truematch-scenes",
    kind="truematch",
    file="truematch.parquet",
    source="hf_captionrl scenes",
    source_license="apache-2.0",
    description="Bags of 3 similar scenes of the test split.",
    made_with={"scorer": "clip-reward @ 1f2e (float32)", "algorithm": "1 and 2", "seed": 0},
    columns={"size": "images in the bag", "image_ids": "their ids", "similarity": "of the bag's images, mean cosine"},
    sizes={"bags of 3": 2},
    license="apache-2.0",
    checked="Every bag was looked at through the truth of its scenes: its images differ in one fact at least.",
)


def blocks(card):
    return re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)


def run_block(code):
    out, names = io.StringIO(), {}
    with contextlib.redirect_stdout(out):
        exec(compile(code, "card", "exec"), names)
    return out.getvalue().strip(), names


def test_data_set_card_metadata_and_code_load_the_data(tmp_path, monkeypatch):
    bags = BagFile(bags=[["a", "b", "c"], ["d", "e", "f"]], similarities=[0.9, 0.8], signature="clip@1f2e")
    folder = tmp_path / "me" / "truematch-scenes"
    save_bags(folder / "truematch.parquet", bags)
    path = write_dataset_card(folder, BAGS)
    card = path.read_text()
    data = DatasetCard(card).data
    assert data.license == "apache-2.0"
    assert data.configs == [{"config_name": "default", "data_files": "truematch.parquet"}]
    assert "clip-reward @ 1f2e" in card
    assert "| bags of 3 | 2 |" in card
    assert "Another scorer would build other bags" in card
    monkeypatch.chdir(tmp_path)
    # A local folder with the same name and layout replaces the Hub.
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file, **_: str(tmp_path / name / file))
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, revision: load(name, cache_dir=str(tmp_path / "cache")))
    first, second = (run_block(code)[1] for code in blocks(card))
    assert first["rows"]["train"]["image_ids"][:] == bags.bags
    assert second["bags"] == load_bags(folder / "truematch.parquet")


def test_card_of_boosted_captions_says_that_a_model_generated_them():
    card = render_dataset_card(replace(BAGS, kind="boosted captions", file="captions.jsonl"))
    assert "written by a model" in card
    assert "load_bags" not in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"description": "TODO"}, "placeholder"),
        ({"checked": " "}, "placeholder"),
        ({"source": "/" + "home/me/coco"}, "a local path"),
        ({"made_with": {}}, "made_with is empty"),
        ({"made_with": {"prompt": "{{ prompt }}"}}, "placeholder"),
        ({"columns": {"a": "hf_" + "b" * 30}}, "access token"),
        ({"sizes": {"train": 0}}, "Remove empty parts"),
        ({"kind": "images"}, "kind"),
        ({"dataset_id": "a b"}, "not a name that the Hub accepts"),
    ],
)
def test_unfinished_data_set_cards_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(BAGS, **changes)


def test_card_without_data_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no truematch.parquet"):
        write_dataset_card(tmp_path, BAGS)
    assert not (tmp_path / "README.md").exists()


def test_malicious_texts_in_data_set_cards_are_escaped():
    card = render_dataset_card(replace(BAGS, description="<script>x</script> | [a](b)\n# h", columns={"a|b": "<b>"}))
    assert "<script>" not in card
    assert "\n# h" not in card
    assert check_card(card)


CARD = "---\nlicense: mit\n---\n\nA card.\n\n{}\n"


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "It costs $5 <script>alert(1)</script> or $6.",
        "$x<img src=y onerror=alert(1)>z$",
        "`` ` `` <img src=x onerror=alert(1)> `x",
        "`a` <b onclick=x> `c`",
        "```\ncode\n```\n<b>\n```\ncode\n```",
    ],
)
def test_cards_with_html_raise(text):
    with pytest.raises(ValueError, match="contains HTML"):
        check_card(CARD.format(text))


@pytest.mark.parametrize("text", ["`<b>`", "`` a ` <b> ``", "```\n<b>\n```", "$a<b$ and $$c<d$$", "2 < 3, $5 to $6"])
def test_code_and_formulas_are_not_html(text):
    assert check_card(CARD.format(text))["license"] == "mit"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_metric_cards_contain_the_name_of_the_space(name):
    card = render_metric_card(name, f"me/{name}", revision="v1")
    assert check_card(card)["license"] == "apache-2.0"
    assert "ORGANISATION" not in card
    assert f'evaluate.load("me/{name}", revision="v1")' in card
    with pytest.raises(ValueError, match=r"only in OWNER"):
        render_metric_card(name, "me/other")


def chat_facts(**changes):
    return replace(FACTS, model_id="model", family="chat", prompt="What is in the picture?", **changes)


def test_code_of_a_chat_model_runs_as_printed(tmp_path, monkeypatch):
    from hf_captionrl.captioners import load_captioner
    from tests.tiny.chat import tiny_chat

    model, processor = tiny_chat("llava")
    captioner = load_captioner(model, processor=processor, prompt="What is in the picture?")
    publishable(tmp_path / "model", captioner=captioner, model_id="model", generation={"max_new_tokens": 4})
    tiny_images(1, size=64)[0].save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    card = (tmp_path / "model" / "README.md").read_text()
    said = [run_block(code)[0] for code in blocks(card)]
    assert len(said) == 2
    assert said[0]
    assert said[0] == said[1]
    assert "apply_chat_template" in card
    assert "pipeline_tag: image-text-to-text" in card


def test_chat_card_contains_the_question():
    assert '"What is in the picture?"' in render_model_card(make_results(), chat_facts())
    with pytest.raises(ValueError, match="must contain the question"):
        replace(FACTS, family="chat", prompt="")


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


def test_results_go_to_a_leaderboard_only_if_there_is_one():
    assert eval_results_yaml(make_results(), FACTS) is None
    entries = yaml.safe_load(eval_results_yaml(make_results(), replace(FACTS, dataset_id="o/photos")))
    row = make_row("SMILE")
    assert {e["dataset"]["task_id"]: e["value"] for e in entries} == {
        key: value for key, value in row.items() if key != "name" and not key.endswith("_ci")
    }
    assert {e["dataset"]["id"] for e in entries} == {"o/photos"}
    with pytest.raises(ValueError, match="is missing"):
        eval_results_yaml(make_results(hallucination=None), replace(FACTS, dataset_id="o/photos"))
    with pytest.raises(ValueError, match="owner/name"):
        replace(FACTS, dataset_id="photos")


def test_facts_round_trip(tmp_path):
    folder = publishable(tmp_path / "model", model_id="model")
    assert read_facts(folder) == replace(FACTS, model_id="model")
    assert isinstance(read_facts(folder), ModelCardFacts)
    (folder / "card.json").write_text('{"nonsense": 1}')
    with pytest.raises(ValueError, match="not a field of a card"):
        read_facts(folder)


@pytest.mark.parametrize("command", ["push", "card"])
def test_help_has_examples_that_parse(command, capsys):
    assert captionrl([command, "--help"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  captionrl ")]
    assert lines
    for line in lines:
        assert callable(build_parser().parse_args(line.split()[1:]).run)
    assert captionrl([command]) == 2
