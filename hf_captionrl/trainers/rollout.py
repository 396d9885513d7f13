"""The rollouts of a trainer: completions, their rewards and advantages, and what a checkpoint keeps of them.

Legend: B images of this process, G captions per image, N = B * G captions, C images of all processes, T tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, TrainerState

from hf_captionrl.captioners.captioner import Captioner, Completions, split_greedy
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.data.columns import caption_column, id_column
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.losses.policy_gradient import loss_normalizer
from hf_captionrl.rewards import BASELINES, RewardContext, make_baseline
from hf_captionrl.rewards.advantages import compute_advantages
from hf_captionrl.rewards.base import WeightedRewards
from hf_captionrl.trainers.policy import make_reference, reference_policy

logger = logging.getLogger(__name__)


def means_over_processes(accelerator: Any, values: list[float]) -> list[float]:
    """Means of numbers over the processes, in float64."""
    if accelerator.num_processes == 1 or not values:
        return values
    mine = torch.tensor([values], dtype=torch.float64, device=accelerator.device)
    return accelerator.gather(mine).mean(0).tolist()


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

    def widened(rows: Tensor, value: Any) -> Tensor:
        return torch.nn.functional.pad(rows, (0, longest - rows.size(1)), value=value)

    return Completions(
        captions=[caption for output in outputs for caption in output.captions],
        ids=torch.cat([widened(output.ids, captioner.pad_token_id) for output in outputs]),
        mask=torch.cat([widened(output.mask, False) for output in outputs]),
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


# --- Rollouts: completions, their rewards and advantages, and what a checkpoint keeps of them -------------------------

_DECODED = tuple(getattr(datasets, name) for name in ("Image", "Audio", "Video") if hasattr(datasets, name))


class RowColumns(Mapping[str, Sequence[Any]]):
    """The columns of some rows of a data set for reward functions: lists, and lazy columns for images.

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
        column = self._dataset.select_columns(name)
        if isinstance(self._dataset.features[name], _DECODED):
            return column.select(self._rows)[name]
        return column[self._rows][name]


class Rollout(NamedTuple):
    """A new rollout: what rewards saw, and their numbers."""

    context: RewardContext
    rewards: Tensor  # (N, R), unweighted
    advantages: Tensor  # (N,)


