"""The shipped models of the embedded world, by name. They are resolved in `checkpoints/shipped_models.py`, below all loaders."""

from hf_captionrl.checkpoints.shipped_models import MODELS, PREFIX, model_path

__all__ = ["MODELS", "PREFIX", "model_path"]
