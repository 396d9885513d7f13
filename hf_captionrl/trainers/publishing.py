"""Pushing a trainer's model to the Hub: private by default, with a model card, and checked like every push."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_captionrl.trainers.processes import on_main_process

__all__ = ["CheckedPush"]


def _hub() -> Any:
    # Publishing is in a higher layer; the lookup at call time avoids an import cycle.
    return importlib.import_module("hf_captionrl.hub")


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value or None


class CheckedPush(Trainer):
    """A Trainer whose upload, also that of TRL, is checked like every push."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Check the name of the repository; the push creates it, after its other checks.

        Args:
            token (`str`, *optional*): Unused; part of the Trainer's signature.
            private (`bool`, *optional*): Unused too.

        Raises:
            ValueError: If the Hub does not accept the name.
        """
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        _hub().push.check_name(name)
        self.hub_model_id = name
        self.push_in_progress = None

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        dataset_name: str | None = None,
    ) -> None:
        """Write a card without results into `args.output_dir`, unless someone has written one.

        Args:
            language (`str`, *optional*): Language code.
            license (`str`, *optional*): As the Hub writes it.
            tags (`str` or `list[str]`, *optional*): Unused: the tags are those of this package.
            model_name (`str`, *optional*): By default that of the repository.
            finetuned_from (`str`, *optional*): The base model.
            tasks (`str` or `list[str]`, *optional*): Unused: it follows from the kind of the model.
            dataset_tags (`str` or `list[str]`, *optional*): Name of the data on the Hub.
            dataset (`str` or `list[str]`, *optional*): Name of the data.
            dataset_args (`str` or `list[str]`, *optional*): Unused.
            dataset_name (`str`, *optional*): Name of the data, as TRL calls it.

        Raises:
            ValueError: If a text must not be published.
        """
        name = model_name or self.args.hub_model_id or Path(self.args.output_dir).absolute().name

        def write() -> None:
            if not any(Path(self.args.output_dir).glob("*.safetensors")):
                return  # TRL creates a card with every checkpoint, before there is a model
            _hub().write_trained_card(
                self.args.output_dir,
                model_id=name,
                base_model=finetuned_from,
                license=license,
                dataset=_first(dataset) or dataset_name,
                dataset_id=_first(dataset_tags),
                language=_first(language),
            )

        on_main_process(self.accelerator, write)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        overwrite: bool = False,
        **kwargs: Any,
    ) -> str:
        """Save the model, write its card and push both, checked like every push: safetensors only, no secrets.

        Args:
            commit_message (`str`, *optional*): Message of the commit.
            blocking (`bool`): Unused: the push always blocks.
            token (`str`, *optional*): Token of the Hub; None for `args.hub_token`, then the one stored by `hf auth login`.
            revision (`str`, *optional*): Branch; None for `args.hub_revision`.
            private (`bool`, *optional*): Whether a new repository is private; None for `args.hub_private_repo`, then yes.
            overwrite (`bool`): Push also into a repository that holds other content.
            kwargs (`Any`): For `create_model_card`.

        Returns:
            `str`: Address of the commit.

        Raises:
            FileNotFoundError: If something is missing that a published model has.
            ValueError: If something in the folder must not be published.
            FileExistsError: If the repository holds other content.
            PermissionError: If the token is missing, wrong, or may not write there.
            PushError: If the Hub cannot be reached or refuses otherwise.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model(_internal_call=True)
        self.create_model_card(**{"model_name": self.hub_model_id, **kwargs})
        wanted = self.args.hub_private_repo if private is None else private

        def push() -> str:
            address = _hub().push_trained(
                self.args.output_dir,
                self.hub_model_id,
                private=wanted is None or wanted,
                token=token or self.args.hub_token,
                revision=revision or self.args.hub_revision,
                commit_message=commit_message or "End of training",
                overwrite=overwrite,
            )
            return str(address)

        return str(on_main_process(self.accelerator, push))
