r"""The rollout of an optimizer step: write captions, reward them, and put both into the micro-batches.

Legend: B images of this process, G captions an image, N = B * G captions, C images of all processes, T tokens.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import datasets
import torch
from torch import Tensor

from hf_captionrl.captioners.base import Captioner
from hf_captionrl.rewards import RewardContext, make_baseline
from hf_captionrl.rewards.advantages import compute_advantages
from hf_captionrl.trainers.caption_rl_config import CaptionRLConfig
from hf_captionrl.trainers.kept_rollout import load_rollout, save_rollout
from hf_captionrl.trainers.reference_model import make_reference, reference_policy, refuse_shared_parameters
from hf_captionrl.trainers.reward_columns import RowColumns
from hf_captionrl.trainers.rollout import Completions, image_inputs, write_completions

__all__ = ["RolloutSteps"]

logger = logging.getLogger(__name__)


class RolloutSteps:
    """The part of [`CaptionRLTrainer`] that makes rollouts."""

    args: CaptionRLConfig
    captioner: Captioner
    accelerator: Any
    state: Any
    rewards: Any
    baselines: dict[str, Any]
    batch_sampler: Any
    monitor: Any
    reference: Any
    _step_inputs: list[dict[str, Any]]
    _kept: list[dict[str, Any]]
    _resumed_rollout: tuple[list[dict[str, Any]], float] | None
    _normalizer: Tensor | float
    _recalls: list[float]
    _image_ids: list[str]
    _references: list[list[str]]
    _train_images: datasets.Dataset

    if TYPE_CHECKING:  # what the trainer has

        def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]: ...

        def _scorers(self) -> list[Any]: ...

        def _mean_over_processes(self, value: float) -> float: ...

        def _log_probs(
            self, captioner: Captioner, inputs: dict[str, Any], model: Any
        ) -> tuple[Tensor, Tensor | None]: ...

    def _forget_rollouts(self, args: CaptionRLConfig) -> None:
        """Start as a policy does that has not written yet."""
        assert args.baseline is not None
        names = {reward.baseline or args.baseline for reward in self.rewards.rewards}
        self.baselines = {n: make_baseline(n, args.num_generations, do_sample=args.explores) for n in sorted(names)}
        self._kept = []  # micro-batches of the rollout, for further iterations over it
        self._resumed_rollout = None
        self._recalls = []  # of the rollouts of this epoch, for an adaptive curriculum

    def call_model_init(self, trial: Any = None) -> Any:
        """Make the policy anew for another `train()`, with its reference and fresh baselines.

        Args:
            trial (*optional*): Of a hyperparameter search.

        Returns:
            `nn.Module`: The model.
        """
        model = super().call_model_init(trial)  # type: ignore[misc]
        refuse_shared_parameters(self.captioner.model, self._scorers())
        self.reference = make_reference(self.captioner) if self.args.beta else None
        self._forget_rollouts(self.args)
        return model

    def begin_step(self) -> None:
        """Write and reward the captions of the optimizer step, or take the rollout of the iteration before."""
        within = self.state.global_step % self.args.num_iterations
        if within and not self._kept:  # resumed between two iterations
            self._kept = self._restored(self._step_inputs)
        if within and self._kept:
            for inputs, kept in zip(self._step_inputs, self._kept, strict=True):
                inputs.clear()
                inputs.update(kept)
            return
        self.roll_out(self._step_inputs)
        self._kept = self._step_inputs if self.args.num_iterations > 1 else []

    def _restored(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rollout of the checkpoint with the images of the data loader; empty where the checkpoint holds none."""
        if self._resumed_rollout is None:
            logger.warning(
                "The checkpoint lies between two iterations over one rollout, and does not hold the rollout of %d process(es). "
                "New captions are written, so this run differs from one that was not interrupted.",
                self.accelerator.num_processes,
            )
            return []
        self._prepare_micro_batches(micro_batches)
        image_inputs(self.captioner, micro_batches)
        kept, self._normalizer = self._resumed_rollout
        images = self._image_names()
        self._resumed_rollout = None
        return [
            {**{name: inputs[name] for name in images if name in inputs}, **stored}
            for inputs, stored in zip(micro_batches, kept, strict=True)
        ]

    def _image_names(self) -> set[str]:
        return {"pixel_values", "image_features", *self.captioner.image_inputs}

    def _prepare_micro_batches(self, micro_batches: list[dict[str, Any]]) -> None:
        for inputs in micro_batches:
            prepared = self._prepare_inputs(inputs)
            inputs.clear()
            inputs.update(prepared)

    def save_rollout(self, checkpoint: str) -> int | None:
        """Store the rollout in use in a checkpoint, if there are further iterations over it.

        Args:
            checkpoint (`str`): Its folder.

        Returns:
            `int`: Number of processes that stored it; None if it is used up.
        """
        if not self._kept or not self.state.global_step % self.args.num_iterations:
            return None
        process = self.accelerator.process_index
        save_rollout(checkpoint, process, self._kept, self._normalizer, self._image_names())
        return self.accelerator.num_processes

    def load_rollout(self, checkpoint: str, num_processes: int | None) -> None:
        """Take the rollout in use from a checkpoint.

        Args:
            checkpoint (`str`): Its folder.
            num_processes (`int`, *optional*): Number of processes that stored it.
        """
        self._kept, self._resumed_rollout = [], None
        if num_processes == self.accelerator.num_processes:
            self._resumed_rollout = load_rollout(checkpoint, self.accelerator.process_index, self.args.device)

    def roll_out(self, micro_batches: list[dict[str, Any]]) -> None:
        """Write captions for all micro-batches, reward them, and put completions and advantages into the micro-batches.

        Args:
            micro_batches (`list[dict]`): Of the collator; changed in place.
        """
        self._prepare_micro_batches(micro_batches)
        images = image_inputs(self.captioner, micro_batches)
        completions = self._write(images)
        context = self.reward_context(micro_batches, completions)
        greedy = None
        if any(baseline.needs_greedy for baseline in self.baselines.values()):
            greedy = self.reward_context(micro_batches, self._write_greedily(images))
        advantages, rewards = compute_advantages(
            self.rewards, self.baselines, str(self.args.baseline), context, greedy, self._mean_over_processes
        )
        self._fill(micro_batches, completions, advantages)
        means = self.monitor.record(context, rewards, advantages)
        if self.batch_sampler.adaptive is not None and "recall_at_1" in means:
            self._recalls.append(means["recall_at_1"])
            # With the last rollout of the epoch, before anything is saved: a resumed run must know.
            if len(self._recalls) == len(self.batch_sampler):
                self.batch_sampler.update(math.fsum(self._recalls) / len(self._recalls))
                self._recalls.clear()

    def _write(self, images: list[dict[str, Tensor]], **overrides: Any) -> Completions:
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
        return write_completions(self.captioner, images, batch_size=args.generation_batch_size, **settings)

    def _write_greedily(self, images: list[dict[str, Tensor]]) -> Completions:
        return self._write(images, do_sample=False, num_return_sequences=1, num_beams=1)

    def reward_context(self, micro_batches: list[dict[str, Any]], completions: Completions) -> RewardContext:
        """What rewards see of a rollout.

        Args:
            micro_batches (`list[dict]`): With the rows of the images.
            completions ([`Completions`]): What was written for them.

        Returns:
            [`RewardContext`]: With the images of all processes as candidates.
        """
        rows = torch.cat([inputs["rows"] for inputs in micro_batches])  # (B,)
        candidates = self.accelerator.gather(rows)  # (C,), process after process
        own = self.accelerator.process_index * len(rows) + torch.arange(len(rows), device=rows.device)
        listed = rows.tolist()
        return RewardContext(
            captions=completions.captions,
            ids=completions.ids,
            mask=completions.mask,
            ended=completions.ended,
            rows=rows,
            image_ids=[self._image_ids[row] for row in listed],
            references=[self._references[row] for row in listed],
            candidates=candidates,
            positions=own,
            bag_size=self.batch_sampler.bag_size if self.batch_sampler.bag_size > 1 else 0,
            step=self.state.global_step // self.args.num_iterations,
            columns=RowColumns(self._train_images, listed),
            prompts=[self.captioner.prompt or ""] * len(completions.captions),
            trainer_state=self.state,
        )

    def _fill(self, micro_batches: list[dict[str, Any]], completions: Completions, advantages: Tensor) -> None:
        """Replace the captions of the data by those that were written."""
        G, start = self.args.num_generations, 0
        for index, inputs in enumerate(micro_batches):
            here = slice(start * G, (start + len(inputs["rows"])) * G)
            start += len(inputs["rows"])
            inputs.update(self.captioner.encode_completions(completions.ids[here], completions.mask[here]))
            inputs["micro_batch"] = index
            inputs["advantages"] = advantages[here].to(self.args.device, torch.float32)
            if self.reference is not None:
                inputs["ref_log_probs"] = self._reference_log_probs(inputs)
        number = completions.mask.sum() if self.args.logprob_reduction == "token_mean" else len(completions.captions)
        self._normalizer = self._mean_over_processes(float(number)) * self.accelerator.num_processes

    def _reference_log_probs(self, inputs: dict[str, Any]) -> Tensor:
        assert self.reference is not None
        with torch.no_grad(), reference_policy(self.reference, self.captioner) as reference:
            return self._log_probs(reference, inputs, None)[0]
