"""Saves a captioner: model or adapter, processor and prompt in one folder."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_captionrl.checkpoints.files import find_file, read_object, shown
from hf_captionrl.io import write_json

__all__ = ["SETTINGS_FILE", "ProcessorPair", "Saving", "read_settings"]

SETTINGS_FILE = "captioner.json"
"""File of the settings that belong to neither model nor processor: family, prompt, frame pooling."""

_SETTINGS: dict[str, tuple[type, str]] = {
    "family": (str, "a string"),
    "prompt": (str, "a string"),
    "frame_pooling": (str, "a string"),
    "num_frames": (int, "a whole number"),
}


def read_settings(name: str, revision: str | None) -> dict[str, Any]:
    """Read the settings that a captioner was saved with."""
    file = find_file(name, SETTINGS_FILE, revision)
    if file is None:
        return {}
    settings = read_object(file)
    for key, (kind, what) in _SETTINGS.items():
        if key in settings and (not isinstance(settings[key], kind) or isinstance(settings[key], bool)):
            raise ValueError(
                f"{key} is {settings[key]!r} in {shown(file)}, but must be {what}. Use an intact copy of the checkpoint."
            )
    return settings


@dataclass
class ProcessorPair:
    """An image processor and a tokenizer, for families without a joint processor.

    Args:
        image_processor: Image processor of transformers.
        tokenizer: Tokenizer of transformers.
    """

    image_processor: Any
    tokenizer: Any

    def save_pretrained(self, folder: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save both into one folder.

        Args:
            folder: Destination.
            kwargs: Passed to both `save_pretrained` methods.
        """
        self.image_processor.save_pretrained(folder, **kwargs)
        self.tokenizer.save_pretrained(folder, **kwargs)


class Saving:
    """The part of [`Captioner`] that saves checkpoints to disk and to the Hub."""

    family: ClassVar[str]
    model: Any
    processor: Any
    prompt: str
    frame_pooling: str
    num_frames: int

    @classmethod
    def complete_processor(cls, model: Any, processor: Any) -> None:
        """Convert model and processor of an older release to the current form. Families may override it.

        Args:
            model: The loaded model.
            processor: The loaded processor.
        """

    def save_processor(self, folder: str | os.PathLike[str]) -> None:
        """Save the processor, the prompt and the frame pooling.

        Args:
            folder: Destination.
        """
        self.processor.save_pretrained(folder)
        settings: dict[str, Any] = {"family": self.family, "prompt": self.prompt}
        if self.num_frames:
            settings |= {"frame_pooling": self.frame_pooling, "num_frames": self.num_frames}
        write_json(os.path.join(folder, SETTINGS_FILE), settings)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save everything that `load_captioner` needs: the model, or only its adapter.

        Args:
            folder: Destination.
        """
        self.model.save_pretrained(folder)
        self.save_processor(folder)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, overwrite: bool = False
    ) -> str:
        """Save with a model card and push to the Hub, after the checks of every push: safetensors only, no secrets.

        Args:
            repo_id (`str`): `owner/name`; created if missing.
            private (`bool`, *optional*): Whether a new repository is private; None means yes.
            token (`str`, *optional*): Access token; by default the one stored by `hf auth login`.
            overwrite (`bool`): Also push to a repository that has other content.

        Returns:
            `str`: URL of the commit.
        """
        # `hub` is in a higher layer. Importing it at the call avoids an import cycle.
        hub = importlib.import_module("hf_captionrl.hub")
        is_private = private is None or private
        return str(hub.push_captioner(self, repo_id, private=is_private, token=token, overwrite=overwrite))
