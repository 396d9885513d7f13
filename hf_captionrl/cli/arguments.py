"""Arguments of commands whose options are not a dataclass yet."""

from __future__ import annotations

import argparse

from hf_captionrl.evaluation.dataset_options import DatasetOptions
from hf_captionrl.options import CommandOptions, add_options, positive, share

__all__ = ["add_common", "add_dataset", "positive", "share"]


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command."""
    add_options(parser, CommandOptions)


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which images."""
    add_options(parser, DatasetOptions, inherited=False)
