"""What runs in the processes that the tests kill. Every function takes and returns what JSON can hold."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

from tests.faults.warm_process import Moment

IMAGES = 12
KEYS = [f"image {i}" for i in range(60)]
STEPS = 6


def warm_up():
    """Import what jobs need, and load what they share: a forked process has it all."""
    import torch

    torch.set_num_threads(1)
    import hf_captionrl.apps.experiments
    import hf_captionrl.evaluation.evaluator
    import hf_captionrl.hub
    import hf_captionrl.metrics.table  # noqa: F401
    import tests.hub.server
    import tests.tiny  # noqa: F401

    _data(), _scorer()


@functools.cache
def _data():
    from hf_captionrl.scenes import load_scenes

    return load_scenes(num_train=IMAGES, num_validation=6, num_test=0)


@functools.cache
def _scorer():
    from hf_captionrl.retrieval import load_scorer
    from hf_captionrl.utils.model_files import model_path

    return load_scorer(model_path("scenes:clip-reward"))


# Training

COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "disable_tqdm": True,
    "use_cpu": True,
    "logging_strategy": "no",
    "report_to": [],
    "max_caption_length": 16,
}
ROLLOUT: dict[str, Any] = {"max_completion_length": 6, "guard": "warn", "loss_type": "sum"}


def trainer_of(kind, folder, *, callbacks=(), **changes):
    """A trainer of a tiny captioner on a few scenes."""
    from hf_captionrl.trainers import (
        CaptionRLConfig,
        CaptionRLTrainer,
        SelfRetrievalConfig,
        SelfRetrievalTrainer,
        SLEConfig,
        SLETrainer,
        SmileConfig,
        SmileTrainer,
    )
    from tests.tiny import tiny_captioner

    captioner, train = tiny_captioner("blip"), _data()["train"]
    evaluation = _data()["validation"] if "eval_strategy" in changes else None
    parts = {"train_dataset": train, "eval_dataset": evaluation, "callbacks": list(callbacks)}
    common = {**COMMON, **changes}
    rows: dict[str, Any] = {"generation_num_beams": 1, "generation_max_new_tokens": 6}
    if kind == "smile":
        return SmileTrainer(captioner, SmileConfig(str(folder), **common, **rows, freeze_vision_tower=False), **parts)
    common = {**ROLLOUT, **rows, **common}
    if kind == "sle":
        config = SLEConfig(str(folder), **{"num_generations": 3, "rl_start_epoch": 1, **common})
        return SLETrainer(captioner, config, **parts)
    if kind == "self-retrieval":
        config = SelfRetrievalConfig(str(folder), **{"num_generations": 2, "bag_schedule": {1: 2, 2: 4}, **common})
        return SelfRetrievalTrainer(captioner, _scorer(), config, neighbours=_neighbours(len(train)), **parts)
    config = CaptionRLConfig(str(folder), **{"num_generations": 2, "num_iterations": 2, "beta": 0.1, **common})
    return CaptionRLTrainer(captioner, ["length", "self_retrieval"], config, scorer=_scorer(), **parts)


TRAINERS = ("smile", "sle", "self-retrieval", "caption-rl")


def _neighbours(number, k=8):
    import torch

    return (torch.arange(number)[:, None] + torch.arange(1, k + 1)) % number


def digest(trainer):
    """Weights and moments of the optimizer as one number."""
    found = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        found.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    for number, state in sorted(trainer.optimizer.state_dict()["state"].items()):
        found.update(f"{number}".encode() + state["exp_avg"].numpy().tobytes() + state["exp_avg_sq"].numpy().tobytes())
    return found.hexdigest()


def progress_of(path):
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with open(path, "a") as file:
                file.write(f"{state.global_step}\n")

    return Progress()


def train(kind, folder, *, at=None, name="SIGKILL", steps_file=None, limit=None, **changes):
    """Train, resuming if there is a checkpoint; perhaps a signal at a moment of training."""
    from hf_captionrl.trainers.checkpoints import newest_checkpoint

    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    trainer = trainer_of(kind, folder, callbacks=[progress_of(steps_file)] if steps_file else [], **changes)
    with Moment(at, name) as moment:
        trainer.train(resume_from_checkpoint=newest_checkpoint(folder))
    return {"digest": digest(trainer), "calls": moment.calls}


def hold_folder(folder, ready):
    """Take an output folder as a run does, and sit in it."""
    from hf_captionrl.utils.io import FolderLock

    with FolderLock(folder):
        Path(ready).write_text("yes")
        signal.pause()


def recipe(arguments, *, signal_at=None):
    """A recipe, perhaps with a SIGTERM in the n-th step of all its trainings; the rows of its table."""
    from hf_captionrl.trainers import SmileTrainer
    from recipes import smile_blip

    steps, compute_loss = 0, SmileTrainer.compute_loss

    def counting(self, *args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_loss(self, *args, **kwargs)

    setattr(SmileTrainer, "compute_loss", counting)  # noqa: B010
    results = json.loads(smile_blip.main(arguments).read_text())
    return {"rows": results["rows"], "steps": steps}


# Caches, push


def noted(path, lines):
    """Note what was computed, in a way that a kill does not lose."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(file, "".join(f"{line}\n" for line in lines).encode())
    os.close(file)


