"""The rollouts of a trainer: completions, their rewards and advantages, and what a checkpoint keeps of them.

Legend: B images of this process, G captions per image, N = B * G captions, C images of all processes, T tokens.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig

from hf_captionrl.captioners.captioner import Captioner, Completions, split_greedy
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.data.columns import caption_column, id_column
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.losses.policy_gradient import loss_normalizer
from hf_captionrl.rewards import BASELINES, RewardContext, make_baseline
from hf_captionrl.rewards.advantages import compute_advantages
from hf_captionrl.trainers.checkpoints import mean_over_processes
from hf_captionrl.trainers.policy import make_reference, reference_policy, refuse_shared_parameters

if TYPE_CHECKING:
    from hf_captionrl.trainers.caption_rl_trainer import CaptionRLTrainer


# --- Completions: the captions that the policy generates for a batch of images ---------------------------------------
# Legend: B images of this process, G captions per image, N = B * G captions, T tokens.


@contextmanager
def drawing_from_the_policy(captioner: Captioner) -> Iterator[None]:
    """Generate from the policy's own distribution, without the checkpoint's generation settings.

    Published settings penalise repetition, forbid n-grams or force an end token. Such captions are not samples of the
    distribution whose log-probabilities the gradient uses.
    """
    ids = {
        "bos_token_id": captioner.start_token_id,
        "decoder_start_token_id": captioner.start_token_id,
        "eos_token_id": list(captioner.end_token_ids),
        "pad_token_id": captioner.pad_token_id,
    }
    writers = [m for m in captioner.base_model.modules() if getattr(m, "generation_config", None) is not None]
    own = [writer.generation_config for writer in writers]
    for writer in writers:
        writer.generation_config = GenerationConfig(**ids)
    try:
        yield
    finally:
        for writer, config in zip(writers, own, strict=True):
            writer.generation_config = config


def image_inputs(captioner: Captioner, micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Images of the micro-batches for generation; a frozen vision tower encodes them once for generation and update.

    With a frozen tower, features replace the pixels of the micro-batches.
    """
    images = []
    frozen = not any(p.requires_grad for p in captioner.vision_tower.parameters())
    for inputs in micro_batches:
        mine = {name: inputs[name] for name in captioner.image_inputs if name in inputs}
        if frozen and "pixel_values" in mine:
            with torch.no_grad(), evaluating(captioner.vision_tower):
                mine["image_features"] = captioner.image_features(**mine)
            del mine["pixel_values"], inputs["pixel_values"]
            inputs["image_features"] = mine["image_features"]
        images.append(mine)
    return images


def reference_ids(captioner: Captioner, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions of the data, encoded like completions.

    Ids and mask are `(N, T)`.
    """
    spoken = [i for i, caption in enumerate(captions) if caption.strip()]
    ids = torch.full((len(captions), 1), captioner.eos_token_id)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if spoken:
        batch = captioner.encode_captions([captions[i] for i in spoken], max_length=10**6)
        labels = batch["labels"][:, len(captioner.prompt_ids()) :]
        ids = ids.expand(-1, labels.size(1)).clone()
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, 0] = True
        ids[spoken], mask[spoken] = labels.clamp(min=0), labels != IGNORE_INDEX
    return ids, mask


def write_completions(
    captioner: Captioner,
    images: Sequence[dict[str, Tensor]],
    *,
    batch_size: int | None = None,
    **generate_kwargs: Any,
) -> Completions:
    """Completions for the images of several micro-batches, generated `batch_size` images at a time."""
    if batch_size is not None:
        whole = {name: torch.cat([batch[name] for batch in images]) for name in images[0]}
        number = len(next(iter(whole.values())))
        starts = range(0, number, batch_size)
        images = [{name: value[s : s + batch_size] for name, value in whole.items()} for s in starts]
    with drawing_from_the_policy(captioner):
        outputs = [captioner.generate(**batch, **generate_kwargs) for batch in images]
    longest = max(output.ids.size(1) for output in outputs)
    ids = [_widen(output.ids, longest, captioner.pad_token_id) for output in outputs]
    mask = [_widen(output.mask, longest, False) for output in outputs]
    return Completions(
        captions=[caption for output in outputs for caption in output.captions],
        ids=torch.cat(ids),
        mask=torch.cat(mask),
        ended=torch.cat([output.ended for output in outputs]),
    )


def token_log_probs(
    captioner: Captioner, inputs: dict[str, Any], args: Any, model: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and, if the loss uses them, entropies of the tokens, `(N, T - 1)`."""
    names = ("input_ids", "attention_mask", "labels", *captioner.image_inputs)
    batch = {name: inputs[name] for name in names if name in inputs}
    temperature = args.temperature if args.do_sample else 1.0
    entropy = bool(args.entropy_weight)
    found = captioner.log_probs(batch, temperature=temperature, return_entropy=entropy, model=model)
    return found if isinstance(found, tuple) else (found, None)


def _widen(rows: Tensor, width: int, value: Any) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.size(1)), value=value)


