"""A policy to train, and the distance of two policies."""

import torch

from hf_captionrl.captioners import load_captioner
from hf_captionrl.utils.model_files import model_path

SAMPLED = {"do_sample": True, "per_device_train_batch_size": 8, "max_completion_length": 10}


def captioner():
    return load_captioner(model_path("scenes:blip-mle"), dtype=torch.float32)