class NotingPixels:
    """First part of an image processor that notes which image it is asked for."""

    def __init__(self, images, notes=None):
        from hf_captionrl.data.images import open_image
        from tests.tiny import tiny_captioner

        self.parts, self.notes = tiny_captioner("blip").prepared_pixels, notes
        self.shape, self.signature = self.parts.shape, self.parts.signature
        self.paths = sorted(Path(images).iterdir(), key=lambda path: KEYS.index(path.stem))
        self.images = [open_image(path) for path in self.paths]
        self.numbers = {image.tobytes(): number for number, image in enumerate(self.images)}

    def prepare(self, image):
        if self.notes:
            noted(self.notes, [self.numbers[image.tobytes()]])
        return self.parts.prepare(image)

    def rows(self):
        """The images as a data set."""
        import datasets

        return datasets.Dataset.from_dict({"image": [*map(str, self.paths)]}).cast_column("image", datasets.Image())


def cache(folder, *, notes, images, at=None):
    """Fill a cache of prepared pixels."""
    from hf_captionrl.data import cached_pixels
    from hf_captionrl.retrieval import feature_cache

    feature_cache._FLUSH_BYTES = 0  # every batch is written
    pixels = NotingPixels(images, notes)
    dataset = pixels.rows()
    with Moment(at) as moment:
        cached_pixels(dataset, pixels, directory=folder, batch_size=8, progress=False)
    return {"calls": moment.calls}


def cached(folder, *, images):
    """Keys in a cache, and whether their pixels are right."""
    import numpy as np

    from hf_captionrl.data.features import source_keys
    from hf_captionrl.retrieval import FeatureCache

    pixels = NotingPixels(images)
    store = FeatureCache(folder, model_id="pixels", revision=pixels.signature, what="pixels_uint8", dtype="uint8")
    names = source_keys(pixels.rows())
    present = [number for number, name in enumerate(names) if name in store]
    expected = [pixels.parts.prepare(pixels.images[number]).numpy() for number in present]
    right = not present or bool(np.array_equal(np.asarray(store.get([names[n] for n in present])), np.stack(expected)))
    return {"keys": [KEYS[number] for number in present], "right": right}


def push(folder, url, *, at=None):
    """Push a folder to a Hub on this machine."""
    import huggingface_hub.utils._http as client_http
    from huggingface_hub import constants, hf_api

    from hf_captionrl.hub import push_folder
    from tests.hub.server import WRITE

    constants.ENDPOINT = hf_api.api.endpoint = url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
    client_http.close_session()
    with Moment(at) as moment:
        push_folder(folder, "smile", token=WRITE)
    return {"calls": moment.calls}
