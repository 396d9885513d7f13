"""Checkpoints of pickles or of published code, converted to safetensors: `captionrl convert`."""
