"""How the shipped models of the embedded world are made, by `scripts/train_scenes_models.py`."""
