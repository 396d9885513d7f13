"""Reinforcement learning of captioners.

Legend: B images of this process, G captions per image, N = B * G captions, T tokens, P processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.data import training_rows
from hf_captionrl.data.bag_curriculum import BagCurriculumSampler, parse_bag_schedule
from hf_captionrl.losses import IGNORE_INDEX, policy_gradient_loss
from hf_captionrl.losses.policy_gradient import LOSS_TYPES
from hf_captionrl.retrieval import Scorer
from hf_captionrl.rewards import BASELINES, RewardData, RewardLike, SelfRetrieval, make_baseline, resolve_rewards
from hf_captionrl.trainers.caption_config import RL_REFUSED, CaptionConfig, Refused
from hf_captionrl.trainers.caption_trainer import CaptionTrainer, EpochCallback, loader_settings
from hf_captionrl.trainers.guard import GuardAction, GuardCallback, GuardThresholds, RolloutMonitor
from hf_captionrl.trainers.policy import refuse_shared_parameters
from hf_captionrl.trainers.rollout import RolloutEngine, reference_ids, token_log_probs
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.options import NotNegative, Positive, Range, check_values, documented

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

    num_generations: Positive = documented(1, "G, captions generated for each image in training.")
    do_sample: bool = documented(True, "Sample captions in training; False: greedy decoding.")
    temperature: float = documented(1.0, "Sampling temperature. Log-probabilities are those of the same distribution.")
    top_p: Annotated[float, Range(above=0, at_most=1)] = documented(1.0, "Nucleus sampling; 1 keeps every token.")
    top_k: NotNegative = documented(0, "Sample only from this many tokens; 0 keeps every token.")
    max_completion_length: Positive = documented(
        40, "Longest caption generated in training, in tokens, the end token included."
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
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = documented(
        "sum_then_normalize",
        "Several rewards: their weighted sum is compared with the baseline and scaled ('sum_then_normalize'), or each "
        "is centred and scaled within its group, and the weighted sum within the step ('normalize_then_sum', GDPO).",
    )
    loss_type: str = documented(
        "grpo",
        "Loss of a step from its tokens: 'grpo', the mean over the tokens of each caption; 'dapo', the sum divided by "
        "all tokens of the step; 'dr_grpo', the sum divided by captions times max_completion_length; 'sum', the sum "
        "divided by captions, as the papers print it.",
    )
    entropy_weight: Annotated[float, Range(at_least=0)] = documented(
        0.0, "Bonus for the entropy of each token's distribution, in nats."
    )
    beta: Annotated[float, Range(at_least=0)] = documented(
        0.0, "Weight of the KL divergence from the initial captioner; with 0 no reference model is kept."
    )
    num_iterations: Positive = documented(1, "Optimizer steps for each rollout; above 1 with an importance ratio.")
    epsilon: Annotated[float, Range(above=0, below=1)] = documented(
        0.2, "The importance ratio is clipped to [1 - eps, 1 + eps]."
    )
    bag_schedule: dict[Any, int] | str | None = documented(
        None, "Bag sizes, with neighbours given to the trainer: {last epoch: size}, 'paper', 'adaptive', or a number."
    )
    bag_distractors: Literal["nearest", "random"] = documented(
        "nearest", "Images of a bag: the 'nearest' images, or 'random' ones in bags of the same sizes."
    )
    bag_recall_threshold: Annotated[float, Range(above=0, at_most=1)] = documented(
        0.8, "bag_schedule='adaptive' continues with the next size when the training R@1 of an epoch reaches this."
    )
    guard: GuardAction = documented(
        "warn",
        "Action when captions degenerate: 'off', 'warn', 'stop', or 'rollback' to the last good checkpoint. Unless it "
        "is 'off', an evaluation with degenerate captions selects no checkpoint, and a recipe delivers no model whose "
        "captions have collapsed.",
    )

    lr_scheduler_type: str = documented("constant", "Schedule of the learning rate; constant in the papers.")

    metric_for_best_model: str | None = documented(  # type: ignore[assignment]
        None,
        "Metric of load_best_model_at_end. None: reward_recall_at_1, by the reward scorer; recall_at_1 if there is "
        "only one scorer.",
    )

    def __post_init__(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = REWARD_METRIC
        super().__post_init__()
        self.check()

    @property
    def is_exploring(self) -> bool:
        """Whether training generates other captions than greedy ones: samples, or beam search."""
        beams = self.generation_kwargs.get("num_beams", 1) if isinstance(self.generation_kwargs, dict) else 1
        return bool(self.do_sample) or beams > 1

    def check(self) -> None:
        """Refuse values that contradict each other; also for a copy with changed fields."""
        check_values(self)
        if not self.do_sample and self.num_generations > 1:
            raise ValueError(
                f"do_sample=False writes the same caption {self.num_generations} times. Set do_sample=True or "
                "num_generations=1."
            )
        if self.do_sample and not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}. Use a positive number, or do_sample=False.")
        self.baseline = self.baseline or "none"
        make_baseline(self.baseline, self.num_generations, do_sample=self.is_exploring)
        self.bag_schedule = parse_bag_schedule(self.bag_schedule, ("paper", "adaptive"))  # type: ignore[assignment]
        if self.loss_type == "bnpo":
            raise ValueError(
                "loss_type is 'bnpo', which divides by the tokens of each micro-batch, so that the gradient depends on how a "
                "step is split. Use 'dapo', which divides by the tokens of the whole step."
            )
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"loss_type is {self.loss_type!r}. Use one of {LOSS_TYPES}, or SelfRetrievalGRPOTrainer, which trains with "
                "TRL's losses."
            )
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)  # type: ignore[call-overload]
        if self.scale_rewards not in ("group", "batch", "none"):
            raise ValueError(f"scale_rewards is {self.scale_rewards!r}. Use 'group', 'batch', 'none', True or False.")
        if self.scale_rewards == "group" and self.num_generations < 2:
            raise ValueError(
                "scale_rewards='group' divides by the standard deviation of the captions of an image, and num_generations is "
                f"{self.num_generations}. Use num_generations=2 or more, or scale_rewards='batch'."
            )
        if self.multi_objective_aggregation == "normalize_then_sum":
            if self.scale_rewards != "none":
                raise ValueError(
                    f"multi_objective_aggregation='normalize_then_sum' scales each reward itself, so scale_rewards="
                    f"{self.scale_rewards!r} would have no effect. Use scale_rewards='none'."
                )
            if self.baseline != "group_mean":
                raise ValueError(
                    "multi_objective_aggregation='normalize_then_sum' subtracts the mean of the captions of an image, and "
                    f"baseline is {self.baseline!r}. Use baseline='group_mean'."
                )


# --- Images of a rollout, and its split into micro-batches -----------------------------------------------------------


class CurriculumCallback(EpochCallback):
    """Sets the epoch of a [`BagCurriculumSampler`], and with it the size of the bags."""


class RolloutCollator:
    """Adds `rows` `(B,)`, the rows of the data set, to the batch of a [`CaptionCollator`]."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, items: Sequence[Any]) -> dict[str, Tensor]:
        return {**self.collator(items), "rows": torch.tensor([item["index"] for item in items])}


