"""Reinforcement learning of captioners.

Legend: B images of this process, G captions per image, N = B * G captions, C images of all processes, T tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import datasets
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedModel, TrainerState

from hf_captionrl.captioners.captioner import Captioner, Completions, split_greedy
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.data import training_rows
from hf_captionrl.data.bag_curriculum import BagCurriculumSampler, parse_bag_schedule
from hf_captionrl.data.columns import caption_column, concept_column, id_column
from hf_captionrl.losses import IGNORE_INDEX, policy_gradient_loss
from hf_captionrl.losses.policy_gradient import LossType, loss_normalizer
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards import (
    BASELINES,
    RewardContext,
    RewardData,
    RewardLike,
    SelfRetrieval,
    WeightedRewards,
    make_baseline,
    resolve_rewards,
)
from hf_captionrl.rewards.advantages import compute_advantages
from hf_captionrl.trainers.caption_config import RL_REFUSED, CaptionConfig, Refused, trl_remedy
from hf_captionrl.trainers.caption_trainer import CaptionTrainer, loader_settings
from hf_captionrl.trainers.guard import GuardAction, GuardCallback, GuardThresholds
from hf_captionrl.trainers.policy import autocast, make_reference, reference_policy
from hf_captionrl.trainers.rollout_monitor import RolloutMonitor
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.options import Fraction, NotNegative, Positive, Range, check_values, documented

if TYPE_CHECKING:
    from hf_captionrl.retrieval import Scorer

logger = logging.getLogger(__name__)

REWARD_METRIC = "reward_recall_at_1"
"""Default metric for the best model: R@1 by the reward scorer, because the held-out scorer must not select."""


@dataclass
class CaptionRLConfig(CaptionConfig):
    r"""Arguments of [`CaptionRLTrainer`], with TRL's names where TRL has them.

    One optimizer step is one rollout: `per_device_train_batch_size * gradient_accumulation_steps * processes` images, all
    of them distractors of each other, and `num_generations` captions each. `per_device_train_batch_size` is the number
    of images in one forward pass.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*CaptionConfig._VALID_DICT_FIELDS, "generation_kwargs", "bag_schedule"]
    refused: ClassVar[Refused] = RL_REFUSED
    retrieval_metric: ClassVar[str] = REWARD_METRIC

    num_generations: Positive = documented(1, "G, captions generated for each image in training.")
    do_sample: bool = documented(True, "Sample captions in training; False: greedy decoding.")
    temperature: float = documented(1.0, "Sampling temperature. Log-probabilities are those of the same distribution.")
    top_p: Annotated[float, Range(above=0, at_most=1)] = documented(1.0, "Nucleus sampling; 1 keeps every token.")
    top_k: NotNegative = documented(0, "Sample only from this many tokens; 0 keeps every token.")
    max_completion_length: Positive | None = documented(
        None,
        "Longest caption generated in training, in tokens, the end token included. None: 40, or what the reward scorers read.",
    )
    generation_kwargs: dict[str, Any] | str | None = documented(
        None, "More arguments of generate in training, e.g. {'min_new_tokens': 3}."
    )
    reward_weights: list[float] | None = documented(
        None, "Weight of each reward, in the order of reward_funcs. None: 1 each."
    )
    baseline: str | None = documented(
        "running_mean",
        f"Baseline that is subtracted from rewards: one of {sorted(BASELINES)}. A reward may have another.",
    )
    scale_rewards: str = documented(
        "none",
        "Divide advantages by the standard deviation of the rewards: of the captions of an image ('group' or True), of "
        "all captions of a step ('batch'), or not ('none' or False). GRPO: 'group' with baseline='group_mean'.",
    )
    loss_type: LossType = documented(
        "grpo",
        "Loss of a step from its tokens: 'grpo', the mean over the tokens of each caption; 'dapo', the sum divided by "
        "all tokens of the step; 'dr_grpo', the sum divided by captions times max_completion_length; 'bnpo', the sum divided by "
        "the tokens of the micro-batch; 'cispo' and 'sapo', 'dapo' and 'grpo' with a clipped weight or a smooth gate instead of the "
        "clipped ratio; 'sum', the sum divided by captions, as the papers print it.",
    )
    entropy_weight: Annotated[float, Range(at_least=0)] = documented(
        0.0, "Bonus for the entropy of each token's distribution, in nats."
    )
    beta: Annotated[float, Range(at_least=0)] = documented(
        0.0, "Weight of the KL divergence from the initial captioner; with 0 no reference model is kept."
    )
    num_iterations: Positive = documented(1, "Optimizer steps for each rollout; above 1 with an importance ratio.")
    epsilon: Annotated[float, Range(above=0, below=1)] = documented(
        0.2, "The importance ratio is clipped to [1 - epsilon, 1 + epsilon_high]."
    )
    epsilon_high: Annotated[float, Range(above=0)] | None = documented(
        None, "None: epsilon. With loss_type='cispo' the largest importance ratio; its paper has 5."
    )
    mask_truncated_completions: bool = documented(
        False, "Leave truncated captions out of the loss. They are rewarded, also for the baseline."
    )
    bag_schedule: dict[Any, int] | str | None = documented(
        None, "Bag sizes, with neighbours given to the trainer: {last epoch: size}, 'paper', or a number."
    )
    bag_distractors: Literal["nearest", "random"] = documented(
        "nearest", "Images of a bag: the 'nearest' images, or 'random' ones in bags of the same sizes."
    )
    guard: GuardAction = documented(
        "warn",
        "Action when captions degenerate: 'off', 'warn', 'stop', or 'rollback' to the last good checkpoint. Unless it "
        "is 'off', an evaluation with degenerate captions selects no checkpoint, and a recipe delivers no model whose "
        "captions have collapsed.",
    )

    max_truncated_by_scorer: Fraction | None = documented(
        0.1,
        "The guard's limit for the share of captions that are longer than the scorer reads. 1: none. Other limits: "
        "guard_thresholds of the trainer.",
    )

    lr_scheduler_type: str = documented("constant", "Schedule of the learning rate; constant in the papers.")

    metric_for_best_model: str | None = documented(  # type: ignore[assignment]
        None,
        "Metric of load_best_model_at_end. None: reward_recall_at_1, by the reward scorer; recall_at_1 if there is "
        "only one scorer.",
    )

    def __new__(cls, *args: Any, **settings: Any) -> CaptionRLConfig:  # the constructor of a dataclass names no remedy
        for name in settings:
            if remedy := trl_remedy(name):
                raise ValueError(f"{name} of TRL is not supported here.{remedy}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    @property
    def is_exploring(self) -> bool:
        """Whether training generates other captions than greedy ones: samples, or beam search."""
        settings: Any = self.generation_kwargs or {}
        return bool(self.do_sample) or settings.get("num_beams", 1) > 1

    def check(self) -> None:
        """Refuse values that contradict each other; also for a copy with changed fields."""
        check_values(self)
        if not self.do_sample and self.num_generations > 1:
            raise ValueError(f"num_generations is {self.num_generations}. Use 1 with do_sample=False, or True.")
        if self.do_sample and not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}. Use a positive number, or do_sample=False.")
        if not self.do_sample and self.temperature not in (0, 1):
            raise ValueError(f"temperature is {self.temperature}, but captions are not sampled. Set do_sample=True.")
        if elsewhere := {"temperature", "do_sample"}.intersection(self.generation_kwargs or {}):
            raise ValueError(
                f"generation_kwargs holds {min(elsewhere)!r}, which the loss does not see. Set that field."
            )
        if self.loss_type == "cispo" and not (self.epsilon_high or 0) >= 1:
            raise ValueError(f"epsilon_high is {self.epsilon_high}, which loss_type='cispo' clips at. Use 1 or more.")
        self.baseline = self.baseline or "none"
        make_baseline(self.baseline, self.num_generations, do_sample=self.is_exploring)
        self.bag_schedule = parse_bag_schedule(self.bag_schedule)  # type: ignore[assignment]
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)  # type: ignore[call-overload]
        if self.scale_rewards not in ("group", "batch", "none"):
            raise ValueError(f"scale_rewards is {self.scale_rewards!r}. Use 'group', 'batch', 'none', True or False.")
        if self.scale_rewards == "group" and self.num_generations < 2:
            raise ValueError(f"scale_rewards='group' needs num_generations of 2 or more, not {self.num_generations}.")


