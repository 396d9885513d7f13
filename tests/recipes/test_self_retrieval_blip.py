"""The self-retrieval recipe from the command line's arguments to every file it promises."""

import json

import pytest
import torch

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import GeneratedCaptions
from hf_captionrl.metrics.columns import COLUMNS, REWARD_COLUMNS
from hf_captionrl.trainers import caption_trainer
from hf_captionrl.utils.console import run_main
from hf_captionrl.utils.model_files import model_path
from recipes import self_retrieval_blip as recipe
from recipes import sle_blip
from tests.recipes.conftest import GENERATION, train

SHORT = [
    *"--max_train_images 24 --max_eval_images 12 --max_test_images 105 --num_train_epochs 2".split(),
    *"--per_device_train_batch_size 8 --per_device_eval_batch_size 32 --max_completion_length 10 --logging_steps 1".split(),
    *(*GENERATION, "--bag_schedule", '{"1": 2, "2": 4}'),
]


def test_table_has_columns_of_reward_scorer_and_held_out_scorer(run):
    results = json.loads((run / "results.json").read_text())
    assert [row["name"] for row in results["rows"]] == ["MLE", "SR (random)", "SR (bag curriculum)", "references"]
    for row in results["rows"]:
        for column in (*COLUMNS, *REWARD_COLUMNS):
            assert isinstance(row[column.key], float), (row["name"], column.key)
    start, curriculum = results["rows"][0], results["rows"][2]
    # Two scorers of different seeds do not agree on everything; were they one, these would be equal.
    assert any(start[f"bag_{k}_recall_at_1"] != start[f"reward_bag_{k}_recall_at_1"] for k in (3, 5, 7))
    assert results["config"]["SelfRetrievalRecipeConfig"]["bag_schedule"] == {"1": 2, "2": 4}
    assert curriculum["cider_d"] is not None


def test_everything_is_written(run):
    for name in ("results.md", "gallery.html", "curves.png", "model/README.md", "model/model.safetensors"):
        assert (run / name).stat().st_size > 100, name
    card = (run / "model" / "README.md").read_text()
    assert "REINFORCE" in card
    assert "log-probability that the scorer gives the image" in card
    assert "bags of look-alikes" in card
    assert load_captioner(str(run / "model"), dtype=torch.float32).family == "blip"
    assert (run / "model-sr--random").is_dir()


def test_curriculum_increases_the_bag_size(run):
    checkpoints = sorted((run / "model").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    history = json.loads((checkpoints[-1] / "trainer_state.json").read_text())["log_history"]
    sizes = [entry["bag_size"] for entry in history if "bag_size" in entry]
    assert sizes == [2, 2, 2, 4, 4, 4]


def test_adapters_and_cider(tmp_path):
    more = "--tune both --lora_r 4 --cider_weight 0.5 --variants {} --freeze_vision_tower false --max_steps 1 "
    more += "--cache_image_features false --bag_features image --perplexity_name_or_path none"
    path = train(recipe, tmp_path, SHORT, more)
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["MLE", "SR (bag curriculum, CIDEr 0.5)", "references"]
    assert (path.parent / "model" / "adapter_model.safetensors").exists()


def test_an_evaluation_trains_nothing(tmp_path):
    path = train(recipe, tmp_path, SHORT, "--num_train_epochs 0 --perplexity_name_or_path none")
    rows = json.loads(path.read_text())["rows"]
    # Of the variants, too, nothing is left: they would all be the captioner that was named.
    assert [row["name"] for row in rows] == ["MLE", "references"]
    assert isinstance(rows[0]["reward_rd100_recall_at_1"], float)
    assert not list(path.parent.glob("model*/checkpoint-*"))
    # A card would have to say how the captioner was made, which is unknown here.
    assert not (path.parent / "model" / "README.md").exists()
    start = load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32).model.state_dict()
    same = load_captioner(str(path.parent / "model"), dtype=torch.float32).model.state_dict()
    assert all(torch.equal(value, same[name]) for name, value in start.items())


def parsed(*argv):
    return recipe.parse_args(list(argv))[-1]


# --- No collapsed model is delivered: exit code, folders, console, results, card and gallery ---

HACKED = "a blue and blue blue blue and yellow blue"
ONE_RUN = [*SHORT, "--variants", "{}", "--perplexity_name_or_path", "none"]


@pytest.fixture
def hack(monkeypatch):
    """Replaces the captions of the given calls of beam search; training samples are as they are."""
    generate, calls = caption_trainer.generate_with_ends, []

    def install(is_hacked):
        def generate_or_hack(*args, **kwargs):
            calls.append(1)
            found = generate(*args, **kwargs)
            if is_hacked(len(calls)):
                return GeneratedCaptions([HACKED] * len(found.captions), found.ended)
            return found

        monkeypatch.setattr(caption_trainer, "generate_with_ends", generate_or_hack)

    return install


