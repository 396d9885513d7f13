"""The record of a run, stored beside the model, and pushes of a trainer's model, checked like every push."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from huggingface_hub.utils import validate_repo_id
from transformers import Trainer

from hf_captionrl.utils.io import counted, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

RUN_FILE = "run.json"
"""The record of a run, in sections, without local paths: `settings` (written before the first step), `training` (base model,
objective, rewards, data and seeds), `selection` (the selected checkpoint) and, in checkpoints, `configuration` (what must be
equal in a run that resumes)."""
LAST_CHECKPOINT = "the last checkpoint"


def read_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The sections of the record in a folder; empty if there is none."""
    path = Path(folder) / RUN_FILE
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def write_run(folder: str | os.PathLike[str], **sections: Any) -> None:
    """Add sections to the record in a folder."""
    write_json(Path(folder) / RUN_FILE, read_run(folder) | sections)


def on_main_process(accelerator: Any, function: Callable[[], Any]) -> Any:
    """Result or error of a function that only the main process calls, on every process."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except (OSError, ValueError, RuntimeError) as error:
            outcome[1] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def public_name(name: Any) -> str | None:
    """A name on the Hub unchanged; of a folder only the last part."""
    text = str(name or "")
    return (Path(text).name if os.path.isabs(text) or os.path.exists(text) else text) or None


def base_model(trainer: Any) -> Any:
    """The model without adapter and wrappers."""
    inner = trainer.accelerator.unwrap_model(trainer.model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def deciding_settings(args: Any) -> dict[str, Any]:
    """The section `settings` of the record of a run: what decides how it trains."""
    metric = args.metric_for_best_model if args.load_best_model_at_end else None
    configuration = getattr(args, "configuration", None)  # of a recipe
    return {
        **({} if configuration is None else {"configuration": re.sub(r"(?<!\S)/\S*/", "", configuration)}),
        "learning rate": f"{args.learning_rate:g}",
        "length": counted(args.max_steps, "step") if args.max_steps > 0 else counted(args.num_train_epochs, "epoch"),
        "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        **({"beams": args.generation_num_beams} if hasattr(args, "generation_num_beams") else {}),
        "selection": LAST_CHECKPOINT if metric is None else metric,
    }


def training_facts(trainer: Any) -> dict[str, Any]:
    """The section `training` of the record of a run."""
    captioner, args, data = getattr(trainer, "captioner", None), trainer.args, trainer.train_dataset
    rewards, mle_weight = getattr(trainer, "rewards", None), getattr(args, "mle_weight", None)
    number = len(data) if hasattr(data, "__len__") else None  # None for a stream
    facts: dict[str, Any] = {
        "trainer": type(trainer).__name__,
        "base_model": public_name(getattr(base_model(trainer), "name_or_path", None)),
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "learning_rate": args.learning_rate,
        "seeds": {"seed": args.seed, "data_seed": args.data_seed},
    }
    if captioner is None:
        facts["train_rows"] = number
    else:
        facts |= {"family": captioner.family, "prompt": captioner.prompt}
        facts["train_images"] = getattr(data, "num_images", number)
        beams, longest = args.generation_num_beams, args.generation_max_new_tokens
        facts["generation"] = {"num_beams": beams, "max_new_tokens": longest}
    if rewards is not None:
        names = {"self_retrieval": "self_retrieval", "diversity": "sle"}
        kinds = [names[reward.name] for reward in rewards.rewards if reward.name in names]
        facts |= {"objective": kinds[0]} if kinds else {}
        facts |= {"reward": rewards.describe(), "num_generations": args.num_generations}
        facts["max_completion_length"] = args.max_completion_length
        facts |= {"baseline": args.baseline} if captioner is not None else {}
        facts["reward_scorers"] = [public_name(s.signature) for s in trainer.scorers if hasattr(s, "signature")]
    elif mle_weight is not None:
        facts |= {"objective": "mle" if mle_weight == 1.0 else "smile", "mle_weight": mle_weight}
        chosen = ("first_token", "subset_scope", "max_caption_length")
        facts |= {name: getattr(args, name) for name in chosen if hasattr(args, name)}
    return facts


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value or None


class CheckedPush(Trainer):
    """A Trainer whose upload, also that of TRL, is checked like every push: safetensors only, no secrets, private."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        selection = getattr(self, "selection", None)
        record = {"settings": deciding_settings(self.args), "training": training_facts(self)}
        record |= {} if selection is None else {"selection": selection}
        write_json(Path(output_dir or self.args.output_dir) / RUN_FILE, record)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Check the name of the repository; the push creates it, after its other checks."""
        name = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        validate_repo_id(name)
        self.hub_model_id = name
        self.push_in_progress = None

    def create_model_card(self, **facts: Any) -> None:  # type: ignore[override]
        """Write a card into `args.output_dir`, unless someone has written one."""
        from hf_captionrl.hub.cards import write_trained_card

        folder = Path(self.args.output_dir)

        def write() -> None:
            if any(folder.glob("*.safetensors")):  # TRL creates a card with every checkpoint, before there is a model
                write_trained_card(
                    folder,
                    model_id=facts.get("model_name") or self.args.hub_model_id or folder.absolute().name,
                    base_model=facts.get("finetuned_from"),
                    license=facts.get("license"),
                    dataset=_first(facts.get("dataset")) or facts.get("dataset_name"),
                    dataset_id=_first(facts.get("dataset_tags")),
                    language=_first(facts.get("language")),
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
        """Save the model, write its card and push both; returns the address of the commit.

        `private` and `token` override those of the arguments; a new repository is private unless they say otherwise. `overwrite`
        pushes also into a repository that holds other content. The push always blocks. `kwargs` are for `create_model_card`.
        """
        from hf_captionrl.hub.push import push_folder

        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model(_internal_call=True)
        self.create_model_card(**{"model_name": self.hub_model_id, **kwargs})
        wanted = self.args.hub_private_repo if private is None else private

        def push() -> str:
            return push_folder(
                self.args.output_dir,
                self.hub_model_id,
                private=wanted is None or wanted,
                token=token or self.args.hub_token,
                revision=revision or self.args.hub_revision,
                commit_message=commit_message or "End of training",
                overwrite=overwrite,
            )

        return str(on_main_process(self.accelerator, push))