class RolloutEngine:
    """Makes the rollouts of a policy and owns their state.

    `normalizer` is the number of captions or tokens of the whole optimizer step, by which its loss is divided.

    Args:
        rewards: The rewards, prepared before the first rollout.
        args: A `CaptionRLConfig`.
        accelerator: Of the trainer; the images of all processes are distractors of each other.
        images: The training data; None if there are none.
    """

    def __init__(self, rewards: WeightedRewards, args: Any, accelerator: Any, images: Any) -> None:
        self.rewards = rewards
        self.args = args
        self.accelerator = accelerator
        self.images = images
        if images is not None:
            self.image_ids, self.references = id_column(images), caption_column(images)

    def reset(self, policy: Captioner) -> None:
        """Start with a policy, which also is the reference of the KL penalty."""
        args = self.args
        self.policy = policy
        self.reference = make_reference(policy) if args.beta else None
        names = sorted({reward.baseline or args.baseline for reward in self.rewards.rewards})
        if args.multi_objective_aggregation == "normalize_then_sum" and names != ["group_mean"]:
            raise ValueError(
                "multi_objective_aggregation='normalize_then_sum' subtracts the mean of the captions of an image from every "
                f"reward, and the rewards have the baselines {names}. Leave out rewards with another baseline, or use "
                "'sum_then_normalize'."
            )
        self.baselines = {n: make_baseline(n, args.num_generations, do_sample=args.is_exploring) for n in names}
        self.micro_batches: list[dict[str, Any]] = []  # kept between two iterations over a rollout
        self.normalizer: Tensor | float = 1.0
        self._resumed: dict[str, Tensor] = {}

    def begin_step(self, micro_batches: list[dict[str, Any]], state: TrainerState, bag_size: int) -> Rollout | None:
        """Fill the micro-batches of an optimizer step with a new rollout, or with that of the previous iteration."""
        within = state.global_step % self.args.num_iterations
        if within and not self.micro_batches:  # resumed between two iterations
            self.micro_batches = self._restored(micro_batches)
        if within and self.micro_batches:
            for inputs, kept in zip(micro_batches, self.micro_batches, strict=True):
                inputs.clear()
                inputs.update(kept)
            return None
        rollout = self.roll_out(micro_batches, state, bag_size)
        self.micro_batches = micro_batches if self.args.num_iterations > 1 else []
        return rollout

    def roll_out(self, micro_batches: list[dict[str, Any]], state: TrainerState, bag_size: int) -> Rollout:
        """Generate completions, reward them, and put completions and advantages into the micro-batches."""
        args = self.args
        images = image_inputs(self.policy, micro_batches)
        greedy = None
        if any(baseline.needs_greedy for baseline in self.baselines.values()):
            completions, completion = split_greedy(self.generate(images, greedy_first=True), args.num_generations)
            context = self.reward_context(micro_batches, completions, state, bag_size)
            greedy = self.reward_context(micro_batches, completion, state, bag_size)
        else:
            completions = self.generate(images)
            context = self.reward_context(micro_batches, completions, state, bag_size)
        advantages, rewards = compute_advantages(
            self.rewards,
            self.baselines,
            args.baseline,
            context,
            greedy,
            self._mean,
            scale_rewards=args.scale_rewards,
            multi_objective_aggregation=args.multi_objective_aggregation,
        )
        self._fill(micro_batches, completions, advantages)
        return Rollout(context, rewards, advantages)

    def generate(self, images: list[dict[str, Tensor]], **overrides: Any) -> Completions:
        """Completions of the policy for the images of several micro-batches."""
        args = self.args
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
        return write_completions(self.policy, images, batch_size=args.generation_batch_size, **settings)

    def reward_context(
        self, micro_batches: list[dict[str, Any]], completions: Completions, state: TrainerState, bag_size: int
    ) -> RewardContext:
        """What rewards see of a rollout, with the images of all processes as candidates."""
        rows = torch.cat([inputs["rows"] for inputs in micro_batches])  # (B,)
        listed = rows.tolist()
        first = self.accelerator.process_index * len(rows)
        return RewardContext(
            captions=completions.captions,
            ids=completions.ids,
            mask=completions.mask,
            ended=completions.ended,
            rows=rows,
            image_ids=self.image_ids[listed],
            references=self.references[listed],
            candidates=self.accelerator.gather(rows),  # (C,), process after process
            positions=first + torch.arange(len(rows), device=rows.device),
            bag_size=bag_size if bag_size > 1 else 0,
            step=state.global_step // self.args.num_iterations,
            columns=RowColumns(self.images, listed),
            prompts=[self.policy.prompt or ""] * len(completions.captions),
            trainer_state=state,
        )

    def _mean(self, value: float) -> float:
        return means_over_processes(self.accelerator, [value])[0]

    def _fill(self, micro_batches: list[dict[str, Any]], completions: Completions, advantages: Tensor) -> None:
        """Replace the captions of the data by the completions."""
        args, G, start = self.args, self.args.num_generations, 0
        for index, inputs in enumerate(micro_batches):
            here = slice(start * G, (start + len(inputs["rows"])) * G)
            start += len(inputs["rows"])
            inputs.update(self.policy.encode_completions(completions.ids[here], completions.mask[here]))
            inputs["micro_batch"] = index
            inputs["advantages"] = advantages[here].to(args.device, torch.float32)
            if self.reference is not None:
                with torch.no_grad(), reference_policy(self.reference, self.policy) as reference:
                    inputs["ref_log_probs"] = token_log_probs(reference, inputs, args)[0]
        number = loss_normalizer(completions.mask, args.loss_type, args.max_completion_length)
        self.normalizer = self._mean(float(number)) * self.accelerator.num_processes

    # Checkpoints: between two iterations they hold the rollout in use, without images, which the data loader reads again.

    def _file(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"caption_rl_rollout_{self.accelerator.process_index}.safetensors"

    def save(self, checkpoint: str, global_step: int) -> dict[str, Any]:
        """Store the rollout in use, if further iterations over it follow; the rest of the state, for JSON."""
        stored = None
        if self.micro_batches and global_step % self.args.num_iterations:
            tensors = {"normalizer": torch.as_tensor(self.normalizer, dtype=torch.float64).reshape(1).cpu()}
            images = self._image_names()
            for index, inputs in enumerate(self.micro_batches):
                for name, value in inputs.items():
                    if isinstance(value, Tensor) and name not in images:
                        copy = value.detach().cpu().clone(memory_format=torch.contiguous_format)
                        tensors[f"{index}/{name}"] = copy
            save_file(tensors, self._file(checkpoint))
            stored = self.accelerator.num_processes
        return {"baselines": {n: b.state_dict() for n, b in self.baselines.items()}, "rollout": stored}

    def load(self, checkpoint: str, state: Mapping[str, Any]) -> None:
        """Resume from what `save` stored and returned."""
        for name, baseline in self.baselines.items():
            baseline.load_state_dict(state["baselines"].get(name) or BASELINES[name]().state_dict())
        is_stored = state.get("rollout") == self.accelerator.num_processes
        self.micro_batches, self._resumed = [], load_file(self._file(checkpoint)) if is_stored else {}

    def _restored(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rollout of the checkpoint with the images of the data loader; empty if the checkpoint has none."""
        if not self._resumed:
            logger.warning(
                "The checkpoint lies between two iterations over one rollout, and does not hold the rollout of %d process(es). "
                "New captions are generated, so this run differs from one that was not interrupted.",
                self.accelerator.num_processes,
            )
            return []
        image_inputs(self.policy, micro_batches)
        names = self._image_names()
        kept = [{name: inputs[name] for name in names if name in inputs} for inputs in micro_batches]
        self.normalizer = float(self._resumed.pop("normalizer"))
        for key, value in self._resumed.items():
            index, _, name = key.partition("/")
            kept[int(index)] |= {"micro_batch": int(index), name: value.to(self.args.device)}
        self._resumed = {}
        return kept

    def _image_names(self) -> set[str]:
        return {"pixel_values", "image_features", *self.policy.image_inputs}
