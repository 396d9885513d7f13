"""Names and files of checkpoints, checks before loading, and loading from safetensors."""

from hf_captionrl.checkpoints.files import check_json_files, find_file, read_object
from hf_captionrl.checkpoints.loading import load_language_model, load_pretrained, read_config
from hf_captionrl.checkpoints.shipped_models import MODELS, PREFIX, model_path
from hf_captionrl.checkpoints.weights import ADAPTER_FILES, WEIGHT_FILES, Weights, find_weights, usable_revision

__all__ = [
    "ADAPTER_FILES",
    "MODELS",
    "PREFIX",
    "WEIGHT_FILES",
    "Weights",
    "check_json_files",
    "find_file",
    "find_weights",
    "load_language_model",
    "load_pretrained",
    "model_path",
    "read_config",
    "read_object",
    "usable_revision",
]
