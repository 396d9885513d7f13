"""Tests that every family passes; a family defines the reference results, computed with its processor and model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_captionrl.captioners import Captioner, HeadInputs, load_captioner, mean_cross_entropy
from hf_captionrl.losses import fused_smile_loss, smile_loss
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import CaptionRLConfig, CaptionRLTrainer
from hf_captionrl.trainers.rollout import drawing_from_the_policy
from tests.tiny import tiny_images
from tests.tiny_families import tiny_family
from tests.tolerances import assert_close, resolution
from tests.trainers.one_step import PLAIN_SGD

CAPTIONS = ["a red cat", "two small birds near the tree", "the yellow boat"]
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1}


@functools.cache
def scenes() -> Any:
    """Four images with captions."""
    return load_scenes(num_train=4, num_validation=0, num_test=0)["train"]


def smile(head: HeadInputs) -> dict[str, Tensor]:
    if head.logits is not None:
        return {"loss": smile_loss(head.logits, head.labels)}
    assert head.hidden is not None
    assert head.weight is not None
    return {"loss": fused_smile_loss(head.hidden, head.weight, head.labels, bias=head.bias, softcap=head.softcap)}


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert len(left) > 10
    assert max(value.abs().max() for value in left.values()) > 1e-3
    for name in left:
        assert_close(left[name], right[name], ulps=64, magnitude=1, msg=name)


def log_probs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """`(T, V)` and `(T,)` -> `(T,)`."""
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


class FamilySuite:
    """Subclass it as `Test...` in a test file."""

    name: str
    prompt = "a photo of"
    image_size = 20

    def own_log_probs(self, model: Any, processor: Any, image: Any, caption: str) -> Tensor:
        """Log-probabilities of the caption and its end token, from the original forward."""
        raise NotImplementedError

    def own_ids(self, model: Any, processor: Any, image: Any, number: int, **settings: Any) -> list[int]:
        """Ids after the prompt, from the original `generate`."""
        raise NotImplementedError

    @pytest.fixture
    def captioner(self) -> Captioner:
        model, processor = tiny_family(self.name)
        return load_captioner(model, processor=processor, prompt=self.prompt)

    @pytest.fixture
    def images(self) -> list[Any]:
        return [*tiny_images(1, size=self.image_size), *tiny_images(1, seed=1, size=2 * self.image_size)]

    def test_log_probs_equal_those_of_the_untouched_model(self, captioner, images):
        plain, processor = tiny_family(self.name)
        batch = captioner.collate(images, CAPTIONS[:2])
        ours = captioner.log_probs(batch).detach()
        supervised = captioner.align_labels(batch["labels"]) != -100
        for row, image, caption in zip(range(2), images, CAPTIONS[:2], strict=True):
            theirs = self.own_log_probs(plain, processor, image, caption).detach()
            assert_close(ours[row][supervised[row]], theirs)
        assert (ours[~supervised] == 0).all()
        # Control: another image gives another result.
        swapped = captioner.log_probs(captioner.collate(images[::-1], CAPTIONS[:2])).detach()
        assert (ours - swapped).abs().max() > 1e-3

    def test_captions_of_one_image_share_it(self, captioner, images):
        captions = [*CAPTIONS, *CAPTIONS[::-1]]
        grouped = captioner.collate(images, captions)
        repeated = captioner.collate([image for image in images for _ in range(3)], captions)
        assert len(grouped["pixel_values"]) == 2
        results = []
        for batch in (grouped, repeated):
            log_probs = captioner.log_probs(batch)
            (log_probs * torch.arange(1.0, 7.0)[:, None]).sum().backward()
            results.append((log_probs.detach(), gradients(captioner.model)))
        assert_close(results[0][0], results[1][0])
        assert_same(results[0][1], results[1][1])
        with pytest.raises(ValueError, match="cannot be divided evenly among"):
            captioner.log_probs(captioner.collate(images, CAPTIONS))

    def test_known_features_stand_for_pixels(self, captioner, images):
        encoded = captioner.encode_images(images)
        features = captioner.image_features(**encoded).detach()
        assert features.dim() == 3
        text = captioner.encode_captions([*CAPTIONS, *CAPTIONS])
        pixels = captioner.log_probs({**text, **encoded})
        known = captioner.log_probs({**text, "image_features": features})
        assert_close(known, pixels)
        assert_close(
            captioner.log_probs(captioner.collate(None, CAPTIONS[:2], image_features=features)),
            captioner.log_probs(captioner.collate(images, CAPTIONS[:2])),
        )
        written = captioner.generate(**encoded, max_new_tokens=5, **GREEDY)
        assert torch.equal(captioner.generate(image_features=features, max_new_tokens=5, **GREEDY).ids, written.ids)

    def test_smile_and_mle_through_the_tap(self, captioner, images):
        batch = captioner.collate(images, CAPTIONS[:2])
        assert captioner.self_check(batch) < resolution(10)
        assert not captioner.use_full_logits
        results = []
        for full in (False, True):
            captioner.use_full_logits = full
            loss = captioner.model(**batch, head_objective=smile).loss
            loss.backward()
            results.append((loss.detach(), gradients(captioner.model)))
        captioner.use_full_logits = False
        assert_close(results[0][0], results[1][0])
        assert_same(results[0][1], results[1][1])
        captioner.model(**batch, head_objective=mean_cross_entropy).loss.backward()
        tapped = gradients(captioner.model)
        captioner.model(**batch).loss.backward()
        assert_same(tapped, gradients(captioner.model))

    @pytest.mark.parametrize("num_beams", [1, 3])
    def test_captions_equal_the_models_own(self, captioner, images, num_beams):
        plain, processor = tiny_family(self.name)
        settings = {"do_sample": False, "num_beams": num_beams}
        written = captioner.generate(**captioner.encode_images(images), max_new_tokens=7, **settings)
        for row, image in enumerate(images):
            theirs = self.own_ids(plain, processor, image, 7, **settings)
            assert written.ids[row][: len(theirs)].tolist() == theirs

    def test_several_captions_of_an_image_are_scored_as_written(self, captioner, images):
        encoded = captioner.encode_images(images)
        torch.manual_seed(0)
        written = captioner.generate(**encoded, max_new_tokens=6, do_sample=True, top_k=0, num_return_sequences=3)
        assert len(written.captions) == 6
        beams = captioner.generate(**encoded, max_new_tokens=6, num_beams=3, num_return_sequences=2, do_sample=False)
        assert len(beams.captions) == 4
        completions = captioner.encode_completions(written.ids, written.mask)
        log_probs, entropy = captioner.log_probs({**completions, **encoded}, return_entropy=True)
        supervised = captioner.align_labels(completions["labels"]) != -100
        assert supervised.sum() == written.mask.sum()
        assert (log_probs[supervised] < 0).all()
        assert (entropy[supervised] > 0).all()

    @pytest.mark.parametrize("tune", ["language", "vision", "both"])
    def test_lora(self, captioner, images, tune, tmp_path):
        frozen = captioner.log_probs(captioner.collate(images, CAPTIONS[:2])).detach()
        captioner.add_lora(tune, r=4)
        trained = {name for name, p in captioner.model.named_parameters() if p.requires_grad}
        assert all("lora_" in name or "modules_to_save" in name for name in trained)
        batch = captioner.collate(images, CAPTIONS[:2])
        assert_close(captioner.log_probs(batch).detach(), frozen)
        assert captioner.self_check(batch) < resolution(10)
        captioner.log_probs(captioner.collate(images, [*CAPTIONS, *CAPTIONS])).sum().backward()
        found = gradients(captioner.model)
        adapters = {name for name in trained if "lora_B" in name}
        assert adapters
        assert adapters <= found.keys()
        assert all(found[name].abs().max() > 0 for name in adapters)
        whole = {path for path in captioner.connector_paths if any(f"{path}.modules_to_save" in n for n in found)}
        assert whole == set(captioner.connector_paths)
        if tune == "both":
            with torch.no_grad():
                for name, parameter in captioner.model.named_parameters():
                    if name in trained:
                        parameter.add_(0.1)
            captioner.save_pretrained(tmp_path / "adapter")
            model, processor = tiny_family(self.name)
            again = load_captioner(tmp_path / "adapter", base_model=model, processor=processor)
            assert again.prompt == self.prompt
            torch.testing.assert_close(again.log_probs(batch), captioner.log_probs(batch))
            assert (again.log_probs(batch) - frozen).abs().max() > 1e-2

    def test_bf16(self, captioner, images):
        batch = captioner.collate(images, [*CAPTIONS, *CAPTIONS])
        exact = captioner.log_probs(batch).detach()
        captioner.model.to(torch.bfloat16)
        half = captioner.log_probs(batch).detach()
        assert (half - exact).abs().max() < 0.5
        assert (half - exact).abs().mean() < 0.1
        captioner.self_check(captioner.collate(images, CAPTIONS[:2]))
        assert not captioner.use_full_logits
        captioner.model(**batch, head_objective=smile).loss.backward()
        assert all(torch.isfinite(value).all() for value in gradients(captioner.model).values())
        features = captioner.image_features(**captioner.encode_images(images)).detach()
        assert features.dtype == torch.bfloat16
        # Cached features are fp32.
        known = {**captioner.encode_captions([*CAPTIONS, *CAPTIONS]), "image_features": features.float()}
        assert_close(captioner.log_probs(known), half, dtype="bfloat16", ulps=1)
        captioner.generate(**captioner.encode_images(images), max_new_tokens=4, do_sample=True, num_return_sequences=2)

    def test_gradient_checkpointing_changes_nothing(self, captioner, images):
        captioner.model.train()
        batch = captioner.collate(images, [*CAPTIONS, *CAPTIONS])
        captioner.model(**batch, head_objective=mean_cross_entropy).loss.backward()
        expected = gradients(captioner.model)
        for reentrant in (False, True):
            captioner.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            captioner.model.enable_input_require_grads()
            captioner.model(**batch, head_objective=mean_cross_entropy).loss.backward()
            assert_same(gradients(captioner.model), expected)
            captioner.model.disable_input_require_grads()

    def test_a_step_of_reinforcement(self, captioner, tmp_path):
        """With a trainable vision tower; test_families.py covers a frozen one."""
        rows = scenes()
        settings = {**PLAIN_SGD, "freeze_vision_tower": False, "do_sample": False, "guard": "off", "baseline": "none"}
        config = CaptionRLConfig(
            str(tmp_path),
            **settings,
            max_completion_length=5,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
        )
        # The same step without the trainer, on a second model.
        model, processor = tiny_family(self.name)
        plain = load_captioner(model, processor=processor, prompt=self.prompt)
        total = torch.zeros(())
        for image in rows["image"]:
            encoded = plain.encode_images([image.convert("RGB")])
            with drawing_from_the_policy(plain):
                written = plain.generate(**encoded, max_new_tokens=5, **GREEDY)
            completions = plain.encode_completions(written.ids, written.mask)
            log_probs = plain.log_probs({**completions, **encoded})
            total = total - self.reward(written.captions[0]) * log_probs.sum() / written.mask.sum() / 4
        total.backward()
        expected = {name: p.detach() - 0.1 * (0 if p.grad is None else p.grad) for name, p in model.named_parameters()}
        before = {name: p.detach().clone() for name, p in captioner.model.named_parameters()}
        trainer = CaptionRLTrainer(captioner, lambda completions: [self.reward(c) for c in completions], config, rows)
        trainer.train()
        moved = set()
        for name, parameter in captioner.model.named_parameters():
            in_tower = name.startswith(f"{captioner.vision_path}.")
            assert_close(parameter.detach(), expected[name], ulps=64, msg=name)
            if not torch.equal(parameter, before[name]):
                moved.add("tower" if in_tower else "rest")
        assert moved == {"rest", "tower"}

    @staticmethod
    def reward(caption: str) -> float:
        return 1 + len(caption) % 3
