"""Finds the dose of SMILE: how many steps make captions better before they make them wrong.

SMILE lengthens captions within a few dozen steps and adds wrong details afterwards, so a schedule by epochs looks too late. The
start and many early checkpoints are evaluated on the same images, and a checkpoint replaces the start only if it is better than
chance makes the best of that many. Legend: E evaluations, N images, R sign flips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from hf_captionrl.retrieval.ranking import distractor_recall
from hf_captionrl.trainers.checkpoints import rows_per_step

METRIC = "rd100_recall_at_1"
"""What selects the checkpoint: R@1 among the image and 99 random ones of the validation split."""
SMALLEST_SPLIT = 100
"""Fewest validation images, or concepts of them, by which a checkpoint is selected."""
_PATIENCE = 3  # evaluations without a new best R@1 that stop a run
_LENGTHENED = 1.1  # without a scorer, relative length that stops a run; reproduction/dose.md compares it with others
# Below it a checkpoint replaces the start. A step of maximum likelihood moves all images together by more than the noise of single
# ones: of 18 controls without an effect, 3 had less than 0.05 and at most one had 0.01.
_SIGNIFICANT = 0.01
_RANKS = "ranks"  # key of an entry of the log


def chance_of_best(start: Tensor, checkpoints: Tensor, best: int, *, num_flips: int = 10_000, seed: int = 0) -> float:
    """Probability that the largest paired gain of E checkpoints is at least that of one of them, if none differs from the start.

    Without a difference, the sign of each image's gain is random. An image's sign is flipped in all checkpoints at once, which keeps
    their correlation, and the largest gain of each flip is compared (Westfall and Young 1993). A gain is divided by its size under
    flips, `sqrt(sum of squares)`. The probability counts the observed gain and is therefore never 0.

    Args:
        start (`Tensor`): `(N,)` score of each image at the start.
        checkpoints (`Tensor`): `(E, N)` scores of the same images.
        best (`int`): Row of the checkpoint in question.
    """
    gains = (checkpoints - start).double()  # (E, N)
    gains = gains / torch.linalg.vector_norm(gains, dim=1, keepdim=True).clamp(min=1e-12)
    signs = torch.randint(2, (num_flips, len(start)), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    largest = (signs @ gains.T).amax(dim=1)  # (R,)
    return (1 + int((largest >= gains[best].sum() - 1e-9).sum())) / (1 + num_flips)


class DoseCallback(TrainerCallback):
    """Evaluates the start and early checkpoints, saves them, and stops when the captions get worse.

    It stops after three evaluations in a row without a new best R@1 among 100. Where nothing is selected by R@1 (without a scorer, or
    with fewer than 100 validation images), it stops when captions are 1.1 times as long as those of the start.

    Args:
        trainer ([`SmileTrainer`]): The trainer.
        captions (sequence of `int`): Training captions seen at each early evaluation.
    """

    def __init__(self, trainer: Any, captions: Sequence[int]) -> None:
        self.trainer, self.captions = trainer, captions

    def is_over(self, state: TrainerState) -> bool:
        """Whether a run has passed the best dose."""
        if self.trainer.args.metric_for_best_model == METRIC:
            values = [float(scores.mean()) for _, scores in self._scores(state)[1:]]
            return bool(values) and len(values) - 1 - values.index(max(values)) >= _PATIENCE
        if self.trainer.args.load_best_model_at_end:
            return False
        lengths = [entry["eval_length"] for entry in state.log_history if "eval_length" in entry]
        return len(lengths) > 1 and lengths[-1] >= _LENGTHENED * max(lengths[0], 1)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.trainer.evaluate()
            self.trainer.save_start()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_early(args, state):
            control.should_evaluate = control.should_save = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_early(args, state):  # a second evaluation of a step would count twice
            control.should_evaluate = control.should_save = False

    def _is_early(self, args: Any, state: TrainerState) -> bool:
        return state.global_step in {math.ceil(number / rows_per_step(args)) for number in self.captions}

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.metric_for_best_model == METRIC:
            ranks = {_RANKS: self.trainer.ranks.tolist(), "pool_size": self.trainer.pool_size}
            state.log_history.append({"step": state.global_step, **ranks})
        if state.global_step and self.is_over(state):
            control.should_training_stop = True

    def _scores(self, state: TrainerState) -> list[tuple[int, Tensor]]:
        """Steps and `(N,)` R@1 among 100 of each image at the evaluations of a run, the start's first."""
        entries = [entry for entry in state.log_history if _RANKS in entry]
        return [(e["step"], distractor_recall(torch.tensor(e[_RANKS]), e["pool_size"])) for e in entries]

    def compare_with_start(self, step: int) -> dict[str, Any]:
        """Compare the checkpoint of a step with the start, and load the start unless the gain is significant.

        Returns:
            `dict`: empty where another metric selects; else `length` (mean words of the checkpoint) and `start`: its `value` and
            `length`, the corrected `p_value` of the checkpoint, the number of `images`, and whether the start is `delivered`.
        """
        state = self.trainer.state
        if self.trainer.args.metric_for_best_model != METRIC:
            return {}
        (_, start), *rest = self._scores(state)
        steps = [step for step, _ in rest]
        chance = chance_of_best(start, torch.stack([scores for _, scores in rest]), steps.index(step))
        lengths = {entry["step"]: entry["eval_length"] for entry in state.log_history if "eval_length" in entry}
        is_better = chance < _SIGNIFICANT
        if not is_better:
            self.trainer.load_start()
        row = {"value": float(start.mean()), "length": lengths[0], "p_value": chance, "images": len(start)}
        return {"length": lengths[step], "start": {**row, "delivered": not is_better}}
