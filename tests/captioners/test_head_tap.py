"""The head tap equals the unmodified model in loss and gradients; memory; the first-batch check."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_captionrl.captioners import HeadInputs, HeadOutput, LogProbsObjective, load_captioner, mean_cross_entropy
from hf_captionrl.captioners.head_tap import first_rows
from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss, smile_loss
from tests.tiny import FAMILIES, tiny_blip, tiny_captioner, tiny_captions, tiny_images, tiny_model
from tests.tolerances import assert_close, close, resolution


def native(family: str, batch: dict) -> dict:
    """The batch with the argument names of the model, written independently of the package."""
    if not family.startswith("vit"):
        return dict(batch)
    inputs = {"pixel_values": batch["pixel_values"], "decoder_input_ids": batch["input_ids"][:, :-1]}
    return {**inputs, "labels": batch["labels"][:, 1:]}


def plain_logits(family: str, model, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels, aligned in the test."""
    inputs = native(family, batch)
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    if family.startswith("vit"):
        return logits, labels
    return logits[:, -labels.size(1) :][:, :-1], labels[:, 1:]


def smile(head: HeadInputs) -> dict[str, torch.Tensor]:
    if head.logits is not None:
        return {"loss": smile_loss(head.logits, head.labels)}
    assert head.hidden is not None
    assert head.weight is not None
    return {"loss": fused_smile_loss(head.hidden, head.weight, head.labels, bias=head.bias, softcap=head.softcap)}


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(left: dict, right: dict, **how) -> None:
    assert left.keys() == right.keys()
    assert len(left) > 10
    for name in left:
        # The gradient of the key bias is 0: the terms of its sum cancel.
        assert_close(left[name], right[name], msg=name, **{"ulps": 64, "magnitude": 1, **how})


def pair(family: str, prompt: str = "a picture of "):
    """A captioner, an unmodified copy of its model, and a batch with padding and a prompt."""
    captioner = tiny_captioner(family, prompt=prompt)
    untouched, _ = tiny_model(family)
    batch = captioner.collate(tiny_images(4), tiny_captions(4))
    assert (batch["attention_mask"] == 0).any()
    return captioner, untouched, batch


@pytest.mark.parametrize("family", FAMILIES)
def test_cross_entropy_and_gradients_equal_the_unmodified_model(family):
    captioner, untouched, batch = pair(family)
    own = untouched(**native(family, batch)).loss
    own.backward()
    logits, labels = plain_logits(family, untouched, batch)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    tapped = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    tapped.backward()
    assert_close(tapped, own)
    assert_close(tapped, plain)
    assert_same_gradients(gradients(captioner.model), gradients(untouched))
    # Without an objective, the model behaves as before, and takes the same batch.
    torch.testing.assert_close(captioner.model(**batch).loss, own)
    assert captioner.self_check(batch) < resolution(10)
    assert not captioner.use_full_logits


@pytest.mark.parametrize("family", ["git", "vit-gpt2"])
def test_smile_equals_full_logits_and_never_builds_them(family):
    captioner, untouched, batch = pair(family)
    T = captioner.align_labels(batch["labels"]).size(1)
    rows = {4 * T, 4 * (T + 1)}

    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.size(-1) == captioner.vocab_size:
                    self.seen += tensor.numel() // tensor.size(-1) in rows or tensor.dim() > 2
            return result

    with Watch() as watch:
        loss = captioner.model(**batch, head_objective=smile).loss
        loss.backward()
    assert watch.seen == 0
    with Watch() as watch:  # control: the watch detects built logits
        captioner.model(**batch)
    assert watch.seen > 0
    logits, labels = plain_logits(family, untouched, batch)
    expected = smile_loss(logits, labels)
    expected.backward()
    assert_close(loss, expected)
    assert_same_gradients(gradients(captioner.model), gradients(untouched))


@pytest.mark.parametrize("family", ["blip", "vit-bert"])
def test_log_probs_and_entropy_equal_the_softmax(family):
    captioner, untouched, batch = pair(family)
    logits, labels = plain_logits(family, untouched, batch)
    log_softmax = (logits / 0.7).log_softmax(-1)
    got, entropy = captioner.log_probs(batch, temperature=0.7, return_entropy=True)
    assert got.shape == labels.shape == captioner.align_labels(batch["labels"]).shape
    for row in range(labels.size(0)):
        for t in range(labels.size(1)):
            label = labels[row, t]
            if label == IGNORE_INDEX:
                assert got[row, t] == entropy[row, t] == 0
                continue
            assert_close(got[row, t], log_softmax[row, t, label])
            expected = -(log_softmax[row, t].exp() * log_softmax[row, t]).sum()
            assert_close(entropy[row, t], expected)
    captioner.use_full_logits = True
    full, full_entropy = captioner.log_probs(batch, temperature=0.7, return_entropy=True)
    assert_close(full, got)
    assert_close(full_entropy, entropy)


