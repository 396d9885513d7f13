r"""Reinforcement learning of captioners.

Legend: B images of this process, G captions per image, N = B * G captions, T tokens, P processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.data import training_rows
from hf_captionrl.io import write_json
from hf_captionrl.losses import IGNORE_INDEX, policy_gradient_loss
from hf_captionrl.retrieval import Scorer
from hf_captionrl.rewards import (
    RewardData,
    RewardLike,
    SelfRetrieval,
    resolve_rewards,
)
from hf_captionrl.trainers.caption_rl_config import REWARD_METRIC, CaptionRLConfig
from hf_captionrl.trainers.caption_trainer import CaptionTrainer
from hf_captionrl.trainers.guard_callback import GuardCallback
from hf_captionrl.trainers.loaders import loader_settings
from hf_captionrl.trainers.processes import gather_values, means_over_processes
from hf_captionrl.trainers.reward_hacking import GuardThresholds, RewardHackingGuard
from hf_captionrl.trainers.rollout import reference_ids, token_log_probs
from hf_captionrl.trainers.rollout_engine import RolloutEngine
from hf_captionrl.trainers.rollout_monitor import RolloutMonitor
from hf_captionrl.trainers.rollout_sampler import (
    CurriculumCallback,
    RolloutBatches,
    RolloutCollator,
    batch_sampler_for,
)

__all__ = ["CaptionRLTrainer"]

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
        self._step_inputs: list[dict[str, Any]] = []
        self._due = False
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            scorer=held_out_scorer if held_out_scorer is not None else scorer,
            **kwargs,
        )
        self.rollouts = RolloutEngine(self, train_dataset)
        self.batch_sampler: Any = None
        if train_dataset is not None:
            self.data_collator = RolloutCollator(self.data_collator)  # type: ignore[has-type]
            self.batch_sampler = batch_sampler_for(
                len(train_dataset),
                args,
                neighbours=neighbours,
                process_index=self.accelerator.process_index,
                num_processes=self.accelerator.num_processes,
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
        guard = held_out = None
        if self.args.guard != "off":
            sample = [text for texts in self.rollouts.references[:10_000] for text in texts if text.strip()]
            guard = RewardHackingGuard(thresholds, reference_captions=sample or None)
            self.guard = GuardCallback(guard, self.args.guard, self)
            self.add_callback(self.guard)
            if self.held_out_scorer is not None:
                held_out = SelfRetrieval(self.held_out_scorer, reward_kind="accuracy", allow_truncation_captions=True)
                held_out.prepare(self._reward_data())
        accelerator = self.accelerator
        return RolloutMonitor(
            self.rewards,
            lambda values: means_over_processes(accelerator, values),
            guard,
            held_out,
            lambda value: gather_values(accelerator, value),
        )

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
        self._step_inputs, self._due = samples, True
        return samples, number

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # transformers would count one forward pass and no generation

    # Rollout

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        # The first micro-batch of a step generates the rollout of all of them.
        if self._due:
            self._due = False
            self.begin_step()
        return super().training_step(model, inputs, num_items_in_batch)

    def begin_step(self) -> None:
        """Put completions and advantages into the micro-batches of the optimizer step."""
        self.rollouts.begin_step(self._step_inputs)

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self.rollouts.reset()
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

    # Guard

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.guard is not None:
            self.guard.begin_evaluation()
        return super()._evaluate(*args, **kwargs)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # A collapsed policy may have the highest recall.
        if self.guard is not None and not self.guard.accepts(self.state.global_step):
            return False
        return super()._determine_best_metric(metrics, trial)

    # Checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        rollouts = self.rollouts.save(output_dir)
        if self.args.should_save:
            state = {
                **rollouts,
                "batch_sampler": self.batch_sampler.state_dict(),
                "guard": None if self.guard is None else self.guard.state_dict(),
            }
            write_json(Path(output_dir) / STATE_FILE, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint) / STATE_FILE if checkpoint else None
        if path is None or not path.exists():
            return
        state = json.loads(path.read_text())
        self.batch_sampler.load_state_dict(state["batch_sampler"])
        self.rollouts.load(str(checkpoint), state)
        if self.guard is not None and state["guard"] is not None:
            self.guard.load_state_dict(state["guard"])
