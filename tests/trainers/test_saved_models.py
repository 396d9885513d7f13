"""The folder of `save_model` can be loaded, and records the training."""

import json

import pytest
import torch

from hf_captionrl import pipeline
from hf_captionrl.captioners import load_captioner
from hf_captionrl.data import open_image
from hf_captionrl.trainers.publishing import TRAINING_FILE
from tests.trainers import test_reward_functions as rewarding


@pytest.mark.parametrize(("make", "objective"), [(rewarding.self_retrieval, "self_retrieval"), (rewarding.sle, None)])
def test_saved_folder_can_caption_and_records_its_training(tmp_path, make, objective):
    data = rewarding.marked()
    trainer = make(tmp_path, data, rewarding.Recorder(), learning_rate=1e-2)
    trainer.train()
    trainer.save_model()
    written = trainer.generate_captions(data, num_beams=1, max_new_tokens=12)
    loaded = load_captioner(str(tmp_path))
    pixels = loaded.encode_images([open_image(row["image"]) for row in data])["pixel_values"]
    assert loaded.generate(pixel_values=pixels, num_beams=1, max_new_tokens=12).captions == written
    assert pipeline(str(tmp_path), num_beams=1, max_new_tokens=12)(data[0]["image"]) == written[0]
    files = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors", "config.json", "captioner.json", "tokenizer_config.json", TRAINING_FILE} <= files
    assert files & {"processor_config.json", "preprocessor_config.json"}
    assert "training_args.bin" not in files
    text = (tmp_path / TRAINING_FILE).read_text()
    facts = json.loads(text)
    assert facts["trainer"] == type(trainer).__name__
    assert facts.get("objective") == objective
    assert "the reward 'marks'" in facts["reward"]
    assert (facts["family"], facts["base_model"]) == ("blip", "blip-mle")
    assert (facts["steps"], facts["train_images"]) == (1, 8)
    assert str(tmp_path) not in text
    assert '"/' not in text  # no local path
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name
