"""`push_to_hub` of a trainer: private, with a card, and with the checks of every push."""

import pytest

from hf_captionrl import SmileConfig, SmileTrainer
from hf_captionrl.hub import check_card
from hf_captionrl.scenes import load_scenes
from tests.hub.server import WRITE
from tests.tiny import tiny_captioner

ROWS = load_scenes(num_train=4, num_validation=0, num_test=0)["train"]


def make(folder, **settings):
    common = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none"}
    args = SmileConfig(str(folder), push_to_hub=True, hub_token=WRITE, disable_tqdm=True, **common, **settings)
    return SmileTrainer(tiny_captioner("blip"), args, train_dataset=ROWS)


def test_push_is_private_checked_and_has_a_card(tmp_path, hub):
    trainer = make(tmp_path / "smile")
    assert not hub.repos  # no repository is created before the push
    (tmp_path / "smile").mkdir(exist_ok=True)
    (tmp_path / "smile" / "weights.bin").write_bytes(b"pickle")
    assert "commit" in trainer.push_to_hub()
    repo = hub.repo("tester/smile")
    assert repo.private
    assert {"README.md", "model.safetensors", "captioner.json", "training_manifest.json"} <= set(repo.files)
    assert not [name for name in repo.files if name.endswith((".bin", ".pt")) or name.startswith("checkpoint-")]
    card = repo.files["README.md"].decode()
    assert "nothing was measured" in card
    assert 'load_captioner("tester/smile", revision="' in card
    check_card(card)
    (tmp_path / "smile" / "README.md").write_text(card + "\nOne more sentence.\n")
    trainer.save_model()  # pushes, as in transformers
    assert "One more sentence" in hub.repo("tester/smile").files["README.md"].decode()


def test_key_in_the_folder_is_not_pushed(tmp_path, hub):
    trainer = make(tmp_path / "smile")
    (tmp_path / "smile").mkdir(exist_ok=True)
    key = "hf_" + "AbCdEfGhIj" * 3 + "KlMn"
    (tmp_path / "smile" / "notes.txt").write_text(f"key: {key}")
    with pytest.raises(ValueError, match=r"notes\.txt contains"):
        trainer.push_to_hub()
    assert not hub.repos


def test_card_of_another_library_is_replaced(tmp_path, hub):
    trainer = make(tmp_path / "smile")
    (tmp_path / "smile").mkdir(exist_ok=True)
    (tmp_path / "smile" / "README.md").write_text("---\nlicense: other\n---\n\n[More Information Needed]\n")
    trainer.push_to_hub()
    assert "nothing was measured" in hub.repo("tester/smile").files["README.md"].decode()


def test_public_only_on_request(tmp_path, hub):
    make(tmp_path / "smile", hub_private_repo=False, hub_model_id="tester/open").push_to_hub()
    assert not hub.repo("tester/open").private
    trainer = make(tmp_path / "other")
    trainer.args.hub_private_repo = None
    trainer.push_to_hub()
    assert hub.repo("tester/other").private


def test_invalid_name_raises_at_construction(tmp_path):
    with pytest.raises(ValueError, match="not a name that the Hub accepts"):
        make(tmp_path / "smile run")
