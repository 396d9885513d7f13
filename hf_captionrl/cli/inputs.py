"""Files of captions that several commands take, and what they are called."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hf_captionrl.cli.judges import REFERENCES

if TYPE_CHECKING:
    from hf_captionrl.cli.caption_files import CaptionFile

__all__ = ["read_files"]


def read_files(arguments: argparse.Namespace) -> list[CaptionFile]:
    """Read the files of `--captions` under the names of `--names`, or their own.

    Args:
        arguments: `captions` (paths) and `names` (or None) count.

    Returns:
        `list[CaptionFile]`: In the order given. Files of the same name are called by their folder too.

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: If a file is broken, names are missing or stand there twice, or one is that of the human captions.
    """
    from hf_captionrl.cli.caption_files import read_caption_file

    paths = arguments.captions
    names = arguments.names or [path.stem for path in paths]
    if len(names) != len(paths):
        raise ValueError(f"There are {len(paths)} files and {len(names)} --names. Give one each.")
    if not arguments.names and len(set(names)) < len(names):
        # runs/a/captions.jsonl and runs/b/captions.jsonl: the folder tells them apart.
        names = [f"{path.resolve().parent.name}/{path.stem}" for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Two files are called {name!r}. Pass different --names.")
        if name == REFERENCES:
            raise ValueError(f"{name!r} is what the human captions are called. Pass another with --names.")
    return [read_caption_file(path, name=name) for path, name in zip(paths, names, strict=True)]