# --- Images of a rollout, and its split into micro-batches -----------------------------------------------------------


def collate_with_rows(collator: Any, items: Sequence[Any]) -> dict[str, Tensor]:
    """The batch of a [`CaptionCollator`], with `rows` `(B,)` of the data set."""
    return {**collator(items), "rows": torch.tensor([item["index"] for item in items])}


class RolloutBatches:
    """Splits each rollout of a batch sampler into `pieces`, the micro-batches of an optimizer step; `repeats` steps per rollout.

    It has neither `set_epoch` nor an attribute `batch_sampler`, which Trainer and accelerate would use to set the epoch too.
    """

    def __init__(self, rollouts: Any, pieces: int, repeats: int = 1) -> None:
        self.rollouts, self.pieces, self.repeats = rollouts, pieces, repeats

    def __len__(self) -> int:
        return len(self.rollouts) * self.pieces * self.repeats

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.rollouts:
            if len(rows) < self.pieces:
                raise ValueError(f"A rollout of {len(rows)} images is too small. Lower gradient_accumulation_steps.")
            for _ in range(self.repeats):
                yield from (part.tolist() for part in np.array_split(rows, self.pieces))


def make_bag_sampler(
    args: Any, batch_size: int, num_images: int, *, neighbours: Any | None, **processes: int
) -> BagCurriculumSampler:
    """The sampler for `args.bag_schedule`."""
    if num_images < batch_size:
        raise ValueError(
            f"A rollout needs {batch_size} different images, and there are {num_images}. Lower per_device_train_batch_size or "
            "gradient_accumulation_steps."
        )
    random = getattr(args, "bag_distractors", "nearest") == "random"
    schedule: Any = None if args.bag_schedule in (None, "paper") else args.bag_schedule
    if args.bag_schedule is None and neighbours is None:
        schedule, random = 1, True
    if neighbours is None and not random:
        raise ValueError(f"bag_schedule={args.bag_schedule!r} needs neighbours. Pass those of `captionrl bags`.")
    return BagCurriculumSampler(
        None if random else neighbours,
        batch_size,
        int(schedule) if isinstance(schedule, str) else schedule,
        args.seed if args.data_seed is None else args.data_seed,
        distractors="random" if random else "nearest",
        num_images=num_images,
        **processes,
    )


