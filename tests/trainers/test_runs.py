"""Several runs in one output folder: each resumes only from its checkpoints and keeps those of others."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from hf_captionrl.hub.push import NEVER
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SmileConfig, SmileTrainer
from hf_captionrl.trainers.checkpoints import (
    RUN_FILE,
    SEAL_FILE,
    ExactResumeTrainer,
    checkpoint_fault,
    has_checkpoint,
    newest_checkpoint,
    run_of_checkpoint,
    seal_checkpoint,
)
from tests.processes import run_in_processes
from tests.tiny import tiny_captioner
from tests.trainers.bits import bits, different
from tests.trainers.toy import KillAt, KilledError, toy


def killed(folder, step, **settings):
    with pytest.raises(KilledError):
        toy(folder, kill_at=step, **settings).train()


def names(folder):
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def without_ids(folder):
    """Remove the run id from checkpoints, as in earlier versions."""
    (folder / RUN_FILE).unlink()
    for path in folder.glob("checkpoint-*"):
        (path / RUN_FILE).unlink(missing_ok=True)
        seal = json.loads((path / SEAL_FILE).read_text())
        seal["files"].pop(RUN_FILE, None)
        (path / SEAL_FILE).write_text(json.dumps({"files": seal["files"]}))


def test_killed_run_in_a_used_folder_resumes_from_its_checkpoint(tmp_path, caplog):
    alone = toy(tmp_path / "alone", data=1)
    alone.train()
    toy(tmp_path / "used").train()
    first = {name: weights(tmp_path / "used" / name) for name in names(tmp_path / "used")}
    killed(tmp_path / "used", 3, data=1)
    caplog.clear()
    resumed = toy(tmp_path / "used", data=1)
    resumed.train(resume_from_checkpoint=True)
    assert not different(bits(resumed), bits(alone))
    (said,) = [
        r.getMessage() for r in caplog.records if "another run" in r.getMessage() and "resumes" in r.getMessage()
    ]
    assert (
        said
        == "checkpoint-6, checkpoint-4 belong to another run and are not used. Training resumes from checkpoint-2."
    )
    # The checkpoints of the first run are complete, under new names.
    kept = [name for name in names(tmp_path / "used") if "-run-" in name]
    assert [name.split("-run-")[0] for name in kept] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for name in kept:
        assert checkpoint_fault(tmp_path / "used" / name) is None
        assert not different(weights(tmp_path / "used" / name), first[name.split("-run-")[0]])


def test_killed_smile_run_in_a_used_folder_resumes_from_its_checkpoint(tmp_path):
    scenes = load_scenes(num_train=8, num_validation=1, num_test=0)["train"]

    def trainer(folder, rate, callbacks=()):
        args = SmileConfig(
            str(tmp_path / folder),
            max_steps=3,
            save_steps=1,
            learning_rate=rate,
            per_device_train_batch_size=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        return SmileTrainer(tiny_captioner("blip"), args, scenes, callbacks=list(callbacks))

    alone = trainer("alone", 1e-3)
    alone.train()
    trainer("used", 1e-2).train()
    with pytest.raises(KilledError):
        trainer("used", 1e-3, [KillAt(2)]).train()
    resumed = trainer("used", 1e-3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    assert not different(bits(resumed), bits(alone))


def test_run_killed_before_its_first_checkpoint_is_not_resumed_from_another(tmp_path, caplog):
    toy(tmp_path).train()
    assert has_checkpoint(tmp_path)
    killed(tmp_path, 1, data=1)
    assert not has_checkpoint(tmp_path)
    assert "belong to another run and are not used. Training in" in caplog.text
    with pytest.raises(ValueError, match=r"has no checkpoint: checkpoint-6, .*'.*checkpoint-6' to resume that run"):
        toy(tmp_path, data=1).train(resume_from_checkpoint=True)
    # As the message says, the other run is resumed by its path, and then uses the folder.
    run = run_of_checkpoint(tmp_path / "checkpoint-6")
    toy(tmp_path, max_steps=8).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
    assert run_of_checkpoint(tmp_path / "checkpoint-8") == run


@pytest.mark.parametrize("best", [False, True])
def test_no_checkpoint_of_another_run_is_removed(tmp_path, best):
    toy(tmp_path, max_steps=20, save_steps=10).train()
    rest = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2} if best else {}
    toy(tmp_path, data=1, save_total_limit=1, **rest).train()
    other = [name for name in names(tmp_path) if name in ("checkpoint-10", "checkpoint-20")]
    assert other == ["checkpoint-10", "checkpoint-20"]
    mine = [name for name in names(tmp_path) if name not in other]
    assert len(mine) == 1
    assert best or mine == ["checkpoint-6"]


def test_older_checkpoints_of_the_same_run_are_removed(tmp_path):
    toy(tmp_path, max_steps=10, save_total_limit=2).train()
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-8"]
    (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"broken")
    toy(tmp_path, max_steps=9, save_steps=1, save_total_limit=1).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-9"]


def test_best_checkpoint_is_never_that_of_another_run(tmp_path, caplog):
    """The Trainer stores only its path, at which another run may have a checkpoint of the same step."""
    toy(tmp_path).train()
    trainer = toy(tmp_path, data=1, max_steps=1)
    trainer.train()
    before = bits(trainer)
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-4")
    trainer._load_best_model()
    assert not different(bits(trainer), before)
    assert "checkpoint-4, the best checkpoint, is broken: it is of another run." in caplog.text


def test_run_resumed_from_an_earlier_checkpoint_does_not_return_to_its_later_ones(tmp_path, caplog):
    toy(tmp_path).train()
    with pytest.raises(KilledError):
        toy(tmp_path, kill_at=3, learning_rate=0.01).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "checkpoint-6 is after the step that the run resumes from. It is now checkpoint-6-run-" in caplog.text
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert [name.split("-run-")[0] for name in names(tmp_path)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_checkpoints_without_an_id_are_of_one_run(tmp_path):
    toy(tmp_path / "whole").train()
    killed(tmp_path / "old", 5)
    without_ids(tmp_path / "old")
    assert newest_checkpoint(tmp_path / "old") == str(tmp_path / "old" / "checkpoint-4")
    resumed = toy(tmp_path / "old")
    resumed.train(resume_from_checkpoint=True)
    assert not different(weights(tmp_path / "old" / "checkpoint-6"), weights(tmp_path / "whole" / "checkpoint-6"))
    assert newest_checkpoint(tmp_path / "old") == str(tmp_path / "old" / "checkpoint-6")
    # A new run there has an id and is a different run.
    killed(tmp_path / "old", 3, data=1)
    assert newest_checkpoint(tmp_path / "old") == str(tmp_path / "old" / "checkpoint-2")
    assert (tmp_path / "old" / "checkpoint-2-run-unknown").is_dir()


def test_checkpoints_of_a_plain_trainer_are_used_once_they_are_sealed(tmp_path):
    trainer = toy(tmp_path)
    settings = {"max_steps": 2, "save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    plain = TrainingArguments(str(tmp_path), **settings)
    Trainer(trainer.model, plain, train_dataset=trainer.train_dataset).train()
    assert not has_checkpoint(tmp_path)
    seal_checkpoint(tmp_path / "checkpoint-2")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    # A new run there does not overwrite unsealed ones.
    (tmp_path / "checkpoint-2" / SEAL_FILE).unlink()
    toy(tmp_path, max_steps=2).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-2-run-unknown"]


def test_copied_checkpoints_of_one_run_resume_and_of_two_are_refused(tmp_path):
    toy(tmp_path / "one").train()
    toy(tmp_path / "two", max_steps=8).train()
    copies = tmp_path / "copies"
    for source in ("one/checkpoint-4", "one/checkpoint-6"):
        shutil.copytree(tmp_path / source, copies / Path(source).name)
    assert newest_checkpoint(copies) == str(copies / "checkpoint-6")
    shutil.copytree(tmp_path / "two" / "checkpoint-8", copies / "checkpoint-8")
    assert has_checkpoint(copies)
    with pytest.raises(ValueError, match=r"has checkpoints of 2 runs .*Use the path of a checkpoint"):
        newest_checkpoint(copies)
    (copies / RUN_FILE).write_text('{"run_id": ')  # an unreadable record counts as none
    with pytest.raises(ValueError, match=r"has checkpoints of 2 runs"):
        newest_checkpoint(copies)


def test_incomplete_checkpoint_of_the_same_run_is_overwritten(tmp_path):
    killed(tmp_path, 5)
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / SEAL_FILE).unlink()
    toy(tmp_path).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert checkpoint_fault(tmp_path / "checkpoint-6") is None


def test_every_trainer_seals_with_the_id_of_its_run():
    import hf_captionrl.trainers as trainers
    from hf_captionrl.trainers.trl_grpo import SelfRetrievalGRPOTrainer
    from hf_captionrl.trainers.trl_smile_sft import SmileSFTTrainer

    kinds = [trainers.SmileTrainer, trainers.SLETrainer, trainers.SelfRetrievalTrainer, trainers.CaptionRLTrainer]
    for kind in (*kinds, SelfRetrievalGRPOTrainer, SmileSFTTrainer):
        for method in ("train", "_save_checkpoint", "_finalize_training"):
            assert getattr(kind, method) is getattr(ExactResumeTrainer, method), (kind, method)


def in_two_processes(folder):
    trainer = toy(Path(folder), max_steps=2)
    trainer.train()
    (Path(folder) / f"rank-{trainer.args.process_index}").write_text(str(trainer._run_id))


def test_processes_of_a_run_share_its_id(tmp_path):
    run_in_processes(2, in_two_processes, str(tmp_path), folder=tmp_path)
    ids = {(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)}
    assert ids == {run_of_checkpoint(tmp_path / "checkpoint-2")}
    assert json.loads((tmp_path / RUN_FILE).read_text())["run_id"] in ids
    assert json.loads((tmp_path / "checkpoint-2" / SEAL_FILE).read_text())["run_id"] in ids


def test_the_record_of_a_run_is_never_published():
    assert any(fnmatch(RUN_FILE, pattern) for pattern in NEVER)


def test_runs_with_the_same_seed_have_different_ids(tmp_path):
    ids = set()
    for name in ("a", "b"):
        toy(tmp_path / name, max_steps=2).train()
        ids.add(run_of_checkpoint(tmp_path / name / "checkpoint-2"))
    assert len(ids) == 2
    assert None not in ids