def test_label_smoothing_of_the_model_passes_the_self_check(caplog):
    model, processor = tiny_blip(label_smoothing=0.1)
    captioner = load_captioner(model, processor=processor)
    batch = captioner.collate(tiny_images(2), tiny_captions(2))
    assert captioner.self_check(batch) < resolution(10)
    assert not caplog.records
    assert model.text_decoder.label_smoothing == 0.1


class Capped(torch.nn.Module):
    """A planted fault: the logits are changed after the projection."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return 2.0 * torch.tanh(self.inner(hidden) / 2.0)


def test_self_check_detects_changed_logits_and_falls_back(caplog):
    captioner, untouched, batch = pair("blip")
    for model in (captioner.model, untouched):
        model.text_decoder.cls.predictions = Capped(model.text_decoder.cls.predictions)
        inner = model.text_decoder.cls.predictions.inner.decoder
        model.text_decoder.get_output_embeddings = lambda inner=inner: inner
    batch = first_rows(batch)  # what the check reads
    wrong = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    own = untouched(**batch).loss
    assert abs(wrong - own) > 1e-2
    captioner.model.train()
    assert captioner.self_check(batch) == close(abs(wrong - own).item(), magnitude=10, dtype="float32")
    assert "SELF-CHECK FAILED" in caplog.text
    assert captioner.use_full_logits
    assert captioner.model.training
    right = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    torch.testing.assert_close(right, own)
    logits, labels = plain_logits("blip", untouched, batch)
    torch.testing.assert_close(captioner.model(**batch, head_objective=smile).loss, smile_loss(logits, labels))


def test_untappable_head_falls_back_to_full_logits(caplog):
    captioner, _, batch = pair("git")
    bias = torch.zeros(captioner.vocab_size)
    output, captioner.model.output = captioner.model.output, torch.nn.Identity()
    captioner.model.output = torch.nn.Sequential(output, torch.nn.Identity())
    captioner.model.get_output_embeddings = lambda: output
    captioner.model.output[1].forward = lambda logits: logits + bias  # (V,) onto (D,): fails while tapped
    captioner.self_check(batch)
    assert "head tap failed" in caplog.text
    assert captioner.use_full_logits


def test_known_softcap_is_applied():
    captioner, untouched, batch = pair("git")
    captioner.model.config.final_logit_softcapping = 1.5
    logits, labels = plain_logits("git", untouched, batch)
    expected = F.cross_entropy((1.5 * torch.tanh(logits / 1.5)).flatten(0, 1), labels.flatten())
    got = captioner.model(**batch, head_objective=mean_cross_entropy).loss
    assert_close(got, expected)


def test_autocast_changes_the_loss_little_and_passes_the_check():
    captioner, untouched, batch = pair("clipcap")
    own = untouched(**native("clipcap", batch)).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = captioner.model(**batch, head_objective=mean_cross_entropy).loss
        captioner.self_check(batch)
    assert abs(loss - own) < 0.05
    assert not captioner.use_full_logits


def test_copies_pickles_and_signatures():
    captioner, untouched, batch = pair("blip")
    model = captioner.model
    assert type(model).__name__ == type(untouched).__name__
    assert inspect.signature(model.forward) == inspect.signature(untouched.forward)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(
            other(**batch, head_objective=mean_cross_entropy).loss,
            model(**batch, head_objective=mean_cross_entropy).loss,
        )
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        # The copy computes with its weights, not with those of the original.
        uniform = other(**batch, head_objective=mean_cross_entropy).loss
        assert uniform.item() == close(torch.tensor(float(captioner.vocab_size)).log().item(), dtype="float32")


def test_output_is_preserved_by_accelerate_and_fsdp():
    output = HeadOutput({"loss": torch.ones(())}, log_probs=torch.zeros(2, 3))
    assert output.loss == 1
    assert output["log_probs"].shape == (2, 3)
    leaves, spec = torch.utils._pytree.tree_flatten(output)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, HeadOutput)
    assert again["log_probs"] is output["log_probs"]
    assert HeadOutput({k: v.double() for k, v in output.items()}).loss.dtype == torch.float64


def test_invalid_inputs_raise():
    captioner, _, batch = pair("blip")
    unlabelled = {name: batch[name] for name in ("pixel_values", "input_ids")}
    with pytest.raises(ValueError, match="needs labels"):
        captioner.model(**unlabelled, head_objective=LogProbsObjective())
    with pytest.raises(ValueError, match="cannot be divided evenly among"):
        captioner.model(**{**batch, "pixel_values": batch["pixel_values"][:3]}, head_objective=LogProbsObjective())


def test_the_check_reads_two_rows_and_notices_a_wrong_head():
    captioner, _, batch = pair("git")
    rows = []
    hook = captioner.output_head(captioner.base_model).register_forward_pre_hook(
        lambda module, args: rows.append(len(args[0]))
    )
    assert captioner.self_check(batch) < resolution(10)
    assert max(rows) <= 2 * batch["labels"].size(1)
    hook.remove()
    own = captioner.own_loss
    captioner.own_loss = lambda inputs: own(inputs) + 1.0
    assert captioner.self_check(batch) > 0.9