class RolloutBatches:
    """Splits each rollout of a batch sampler into the micro-batches of an optimizer step.

    It has neither `set_epoch` nor an attribute `batch_sampler`, which Trainer and accelerate would use to set the epoch too.
    Only [`CurriculumCallback`] sets it.

    The sizes of the `pieces` differ by at most one; `repeats` is the number of optimizer steps per rollout.
    """

    def __init__(self, rollouts: Any, pieces: int, repeats: int = 1) -> None:
        self.rollouts = rollouts
        self.pieces = pieces
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self.rollouts) * self.pieces * self.repeats

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.rollouts:
            size, rest = divmod(len(rows), self.pieces)
            if not size:
                raise ValueError(
                    f"A rollout of {len(rows)} images cannot be split into {self.pieces} micro-batches. Lower "
                    "gradient_accumulation_steps or raise per_device_train_batch_size."
                )
            ends = [0]
            for piece in range(self.pieces):
                ends.append(ends[-1] + size + (piece < rest))
            for _ in range(self.repeats):
                for start, end in pairwise(ends):
                    yield list(rows[start:end])


def make_bag_sampler(
    args: Any,
    batch_size: int,
    num_images: int,
    *,
    neighbours: Any | None,
    random: bool = False,
    recall_threshold: float | None = None,
    **processes: int,
) -> BagCurriculumSampler:
    """The sampler for `args.bag_schedule`; an adaptive schedule needs `recall_threshold`."""
    seed = args.seed if args.data_seed is None else args.data_seed
    if args.bag_schedule is None and neighbours is None:
        return BagCurriculumSampler(
            None, batch_size, 1, seed, distractors="random", num_images=num_images, **processes
        )
    if neighbours is None and not random:
        raise ValueError(
            f"bag_schedule is {args.bag_schedule!r}, but there are no neighbours to make bags of. Pass neighbours, which "
            "`captionrl bags` makes, or leave bag_schedule out."
        )
    adaptive = recall_threshold is not None and args.bag_schedule == "adaptive"
    schedule: Any = None if adaptive or args.bag_schedule in (None, "paper") else args.bag_schedule
    return BagCurriculumSampler(
        None if random else neighbours,
        batch_size,
        int(schedule) if isinstance(schedule, str) else schedule,
        seed,
        distractors="random" if random else "nearest",
        num_images=num_images,
        adaptive=recall_threshold if adaptive else None,
        **processes,
    )