# --- Completions: the captions that the policy generates for a batch of images ---------------------------------------


@contextmanager
def drawing_from_the_policy(captioner: Captioner) -> Iterator[None]:
    """Generate without the checkpoint's generation settings.

    They penalise repetition, forbid n-grams or force an end token. Such captions are not samples of the distribution whose
    log-probabilities the gradient uses.
    """
    ids = {
        "bos_token_id": captioner.start_token_id,
        "decoder_start_token_id": captioner.start_token_id,
        "eos_token_id": list(captioner.end_token_ids),
        "pad_token_id": captioner.pad_token_id,
    }
    writers = [m for m in captioner.base_model.modules() if getattr(m, "generation_config", None) is not None]
    configs = [writer.generation_config for writer in writers]
    for writer in writers:
        writer.generation_config = GenerationConfig(**ids)
    try:
        yield
    finally:
        for writer, config in zip(writers, configs, strict=True):
            writer.generation_config = config


def image_inputs(captioner: Captioner, micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Images of the micro-batches for generation; features of a frozen vision tower replace their pixels."""
    images = []
    frozen = not any(p.requires_grad for p in captioner.vision_tower.parameters())
    for inputs in micro_batches:
        batch = {name: inputs[name] for name in captioner.image_inputs if name in inputs}
        if frozen and "pixel_values" in batch:
            with torch.no_grad(), evaluating(captioner.vision_tower):
                batch["image_features"] = captioner.image_features(**batch)
            del batch["pixel_values"], inputs["pixel_values"]
            inputs["image_features"] = batch["image_features"]
        images.append(batch)
    return images


def reference_ids(captioner: Captioner, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Captions of the data, encoded like completions: ids and mask `(N, T)`."""
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
    ids, masks = ([row for output in outputs for row in getattr(output, name)] for name in ("ids", "mask"))
    return Completions(
        captions=[caption for output in outputs for caption in output.captions],
        ids=pad_sequence(ids, batch_first=True, padding_value=captioner.pad_token_id),
        mask=pad_sequence(masks, batch_first=True),
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
    settings: dict[str, Any] = {"temperature": temperature, "return_entropy": entropy, "of_generation": True}
    log_probs = captioner.log_probs(batch, **settings, model=model)
    return log_probs if isinstance(log_probs, tuple) else (log_probs, None)


# --- Rollouts: completions, their rewards and advantages, and what a checkpoint keeps of them -------------------------


class RewardedImages:
    """What rewards see of the training data `images`, and of captions of some of its rows."""

    def __init__(self, images: Any, accelerator: Any) -> None:
        self.images, self.accelerator = images, accelerator
        if images is not None:
            self.image_ids, self.references = id_column(images), caption_column(images)

    def data(self, **settings: Any) -> RewardData:
        """What rewards read before the first step."""
        columns, device = self.images.column_names, self.accelerator.device
        settings |= {"device": device, "columns": columns, "concepts": concept_column(self.images)}
        return RewardData(self.image_ids, self.references, **settings)

    def context(self, rows: Tensor, completions: Completions, bag_size: int, **settings: Any) -> RewardContext:
        """What rewards see of a rollout of rows `(B,)`, with the images of all processes as candidates."""
        numbers = rows.tolist()
        part, media = self.images.with_format(None).select(numbers), (datasets.Image, datasets.Audio, datasets.Video)
        lazy = {name for name, kind in part.features.items() if isinstance(kind, media)}  # the others are lists
        return RewardContext(
            captions=completions.captions,
            ids=completions.ids,
            mask=completions.mask,
            ended=completions.ended,
            rows=rows,
            image_ids=[self.image_ids[row] for row in numbers],
            references=[self.references[row] for row in numbers],
            candidates=self.accelerator.gather(rows),  # (C,), process after process
            positions=self.accelerator.process_index * len(rows) + torch.arange(len(rows), device=rows.device),
            bag_size=bag_size if bag_size > 1 else 0,
            columns={name: part[name] if name in lazy else part[name][:] for name in part.column_names},
            **settings,
        )


Rollout = tuple[RewardContext, Tensor, Tensor]
"""What rewards of this process saw; of all processes the rewards `(N, R)`, unweighted, and the advantages `(N,)`."""


class RolloutEngine(RewardedImages):
    """Makes the rollouts of a policy on the training data `images` and owns their state.

    `normalizer` is the number of captions or tokens of the whole optimizer step, by which its loss is divided.
    """

    def __init__(self, rewards: WeightedRewards, args: Any, accelerator: Any, images: Any) -> None:
        super().__init__(images, accelerator)
        self.rewards, self.args = rewards, args

    def reset(self, policy: Captioner) -> None:
        """Start with a policy, which also is the reference of the KL penalty."""
        args = self.args
        self.policy = policy
        self.reference = make_reference(policy) if args.beta else None
        names = sorted({reward.baseline or args.baseline for reward in self.rewards.rewards})
        credited = [reward.name for reward in self.rewards.rewards if reward.gives_token_credit]
        if credited and args.scale_rewards != "none":
            raise ValueError(f"{credited} give credit to tokens, in units of the reward. Use scale_rewards='none'.")
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
            for inputs, previous in zip(micro_batches, self.micro_batches, strict=True):
                inputs.clear()
                inputs.update(previous)
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
            greedy = self.reward_context(micro_batches, completion, state, bag_size)
        else:
            completions = self.generate(images)
        context = self.reward_context(micro_batches, completions, state, bag_size)
        parts = (self.rewards, self.baselines, args.baseline, context, greedy, self.gather)
        advantages, rewards = compute_advantages(*parts, scale_rewards=args.scale_rewards)
        first = self.accelerator.process_index * len(context.captions)
        local = advantages[first : first + len(context.captions)]
        credit = self.rewards.token_credit(context)  # (N, T)
        self._fill(micro_batches, completions, local if credit is None else local[:, None] + credit)
        return context, rewards, advantages

    def generate(self, images: list[dict[str, Tensor]], **overrides: Any) -> Completions:
        """Completions of the policy for the images of several micro-batches."""
        args = self.args
        settings: dict[str, Any] = {
            "max_new_tokens": args.max_completion_length,
            "num_return_sequences": args.num_generations,
            "num_beams": 1,
            "do_sample": args.do_sample,
            **(args.generation_kwargs or {}),
            **overrides,
        }
        if settings["do_sample"]:
            settings = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, **settings}
        with autocast(args):
            return write_completions(self.policy, images, batch_size=args.generation_batch_size, **settings)

    def reward_context(
        self, micro_batches: list[dict[str, Any]], completions: Completions, state: TrainerState, bag_size: int
    ) -> RewardContext:
        """What rewards see of a rollout."""
        rows = torch.cat([inputs["rows"] for inputs in micro_batches])  # (B,)
        step = state.global_step // self.args.num_iterations
        arguments = {"prompts": [self.policy.prompt or ""] * len(completions.captions), "trainer_state": state}
        return self.context(rows, completions, bag_size, step=step, arguments=arguments)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, process after process, on the CPU."""
        return self.accelerator.gather(rows.to(self.accelerator.device)).cpu()

    def _fill(self, micro_batches: list[dict[str, Any]], completions: Completions, advantages: Tensor) -> None:
        """Replace the captions of the data by the completions; `advantages` `(N,)` of captions or `(N, T)` of tokens."""
        args, start, mask = self.args, 0, completions.mask
        if args.mask_truncated_completions:
            mask = mask & completions.ended[:, None]
        for index, inputs in enumerate(micro_batches):
            here = slice(start, start + len(inputs["rows"]) * args.num_generations)
            start = here.stop
            inputs.update(self.policy.encode_completions(completions.ids[here], mask[here]))
            inputs["micro_batch"] = index
            values = advantages[here].to(args.device, torch.float32)
            if values.ndim == 2:  # of the tokens, which stand behind the prompt in the labels
                supervised = self.policy.align_labels(inputs["labels"]) != IGNORE_INDEX
                rows = torch.zeros(supervised.shape, device=values.device)
                values = rows.masked_scatter(supervised.to(values.device), values[mask[here].to(values.device)])
            inputs["advantages"] = values
            if self.reference is not None:
                with torch.no_grad(), reference_policy(self.reference, self.policy) as reference:
                    inputs["ref_log_probs"] = token_log_probs(reference, inputs, args)[0]
        number = loss_normalizer(mask, args.loss_type, args.max_completion_length)
        self.normalizer = float(self.gather(torch.tensor([float(number)], dtype=torch.float64)).sum())

    # A checkpoint between two iterations holds the rollout in use, without images, which the data loader reads again.

    def _file(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"caption_rl_rollout_{self.accelerator.process_index}.safetensors"

    def save(self, checkpoint: str, global_step: int) -> dict[str, Any]:
        """Store the rollout in use, if more iterations follow; returns the rest of the state, for JSON."""
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
        """The rollout of the checkpoint, with images of the data loader; empty if the checkpoint has none."""
        if not self._resumed:
            logger.warning(
                "The checkpoint lies between two iterations over a rollout of other processes; it is made anew."
            )
            return []
        image_inputs(self.policy, micro_batches)
        names = self._image_names()
        restored = [{name: inputs[name] for name in names if name in inputs} for inputs in micro_batches]
        self.normalizer = float(self._resumed.pop("normalizer"))
        for key, value in self._resumed.items():
            index, _, name = key.partition("/")
            restored[int(index)] |= {"micro_batch": int(index), name: value.to(self.args.device)}
        self._resumed = {}
        return restored

    def _image_names(self) -> set[str]:
        return {"pixel_values", "image_features", *self.policy.image_inputs}


# --- The trainer ----------------------------------------------------------------------------------------------------

STATE_FILE = "caption_rl_state.json"


class CaptionRLTrainer(CaptionTrainer):
    r"""REINFORCE for image captioners.

    One optimizer step is one rollout: the policy generates `num_generations` captions for each image of the step, they are
    rewarded with all images of the step as candidates, for any number of processes and micro-batches, and the gradient of
    `policy_gradient_loss` is taken. An image is encoded once for all its captions, and once for the whole run with
    `cache_image_features`. The policy's log-probabilities come from the tapped head, so `(N, T, V)` logits never exist.

    Args:
        model (`Captioner`, `PreTrainedModel` or `str`, *optional*): The policy. None only with `model_init`.
        reward_funcs: A [`Reward`], a function of a [`RewardContext`], a function with TRL's signature
            (`def reward(completions, **columns)`, see [`CompletionReward`]), a name (`"self_retrieval"`, `"cider"`, ...), or
            a list of them, with weights as `(reward, weight)` or in `args.reward_weights`.
        args ([`CaptionRLConfig`], *optional*): Configuration. None: the defaults, in the folder `{model name}-{method}`.
        train_dataset (`datasets.Dataset`, *optional*): Columns `image`, `image_id` and `captions`.
        eval_dataset (`datasets.Dataset`, *optional*): The same columns.
        scorer ([`Scorer`], *optional*): For rewards without a scorer, and for retrieval at evaluation if there is no
            held-out scorer.
        held_out_scorer ([`Scorer`], *optional*): Another scorer, for evaluation and for the guard: the reward scorer cannot
            detect that it is being hacked. Checkpoints are selected by `scorer`, as `reward_recall_at_1`.
        neighbours (array of shape `(N, k)`, *optional*): Most similar training rows of each row, best first; batches then
            consist of bags of similar images, as `args.bag_schedule` says.
        guard_thresholds ([`GuardThresholds`], *optional*): Limits of the guard; `args.guard` is its action. It also checks
            the captions of every evaluation: one that breaks a limit selects no checkpoint.
        kwargs (`Any`): For [`CaptionTrainer`]: `processing_class`, `peft_config`, `callbacks`, `optimizers`, `model_init`,
            `compute_metrics`. `eval_loss` is the cross-entropy of the references.

    Example:
        >>> trainer = CaptionRLTrainer("Salesforce/blip-image-captioning-base", "cider", CaptionRLConfig("out"), train)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: CaptionRLConfig
    config_class = CaptionRLConfig
    method_name = "CaptionRL"
    whole_set_for = "rewards, bags and the curriculum are prepared from all images"

    def __init__(
        self,
        model: Captioner | PreTrainedModel | str | None = None,
        reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]] = (),
        args: CaptionRLConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: datasets.Dataset | None = None,
        *,
        scorer: Scorer | None = None,
        held_out_scorer: Scorer | None = None,
        neighbours: Any | None = None,
        guard_thresholds: GuardThresholds | None = None,
        **kwargs: Any,
    ) -> None:
        args = self._resolve_args(model, args)
        train_dataset = training_rows(train_dataset, whole_set_for=self.whole_set_for)
        self.rewards = resolve_rewards(reward_funcs, args.reward_weights, args)
        if args.max_completion_length is None:
            limited = [r for r in self.rewards.rewards if not getattr(r, "allow_truncation_captions", True)]
            readers = [each for r in limited for each in getattr(r, "scorers", ()) or [scorer] if each is not None]
            args.max_completion_length = min(
                [args.max_caption_length or 40, *(load_scorer(each).max_text_tokens - 2 for each in readers)]
            )
        self.held_out_scorer, self.reward_scorer = held_out_scorer, scorer
        if held_out_scorer is not None and scorer is not None:
            self.selecting_scorer = scorer
        elif args.metric_for_best_model == REWARD_METRIC:
            args.metric_for_best_model = "recall_at_1"  # there is only one scorer
        self._step_inputs: list[dict[str, Any]] | None = None  # of an optimizer step whose rollout is not made yet
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            scorer=held_out_scorer if held_out_scorer is not None else scorer,
            **kwargs,
        )
        self.rollouts = RolloutEngine(self.rewards, args, self.accelerator, train_dataset)
        self.rollouts.reset(self.captioner)
        self.batch_sampler: Any = None
        if train_dataset is not None:
            self.data_collator = partial(collate_with_rows, self.data_collator)  # type: ignore[has-type]
            self._neighbours = neighbours
            self.batch_sampler = self._make_batch_sampler()
            self._epochs.datasets.append(self.batch_sampler)
            # The other processes find the features of the training images in the cache.
            with args.main_process_first(local=False, desc="encoding the training images for the scorers"):
                self.rewards.prepare(self._reward_data())
                self.monitor = self._make_monitor(guard_thresholds)

    def _make_batch_sampler(self) -> BagCurriculumSampler:
        args, accelerator = self.args, self.accelerator
        return make_bag_sampler(
            args,
            args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes,
            len(self.rollouts.images),
            neighbours=self._neighbours,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )

    # Rewards

    @property
    def scorers(self) -> list[Any]:
        """Frozen scorers of the rewards and of the evaluation."""
        members = [s for reward in self.rewards.rewards for s in getattr(reward, "scorers", [])]
        return [s for s in (*members, self.reward_scorer, self.held_out_scorer) if s is not None]

    def _reward_data(self) -> RewardData:
        captioner = self.captioner
        return self.rollouts.data(
            image_features=lambda scorer: self.scorer_image_features(scorer, self.rollouts.images),
            encode=lambda captions: reference_ids(captioner, captions),
            eos_token_id=captioner.eos_token_id,
            scorer=self.reward_scorer,
            max_completion_length=self.args.max_completion_length,
            has_bags=min(self.batch_sampler.schedule.values()) > 1,
            decode=captioner.decode,
        )

    def _make_monitor(self, thresholds: GuardThresholds | None) -> RolloutMonitor:
        thresholds = thresholds or GuardThresholds(max_truncated_by_scorer=self.args.max_truncated_by_scorer)
        held_out = None
        if self.args.guard != "off":
            sample = [text for texts in self.rollouts.references[:10_000] for text in texts if text.strip()]
            self.guard = GuardCallback(thresholds, self.args.guard, self._load_from_checkpoint, sample)
            self.add_callback(self.guard)
            if self.held_out_scorer is not None:
                held_out = SelfRetrieval(self.held_out_scorer, reward_kind="accuracy", allow_truncation_captions=True)
                held_out.prepare(self._reward_data())
        return RolloutMonitor(self.rewards, self.guard, held_out)

    # Data

    def get_train_dataloader(self) -> DataLoader:
        # Batches of this process. accelerate does not shard them further, which would split bags.
        args = self.args
        if self.model_init is not None:  # there is a new policy, and a trial may have changed arguments
            self.rollouts.reset(self.captioner)
            self.batch_sampler = self._epochs.datasets[1] = self._make_batch_sampler()
        batches = RolloutBatches(self.batch_sampler, args.gradient_accumulation_steps, args.num_iterations)
        return DataLoader(
            self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator, **loader_settings(args)
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        # Completions are generated later, at the first micro-batch: a resumed run restores the random state in between.
        self._step_inputs, number = super().get_batch_samples(*args, **kwargs)
        return self._step_inputs, number

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # transformers would count one forward pass and no generation

    # Rollout

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        # The first micro-batch of a step generates the rollout of all of them.
        if self._step_inputs is not None:
            micro_batches, self._step_inputs = self._step_inputs, None
            self.begin_step(micro_batches)
        return super().training_step(*args, **kwargs)

    def begin_step(self, micro_batches: list[dict[str, Any]]) -> None:
        """Put completions and advantages into the micro-batches of the optimizer step."""
        for inputs in micro_batches:
            prepared = self._prepare_inputs(inputs)
            inputs.clear()
            inputs.update(prepared)
        rollout = self.rollouts.begin_step(micro_batches, self.state, self.batch_sampler.bag_size)
        if rollout is not None:
            self.monitor.record(*rollout)
            for advantages in (
                rollout[2],
                *(inputs["advantages"] for inputs in micro_batches),
            ):  # the latter with credit
                self._unchanged.note_advantages(advantages)

    # Loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # The policy-gradient loss of a micro-batch, as its share of the whole optimizer step.
        if "advantages" not in inputs:
            raise ValueError("The batch has no rollout. Use train(), or evaluate() for the loss of the references.")
        args = self.args
        log_probs, entropy = token_log_probs(self.captioner, inputs, args, model)
        mask = self.captioner.align_labels(inputs["labels"]) != IGNORE_INDEX
        old = inputs.get("old_log_probs")
        if old is None and args.num_iterations > 1:
            # The first iteration runs under the sampling policy, so no extra forward pass is needed.
            old = log_probs.detach()
            self.rollouts.micro_batches[inputs["micro_batch"]]["old_log_probs"] = old
        terms = policy_gradient_loss(
            log_probs,
            inputs["advantages"],
            mask,
            loss_type=args.loss_type,  # type: ignore[arg-type]
            old_log_probs=old,
            epsilon=args.epsilon,
            epsilon_high=args.epsilon_high,
            ref_log_probs=inputs.get("ref_log_probs"),
            beta=args.beta,
            entropy=entropy,
            entropy_weight=args.entropy_weight,
            normalizer=self.rollouts.normalizer,
        )
        self.monitor.note({n: float(terms[n]) for n in ("kl", "entropy", "clipped_share") if n in terms}, len(mask))
        # DDP and FSDP average over processes; undo it.
        loss = terms["loss"] * self.accelerator.num_processes
        return (loss, {"log_probs": log_probs}) if return_outputs else loss

    # Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Training logs include the means over the rollouts since the last log.
        args = self.args
        if "loss" in logs and self.batch_sampler is not None:
            logs = {**logs, **self.monitor.drain()}
            if args.log_completions and self.accelerator.is_main_process:
                step, number = self.state.global_step, args.num_completions_to_print
                self.monitor.show(self.rollouts.images, number, step=step, report_to=args.report_to)
        super().log(logs, start_time)

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        if self.guard is not None and not self.guard.accepts(self.state):
            return False
        return super()._determine_best_metric(*args, **kwargs)

    # Checkpoints

    def save_state_of_run(self, folder: str) -> None:
        rollouts = self.rollouts.save(folder, self.state.global_step)
        if self.args.should_save:
            state = {
                **rollouts,
                "batch_sampler": self.batch_sampler.state_dict(),
                "guard": None if self.guard is None else self.guard.state_dict(),
            }
            write_json(Path(folder) / STATE_FILE, state)

    def load_state_of_run(self, folder: str) -> None:
        path = Path(folder) / STATE_FILE
        if path.exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            self.batch_sampler.load_state_dict(state["batch_sampler"])
            self.rollouts.load(folder, state)
            if self.guard is not None and state["guard"] is not None:
                self.guard.load_state_dict(state["guard"])