# --- The rollout in use, stored in a checkpoint between two iterations over it ---------------------------------------
# Images are not stored: the data loader reads them again.

_NORMALIZER = "normalizer"


def _file(folder: str | os.PathLike[str], process_index: int) -> Path:
    return Path(folder) / f"caption_rl_rollout_{process_index}.safetensors"


def save_rollout(
    folder: str | os.PathLike[str],
    process_index: int,
    micro_batches: Sequence[Mapping[str, Any]],
    normalizer: Tensor | float,
    images: Collection[str],
) -> Path:
    """Store the micro-batches of this process."""
    tensors = {_NORMALIZER: torch.as_tensor(normalizer, dtype=torch.float64).reshape(1).cpu()}
    for index, inputs in enumerate(micro_batches):
        for name, value in inputs.items():
            if isinstance(value, Tensor) and name not in images:
                tensors[f"{index}/{name}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    os.makedirs(folder, exist_ok=True)  # the main process may not have created it yet
    path = _file(folder, process_index)
    save_file(tensors, path)
    return path


def load_rollout(
    folder: str | os.PathLike[str], process_index: int, device: torch.device
) -> tuple[list[dict[str, Any]], float]:
    """The micro-batches that [`save_rollout`] stored."""
    tensors = load_file(_file(folder, process_index))
    normalizer = float(tensors.pop(_NORMALIZER))
    micro_batches: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition("/")
        micro_batches.setdefault(int(index), {"micro_batch": int(index)})[name] = value.to(device)
    return [micro_batches[index] for index in sorted(micro_batches)], normalizer


# --- Columns of the training data for reward functions, read on access -----------------------------------------------

_DECODED = tuple(getattr(datasets, name) for name in ("Image", "Audio", "Video") if hasattr(datasets, name))


class DecodedColumn(Sequence[Any]):
    """Values of a column for some rows of a data set; files are decoded on first access."""

    def __init__(self, dataset: datasets.Dataset, name: str, rows: Sequence[int]) -> None:
        self.name = name
        self.rows = list(rows)
        self._column = dataset.select_columns(name)
        self._decoded: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self.rows[index]
        if row not in self._decoded:
            self._decoded[row] = self._column[row][self.name]
        return self._decoded[row]


class RowColumns(Mapping[str, Sequence[Any]]):
    """The columns of some rows of a data set: lists, and [`DecodedColumn`] for images.

    Rows are found by number, so they match the captions of any process.
    """

    def __init__(self, dataset: datasets.Dataset, rows: Sequence[int]) -> None:
        self._dataset = dataset.with_format(None)
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._dataset.column_names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._dataset.column_names)

    def __getitem__(self, name: str) -> Sequence[Any]:
        if name not in self._dataset.column_names:
            raise KeyError(name)
        if isinstance(self._dataset.features[name], _DECODED):
            return DecodedColumn(self._dataset, name, self._rows)
        return self._dataset.select_columns(name)[self._rows][name]


# --- The rollouts of a trainer: completions, their rewards and advantages, and what a checkpoint keeps of them -------

logger = logging.getLogger(__name__)


