"""The parts of TRL that SmileSFTTrainer relies on still exist."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys

import pytest
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.trainers import SmileSFTTrainer
from hf_captionrl.trainers.trl_smile_sft import logit_factors
from tests.trainers.sft_runs import batch_of, loss_eval, make


def test_logit_factors_are_those_of_trl(parts, tmp_path):
    """Cohere's scale and Gemma's cap, against the model's logits via trl's head."""
    _, tokenizer = parts
    config = copy.deepcopy(parts[0].config)
    assert logit_factors(config) == (1.0, None)
    for name, value, expected in (("logit_scale", 0.25, 0.25), ("logits_scaling", 8.0, 0.125)):
        changed = copy.deepcopy(config)
        setattr(changed, name, value)
        assert logit_factors(changed)[0] == expected
        model = copy.deepcopy(parts[0])
        model.config = changed
        ours = make((model, tokenizer), tmp_path, mle_weight=1 - 1e-9)
        theirs = make((model, tokenizer), tmp_path, cls=SFTTrainer, config=SFTConfig)
        assert loss_eval(ours) == pytest.approx(loss_eval(theirs), rel=1e-5)


def test_contract_compute_loss():
    source = inspect.getsource(SFTTrainer.compute_loss)
    assert list(inspect.signature(SFTTrainer.compute_loss).parameters) == [
        "self", "model", "inputs", "return_outputs", "num_items_in_batch",
    ]  # fmt: skip
    for used in (
        "outputs = model(**inputs, fused_lm_head=True)",
        "per_token_loss = -outputs.log_probs",
        "outputs.label_mask",
        "outputs.entropy",
        "outputs.is_top1",
        'self._metrics[mode]["entropy"]',
        'self._metrics[mode]["mean_token_accuracy"]',
    ):
        assert used in source, used


def test_contract_fused_output():
    fields = set(inspect.signature(FusedCausalLMOutput).parameters)
    assert {"loss", "log_probs", "entropy", "is_top1", "label_mask"} <= fields


def test_contract_attributes(parts, tmp_path):
    trainer = make(parts, tmp_path, cls=SFTTrainer, config=SFTConfig, packing=True)
    assert trainer.padding_free is True
    assert set(trainer._metrics) == {"train", "eval"}
    assert trainer.processing_class is not None
    assert "forward" in trainer.model.__dict__  # add_fused_lm_head patches the object itself
    batch = batch_of(trainer)
    starts = batch["position_ids"] == 0
    assert (batch["labels"][starts] == IGNORE_INDEX).all()  # the first token of a document is not a target


def test_contract_only_compute_loss_is_overridden():
    own = {
        name for name in vars(SmileSFTTrainer) if callable(getattr(SmileSFTTrainer, name)) and name in dir(SFTTrainer)
    }
    assert own == {"__init__", "compute_loss"}


@pytest.mark.slow
def test_package_does_not_import_trl():
    code = "import sys, hf_captionrl, hf_captionrl.trainers as t; assert 'SmileSFTTrainer' in t.__all__; print('trl' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
