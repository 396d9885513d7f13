"""Pickle-only checkpoints and those of published code to safetensors: the command `captionrl convert`."""

from hf_captionrl.conversion.convert import convert
from hf_captionrl.conversion.report import FileRecord, Report

__all__ = ["FileRecord", "Report", "convert"]