class RolloutEngine:
    """Makes the rollouts of a [`CaptionRLTrainer`] and owns their state.

    `normalizer` is the number of captions or tokens of the whole optimizer step, by which its loss is divided.
    """

    def __init__(self, trainer: CaptionRLTrainer, images: datasets.Dataset | None) -> None:
        self.trainer = trainer
        self.images: Any = images
        if images is not None:
            self.image_ids, self.references = id_column(images), caption_column(images)
        self.reset()

    def reset(self) -> None:
        """Reset to the trainer's current policy."""
        trainer, args = self.trainer, self.trainer.args
        refuse_shared_parameters(trainer.captioner.model, trainer.scorers)
        self.reference = make_reference(trainer.captioner) if args.beta else None
        names = sorted({self._baseline_name(reward) for reward in trainer.rewards.rewards})
        if args.multi_objective_aggregation == "normalize_then_sum" and names != ["group_mean"]:
            raise ValueError(
                "multi_objective_aggregation='normalize_then_sum' subtracts the mean of the captions of an image from every "
                f"reward, and the rewards have the baselines {names}. Leave out rewards with another baseline, or use "
                "'sum_then_normalize'."
            )
        self.baselines = {n: make_baseline(n, args.num_generations, do_sample=args.is_exploring) for n in names}
        self.micro_batches: list[dict[str, Any]] = []
        self.normalizer: Tensor | float = 1.0
        self._resumed: tuple[list[dict[str, Any]], float] | None = None
        self._recalls: list[float] = []  # of the rollouts of this epoch, for an adaptive curriculum

    def _baseline_name(self, reward: Any) -> str:
        return reward.baseline or str(self.trainer.args.baseline)

    def begin_step(self, micro_batches: list[dict[str, Any]]) -> None:
        """Fill the micro-batches of an optimizer step with a new rollout, or with that of the previous iteration."""
        num_iterations = self.trainer.args.num_iterations
        within = self.trainer.state.global_step % num_iterations
        if within and not self.micro_batches:  # resumed between two iterations
            self.micro_batches = self._restore(micro_batches)
        if within and self.micro_batches:
            for inputs, kept in zip(micro_batches, self.micro_batches, strict=True):
                inputs.clear()
                inputs.update(kept)
            return
        self.roll_out(micro_batches)
        self.micro_batches = micro_batches if num_iterations > 1 else []

    def roll_out(self, micro_batches: list[dict[str, Any]]) -> None:
        """Generate completions, reward them, and put completions and advantages into the micro-batches."""
        trainer = self.trainer
        self._prepare(micro_batches)
        images = image_inputs(trainer.captioner, micro_batches)
        needs_greedy = any(baseline.needs_greedy for baseline in self.baselines.values())
        completions, greedy_completions = self._completions(images, needs_greedy)
        context = self.reward_context(micro_batches, completions)
        greedy = None if greedy_completions is None else self.reward_context(micro_batches, greedy_completions)
        advantages, rewards = compute_advantages(
            trainer.rewards,
            self.baselines,
            str(trainer.args.baseline),
            context,
            greedy,
            self._mean,
            scale_rewards=trainer.args.scale_rewards,
            multi_objective_aggregation=trainer.args.multi_objective_aggregation,
        )
        self._fill(micro_batches, completions, advantages)
        means = trainer.monitor.record(context, rewards, advantages)
        sampler = trainer.batch_sampler
        if sampler.adaptive is not None and "recall_at_1" in means:
            self._recalls.append(means["recall_at_1"])
            # With the last rollout of the epoch, before anything is saved: a resumed run must know.
            if len(self._recalls) == len(sampler):
                sampler.update(math.fsum(self._recalls) / len(self._recalls))
                self._recalls.clear()

    def _completions(
        self, images: list[dict[str, Tensor]], needs_greedy: bool
    ) -> tuple[Completions, Completions | None]:
        """Completions, and the greedy one of each image for a baseline."""
        if not needs_greedy:
            return self.generate(images), None
        return split_greedy(self.generate(images, greedy_first=True), self.trainer.args.num_generations)

    def generate(self, images: list[dict[str, Tensor]], **overrides: Any) -> Completions:
        """Completions of the policy for the images of several micro-batches."""
        args = self.trainer.args
        settings: dict[str, Any] = {
            "max_new_tokens": args.max_completion_length,
            "num_return_sequences": args.num_generations,
            "num_beams": 1,
            "do_sample": args.do_sample,
            **(args.generation_kwargs if isinstance(args.generation_kwargs, dict) else {}),
            **overrides,
        }
        if settings["do_sample"]:
            settings = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, **settings}
        return write_completions(self.trainer.captioner, images, batch_size=args.generation_batch_size, **settings)

    def reward_context(self, micro_batches: list[dict[str, Any]], completions: Completions) -> RewardContext:
        """What rewards see of a rollout, with the images of all processes as candidates."""
        trainer = self.trainer
        rows = torch.cat([inputs["rows"] for inputs in micro_batches])  # (B,)
        candidates = trainer.accelerator.gather(rows)  # (C,), process after process
        positions = trainer.accelerator.process_index * len(rows) + torch.arange(len(rows), device=rows.device)
        listed = rows.tolist()
        return RewardContext(
            captions=completions.captions,
            ids=completions.ids,
            mask=completions.mask,
            ended=completions.ended,
            rows=rows,
            image_ids=self.image_ids[listed],
            references=self.references[listed],
            candidates=candidates,
            positions=positions,
            bag_size=trainer.batch_sampler.bag_size if trainer.batch_sampler.bag_size > 1 else 0,
            step=trainer.state.global_step // trainer.args.num_iterations,
            columns=RowColumns(self.images, listed),
            prompts=[trainer.captioner.prompt or ""] * len(completions.captions),
            trainer_state=trainer.state,
        )

    def _mean(self, value: float) -> float:
        return mean_over_processes(self.trainer.accelerator, value)

    def _prepare(self, micro_batches: list[dict[str, Any]]) -> None:
        for inputs in micro_batches:
            prepared = self.trainer._prepare_inputs(inputs)
            inputs.clear()
            inputs.update(prepared)

    def _fill(self, micro_batches: list[dict[str, Any]], completions: Completions, advantages: Tensor) -> None:
        """Replace the captions of the data by the completions."""
        args, captioner = self.trainer.args, self.trainer.captioner
        G, start = args.num_generations, 0
        for index, inputs in enumerate(micro_batches):
            here = slice(start * G, (start + len(inputs["rows"])) * G)
            start += len(inputs["rows"])
            inputs.update(captioner.encode_completions(completions.ids[here], completions.mask[here]))
            inputs["micro_batch"] = index
            inputs["advantages"] = advantages[here].to(args.device, torch.float32)
            if self.reference is not None:
                with torch.no_grad(), reference_policy(self.reference, captioner) as reference:
                    inputs["ref_log_probs"] = token_log_probs(reference, inputs, args)[0]
        number = loss_normalizer(completions.mask, args.loss_type, args.max_completion_length)  # type: ignore[arg-type]
        self.normalizer = self._mean(float(number)) * self.trainer.accelerator.num_processes

    # Checkpoints

    def save(self, checkpoint: str) -> dict[str, Any]:
        """Store the rollout in use, if further iterations over it follow; the rest of the state, for JSON."""
        accelerator, stored = self.trainer.accelerator, None
        if self.micro_batches and self.trainer.state.global_step % self.trainer.args.num_iterations:
            process = accelerator.process_index
            save_rollout(checkpoint, process, self.micro_batches, self.normalizer, self._image_names())
            stored = accelerator.num_processes
        return {
            "baselines": {name: baseline.state_dict() for name, baseline in self.baselines.items()},
            "recalls": self._recalls,
            "rollout": stored,
        }

    def load(self, checkpoint: str, state: Mapping[str, Any]) -> None:
        """Resume from what `save` stored and returned."""
        accelerator = self.trainer.accelerator
        for name, baseline in self.baselines.items():
            baseline.load_state_dict(state["baselines"].get(name) or BASELINES[name]().state_dict())
        self._recalls = list(state["recalls"])
        self.micro_batches, self._resumed = [], None
        if state.get("rollout") == accelerator.num_processes:
            self._resumed = load_rollout(checkpoint, accelerator.process_index, self.trainer.args.device)

    def _restore(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rollout of the checkpoint with the images of the data loader; empty if the checkpoint has none."""
        if self._resumed is None:
            logger.warning(
                "The checkpoint lies between two iterations over one rollout, and does not hold the rollout of %d process(es). "
                "New captions are generated, so this run differs from one that was not interrupted.",
                self.trainer.accelerator.num_processes,
            )
            return []
        self._prepare(micro_batches)
        image_inputs(self.trainer.captioner, micro_batches)
        kept, self.normalizer = self._resumed
        images = self._image_names()
        self._resumed = None
        return [
            {**{name: inputs[name] for name in images if name in inputs}, **stored}
            for inputs, stored in zip(micro_batches, kept, strict=True)
        ]

    def _image_names(self) -> set[str]:
        return {"pixel_values", "image_features", *self.trainer.captioner.image_inputs}