def test_a_collapsed_recipe_writes_no_model_and_fails(tmp_path, hack, capsys):
    hack(lambda call: call > 2)  # all but the initial captioner on test and validation
    out = tmp_path / "out"
    (out / "model").mkdir(parents=True)
    (out / "model" / "model.safetensors").write_text("of an earlier start")
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: train(recipe, tmp_path, ONE_RUN))
    assert stop.value.code == 1
    assert not (out / "model").exists()
    assert sorted(path.name for path in (out / "model-collapsed").iterdir()) == ["checkpoint-3", "checkpoint-6"]

    results = json.loads((out / "results.json").read_text())
    selected = results["selected"]["SR (bag curriculum)"]
    assert selected["step"] is None
    assert [entry["step"] for entry in selected["guard"]["refused"]] == [3, 6]
    assert "degenerate is 1 in 12 evaluated captions" in selected["collapsed"]
    rows = {row["name"]: row for row in results["rows"]}
    assert rows["SR (bag curriculum)"]["note"] == selected["collapsed"].replace("The", "the", 1)
    assert "note" not in rows["MLE"]
    assert (rows["MLE"]["degenerate"], rows["SR (bag curriculum)"]["degenerate"]) == (0.0, 1.0)
    assert "SR (bag curriculum): the captions have collapsed: degenerate is 1" in (out / "results.md").read_text()
    assert "Not delivered: The captions have collapsed" in (out / "gallery.html").read_text()

    printed = capsys.readouterr()
    lines, words = printed.out.splitlines(), " ".join(printed.out.split())
    assert "; there is no model" in words
    line = words[words.rindex("SR (bag curriculum) No checkpoint was selected; ") :]
    assert "; the weights of step 6 are kept; the guard refused the evaluation" in line
    assert ". Not delivered: " in line
    # Degenerate is the first column, which no terminal hides.
    assert next(line for line in lines if "Degenerate" in line).split()[0] == "Degenerate"
    assert "refuses 'SR (bag curriculum)', so model/ was not written; its checkpoints" in printed.err


def test_the_delivered_checkpoint_is_the_accepted_one_and_card_and_gallery_say_so(tmp_path, hack, capsys):
    # Calls: test and validation before training, epochs 1 and 2, test.
    hack(lambda call: call == 4)
    path = train(recipe, tmp_path, ONE_RUN)
    selected = json.loads(path.read_text())["selected"]["SR (bag curriculum)"]
    assert (selected["step"], selected["metric"]) == (3, "eval_reward_recall_at_1")
    assert "collapsed" not in selected
    delivered = (path.parent / "model" / "model.safetensors").read_bytes()
    assert delivered == (path.parent / "model" / "checkpoint-3" / "model.safetensors").read_bytes()
    for shown in (
        (path.parent / "gallery.html").read_text(),
        (path.parent / "model" / "README.md").read_text().replace("\\_", "_"),
    ):
        assert "Selected checkpoint-3: validation R@1 pool, reward scorer = " in shown
        assert "the guard refused the evaluation at step 6" in shown
    printed = " ".join(capsys.readouterr().out.split())
    assert "SR (bag curriculum) (model/) Selected checkpoint-3: validation R@1 pool, reward scorer = " in printed
    assert "; the checkpoint is model/ " in printed[printed.index("Written to") :]


def test_without_evaluations_the_captions_of_the_test_split_decide(tmp_path, hack):
    hack(lambda call: call > 2)
    with pytest.raises(SystemExit, match="have collapsed"):
        train(recipe, tmp_path, ONE_RUN, "--eval_strategy no --save_strategy no")
    assert not (tmp_path / "out" / "model").exists()
    selected = json.loads((tmp_path / "out" / "results.json").read_text())["selected"]["SR (bag curriculum)"]
    assert "in 105 evaluated captions" in selected["collapsed"]


def test_recipes_go_back_and_select_by_default():
    assert parsed("--use_cpu").metric_for_best_model == "reward_recall_at_1"
    for words in ("--save_strategy steps", "--eval_strategy no --save_strategy no", "--load_best_model_at_end false"):
        assert parsed("--use_cpu", *words.split()).load_best_model_at_end is False
    for config in (parsed("--use_cpu"), sle_blip.parse_args(["--use_cpu"])[-1]):
        assert (config.guard, config.load_best_model_at_end) == ("rollback", True)
    # The study of what collapses trains every run to its end.
    config = parsed("--row", "ndlb/scenes/hacking", "--use_cpu")
    assert (config.guard, config.load_best_model_at_end) == ("warn", False)