STATE_FILE = "caption_rl_state.json"


class CaptionRLTrainer(CaptionTrainer):
    r"""REINFORCE for image captioners.

    One optimizer step is one rollout: the policy generates `num_generations` captions for each image of the step, they are
    rewarded with all images of the step as candidates, for any number of processes and micro-batches, and the gradient of
    `policy_gradient_loss` is taken. An image is encoded once for all its captions, and once for the whole run with
    `cache_image_features`. The policy's log-probabilities come from the tapped head, so `(N, T, V)` logits never exist.
    Those of the sampling policy are kept from the first update of a rollout, not computed again.

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
        kwargs (`Any`): For [`CaptionTrainer`]: `processing_class`, `peft_config`, `callbacks`, `optimizers`,
            `data_collator`, `model_init`, `compute_metrics`. `eval_loss` is the cross-entropy of the references.

    Raises:
        ValueError: If rewards, data and configuration contradict each other; before any training.

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
        model: Captioner | PreTrainedModel | str | None,
        reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]],
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
        train_dataset = training_rows(train_dataset, args, whole_set_for=self.whole_set_for)
        self.rewards = resolve_rewards(reward_funcs, args.reward_weights)
        self.held_out_scorer = held_out_scorer
        self.reward_scorer = scorer
        if held_out_scorer is not None and scorer is not None:
            self.selecting_scorer = scorer
        elif args.metric_for_best_model == REWARD_METRIC:
            args.metric_for_best_model = "recall_at_1"  # there is only one scorer
        self._step_inputs: list[dict[str, Any]] | None = None  # of an optimizer step whose rollout is not made yet
        self._recalls: list[float] = []  # of the rollouts of this epoch, for an adaptive curriculum
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            scorer=held_out_scorer if held_out_scorer is not None else scorer,
            **kwargs,
        )
        self.rollouts = RolloutEngine(self.rewards, args, self.accelerator, train_dataset)
        self._start_policy()
        self.batch_sampler: Any = None
        if train_dataset is not None:
            self.data_collator = RolloutCollator(self.data_collator)  # type: ignore[has-type]
            processes = self.accelerator.num_processes
            batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
            if len(train_dataset) < batch_size:
                raise ValueError(
                    f"One optimizer step needs {batch_size} different images (per_device_train_batch_size x "
                    f"gradient_accumulation_steps x processes), and there are {len(train_dataset)}. Lower one of these."
                )
            self.batch_sampler = make_bag_sampler(
                args,
                batch_size,
                len(train_dataset),
                neighbours=neighbours,
                random=args.bag_distractors == "random",
                recall_threshold=args.bag_recall_threshold,
                process_index=self.accelerator.process_index,
                num_processes=processes,
            )
            self.add_callback(CurriculumCallback(self.batch_sampler))
            # The other processes find the features of the training images in the cache.
            with args.main_process_first(local=False, desc="encoding the training images for the scorers"):
                self.rewards.prepare(self._reward_data())
                self.monitor = self._make_monitor(guard_thresholds or GuardThresholds())

    # Rewards

    @property
    def scorers(self) -> list[Any]:
        """Frozen scorers of the rewards and of the evaluation."""
        members = [s for reward in self.rewards.rewards for s in getattr(reward, "scorers", [])]
        return [s for s in (*members, self.reward_scorer, self.held_out_scorer) if s is not None]

    def _start_policy(self) -> None:
        refuse_shared_parameters(self.captioner.model, self.scorers)
        self.rollouts.reset(self.captioner)

    def _reward_data(self) -> RewardData:
        captioner = self.captioner
        return RewardData(
            image_ids=self.rollouts.image_ids,
            references=self.rollouts.references,
            image_features=lambda scorer: self.scorer_image_features(scorer, self.rollouts.images),
            encode=lambda captions: reference_ids(captioner, captions),
            eos_token_id=captioner.eos_token_id,
            device=self.args.device,
            scorer=self.reward_scorer,
            max_completion_length=self.args.max_completion_length,
            has_bags=min(self.batch_sampler.schedule.values()) > 1,
            columns=self.rollouts.images.column_names,
        )

    def _make_monitor(self, thresholds: GuardThresholds) -> RolloutMonitor:
        held_out = None
        if self.args.guard != "off":
            sample = [text for texts in self.rollouts.references[:10_000] for text in texts if text.strip()]
            self.guard = GuardCallback(thresholds, self.args.guard, self._load_from_checkpoint, sample)
            self.add_callback(self.guard)
            if self.held_out_scorer is not None:
                held_out = SelfRetrieval(self.held_out_scorer, reward_kind="accuracy", allow_truncation_captions=True)
                held_out.prepare(self._reward_data())
        return RolloutMonitor(self.rewards, self.accelerator, self.guard, held_out)

    # Data

    def get_train_dataloader(self) -> DataLoader:
        # Batches of this process. accelerate does not shard them further, which would split bags.
        if self.train_dataset is None:
            raise ValueError("Training needs a train_dataset. Pass one to the trainer.")
        args = self.args
        batches = RolloutBatches(self.batch_sampler, args.gradient_accumulation_steps, args.num_iterations)
        return DataLoader(
            self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator, **loader_settings(args)
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        # Completions are generated later, at the first micro-batch: a resumed run restores the random state in between.
        samples, number = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step_inputs = samples
        return samples, number

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # transformers would count one forward pass and no generation

    # Rollout

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        # The first micro-batch of a step generates the rollout of all of them.
        if self._step_inputs is not None:
            micro_batches, self._step_inputs = self._step_inputs, None
            self.begin_step(micro_batches)
        return super().training_step(model, inputs, num_items_in_batch)

    def begin_step(self, micro_batches: list[dict[str, Any]]) -> None:
        """Put completions and advantages into the micro-batches of the optimizer step."""
        for inputs in micro_batches:
            prepared = self._prepare_inputs(inputs)
            inputs.clear()
            inputs.update(prepared)
        sampler = self.batch_sampler
        rollout = self.rollouts.begin_step(micro_batches, self.state, sampler.bag_size)
        if rollout is None:
            return
        means = self.monitor.record(*rollout)
        if sampler.adaptive is not None and "recall_at_1" in means:
            self._recalls.append(means["recall_at_1"])
            # With the last rollout of the epoch, before anything is saved: a resumed run must know.
            if len(self._recalls) == len(sampler):
                sampler.update(math.fsum(self._recalls) / len(self._recalls))
                self._recalls.clear()

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._start_policy()
        return model

    # Loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        # The policy-gradient loss of a micro-batch, as its share of the whole optimizer step.
        args = self.args
        log_probs, entropy = token_log_probs(self.captioner, inputs, args, model)
        mask = self.captioner.align_labels(inputs["labels"]) != IGNORE_INDEX
        old = inputs.get("old_log_probs")
        if old is None and args.num_iterations > 1:
            # The first iteration runs under the sampling policy, so no extra forward pass is needed.
            old = log_probs.detach()
            self.rollouts.micro_batches[inputs["micro_batch"]]["old_log_probs"] = old
        found = policy_gradient_loss(
            log_probs,
            inputs["advantages"],
            mask,
            loss_type=args.loss_type,  # type: ignore[arg-type]
            old_log_probs=old,
            epsilon=args.epsilon,
            ref_log_probs=inputs.get("ref_log_probs"),
            beta=args.beta,
            entropy=entropy,
            entropy_weight=args.entropy_weight,
            normalizer=self.rollouts.normalizer,
        )
        self.monitor.note({n: found[n] / len(mask) for n in ("kl", "entropy", "clipped_share") if n in found})
        # DDP and FSDP average over processes; undo it.
        loss = found["loss"] * self.accelerator.num_processes
        return (loss, {"log_probs": log_probs}) if return_outputs else loss

    # Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Training logs include the means over the rollouts since the last log.
        if "loss" in logs and self.batch_sampler is not None:
            logs = {**logs, **self.monitor.drain()}
            if self.args.log_completions and self.accelerator.is_main_process:
                self.monitor.show(
                    self.rollouts.images,
                    self.args.num_completions_to_print,
                    step=self.state.global_step,
                    report_to=self.args.report_to,
                    tensorboard_writer=self.tensorboard_writer,
                )
        super().log(logs, start_time)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        if self.guard is not None and not self.guard.accepts(self.state):
            return False
        return super()._determine_best_metric(metrics, trial)

    # Checkpoints

    def save_state_of_run(self, folder: str) -> None:
        rollouts = self.rollouts.save(folder, self.state.global_step)
        if self.args.should_save:
            state = {
                **rollouts,
                "recalls": self._recalls,
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
            self._recalls = list(state["recalls"])
            if self.guard is not None and state["guard"] is not None:
                self.guard.load_state_dict(state["guard"])
