"""Step 2 of an album: candidate captions of each image: beams, samples, pragmatic beams, answers to a contrastive prompt.

Also finetunes the captioner on the album. Legend: B images, K images of a group (the target first, then its distractors),
N rows = B * K * beams, V vocabulary, T tokens, D features.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import tqdm
from PIL import Image
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_captionrl.apps.album.options import CandidateOptions
from hf_captionrl.apps.album.sources import opened_chunks, read_images
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.language_models import BackendError, EndpointCaptioner
from hf_captionrl.captioners.pipeline import ChosenImages, generate_captions
from hf_captionrl.captioners.prompts import ImagePrompts, contrastive_prompt, encode_with_prompts, forbidden_tokens
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer, nearest_neighbours
from hf_captionrl.retrieval.ranking import ranks
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.trainers.checkpoints import has_checkpoint
from hf_captionrl.utils.parts import seed_of_batch


def check_captioner(captioner: Any, prompts: ImagePrompts, options: CandidateOptions) -> None:
    """Refuse prompts that the captioner does not read."""
    prompts.check(captioner)
    if options.contrastive and captioner.family != "chat":
        raise ValueError(
            f"contrastive needs a chat model, but this captioner is of the family {captioner.family!r}. Use decoding='rsa', "
            "which every family supports."
        )


def generate_candidates(
    captioner: Captioner | EndpointCaptioner,
    images: Sequence[Any],
    rows: Sequence[int],
    image_ids: Sequence[str],
    options: CandidateOptions,
    similar: Sequence[Sequence[int]] | None = None,
    prompts: ImagePrompts | None = None,
    said: Sequence[Sequence[str]] | None = None,
) -> list[list[str]]:
    """Candidates of a batch of images, without repeated texts. The caller's random state does not change.

    The seed depends on the first image, so the samples do not depend on earlier batches. `similar` are the rows of the images
    most similar to each of `rows`, for pragmatic decoding. An endpoint gives a greedy caption and samples. With `said`, the
    captions of the similar images, the model is asked what differs, and there are no samples.
    """
    prompts = ImagePrompts(options.do_not_mention) if prompts is None else prompts
    told = {row: prompts.of(image_ids[row], captioner.prompt) for row in rows}
    if said is not None:
        told = {row: contrastive_prompt(told[row], others) for row, others in zip(rows, said, strict=True)}
        options = dataclasses.replace(options, num_samples=0)
    found: list[list[str]] = []
    if isinstance(captioner, EndpointCaptioner):
        for chunk, opened in opened_chunks(images, rows, options.batch_size):
            ids = [image_ids[row] for row in chunk]
            answers = captioner.describe(ids, opened, [told[row] for row in chunk], 1 + options.num_samples)
            for image_id, answered in zip(ids, answers, strict=True):
                if not answered:  # a finished part is never asked again
                    raise BackendError(
                        f"Image {image_id!r} has no answer: {captioner.failed[image_id]}. Use the same command to ask again, or "
                        "leave the image out; other answers are kept."
                    )
                found.append(list(dict.fromkeys(answered)))
        return found
    check_captioner(captioner, prompts, options)
    is_told = said is not None or (bool(prompts) and captioner.family == "chat")
    # All settings are explicit, so that the checkpoint's defaults have no effect.
    words = forbidden_tokens(captioner.tokenizer, options.do_not_mention)
    wording: dict[str, Any] = {"max_new_tokens": options.max_new_tokens} | ({"bad_words_ids": words} if words else {})
    if options.min_new_tokens:
        wording["min_new_tokens"] = options.min_new_tokens
    sampling = {"do_sample": True, "num_beams": 1, "num_return_sequences": options.num_samples, **wording}
    sampling |= {"temperature": options.temperature, "top_p": 1.0, "top_k": 0}
    beams = {"do_sample": False, "num_beams": options.num_beams, "num_return_sequences": options.num_beams, **wording}
    others = dict(zip(rows, similar or (), strict=False))
    device = captioner.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of_batch(options.seed, image_ids[rows[0]]))
        for chunk, opened in opened_chunks(images, rows, options.batch_size):
            texts = [told[row] for row in chunk]
            inputs = encode_with_prompts(captioner, opened, texts) if is_told else captioner.encode_images(opened)
            if options.decoding == "rsa" and others:
                mine = []
                for row, image in zip(chunk, opened, strict=True):  # one by one, because each has other distractors
                    group = [image]
                    distractors = [i for i in others[row] if i != row][: options.num_distractors]
                    for _, more in opened_chunks(images, distractors, len(distractors) or 1):
                        group += more
                    prompt = told[row] if is_told else None
                    mine.append(pragmatic_captions(captioner, group, options.rationality, prompt=prompt, **beams))
            else:
                mine = _grouped(captioner.generate(**inputs, **beams).captions, len(chunk))
            if options.num_samples:
                samples = _grouped(captioner.generate(**inputs, **sampling).captions, len(chunk))
                mine = [beams + more for beams, more in zip(mine, samples, strict=True)]
            found += [list(dict.fromkeys(texts)) for texts in mine]
    return found


def _grouped(texts: Sequence[str], number: int) -> list[list[str]]:
    each = len(texts) // number
    return [list(texts[start : start + each]) for start in range(0, len(texts), each)]


# --- Pragmatic decoding: captions that a listener would not take for one of the similar images -----------------------
# Reference: Cohn-Gordon, Goodman and Potts 2018, "Pragmatically Informative Image Captioning with Character-Level Inference",
# with words instead of characters.


class PragmaticProcessor(LogitsProcessor):
    r"""Makes every step of generation prefer words that the other images of a group make less likely.

    The literal speaker is the captioner, `S0(w | image, prefix)`. The incremental listener knows the group,
    `L(image | prefix, w) ∝ L(image | prefix) S0(w | image, prefix)`, starting from the uniform distribution. The score of
    a word is `log S0(w | target, prefix) + rationality * log L(target | prefix, w)`; a rationality of 0 is the captioner alone.
    All rows of a group get the scores of its target, so that they continue the same beams. A processor serves one generation.
    """

    def __init__(self, group_size: int, num_beams: int = 1, rationality: float = 1.0) -> None:
        self.group_size, self.num_beams, self.rationality = group_size, num_beams, rationality
        self._before: tuple[Tensor, Tensor] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Logits or log-probabilities of a step, `(N, V)`, replaced by those of the pragmatic speaker."""
        shape = (len(scores) // (self.group_size * self.num_beams), self.group_size, self.num_beams)
        speaker = scores.float().log_softmax(-1).view(*shape, scores.shape[-1])  # (B, K, beams, V)
        prefix = input_ids.view(*shape, input_ids.shape[-1])[:, 0]  # (B, beams, T)
        joint = self._prior(prefix, speaker)[..., None] + speaker
        # A floor, because a word that no image of the group allows has no listener.
        listener = joint - joint.logsumexp(1, keepdim=True).clamp(min=-1e30)  # (B, K, beams, V)
        target = (speaker[:, 0] + self.rationality * listener[:, 0]).log_softmax(-1)
        self._before = (prefix, listener)
        return target[:, None].expand_as(speaker).reshape(scores.shape).to(scores.dtype)

    def _prior(self, prefix: Tensor, speaker: Tensor) -> Tensor:
        """`log L(image | prefix)`, `(B, K, beams)`: the listener's after the last word of each prefix."""
        if self._before is None:
            return speaker.new_full(speaker.shape[:3], -math.log(self.group_size))
        before, listener = self._before
        # Beams are sorted anew at every step: find the one that each continues.
        same = (prefix[:, :, None, :-1] == before[:, None]).all(-1)  # (B, beams, beams before)
        parent = same.int().argmax(-1)  # (B, beams)
        batch = torch.arange(len(prefix), device=prefix.device)[:, None]
        return listener[batch, :, parent, prefix[:, :, -1]].transpose(1, 2)


def pragmatic_captions(
    captioner: Captioner,
    images: Sequence[Image.Image],
    rationality: float,
    *,
    num_beams: int,
    prompt: str | None = None,
    **settings: Any,
) -> list[str]:
    """Captions that distinguish the first image from the others, best first; a chat model may get a prompt for all of them."""
    encode = captioner.encode_images
    if prompt is not None:
        encode = partial(encode_with_prompts, captioner, prompts=[prompt] * len(images))
    found = captioner.generate(
        **encode(images),
        num_beams=num_beams,
        logits_processor=LogitsProcessorList([PragmaticProcessor(len(images), num_beams, rationality)]),
        **settings,
    )
    return _grouped(found.captions, len(images))[0]


# --- Finetunes a captioner on an album by self-retrieval, and keeps the result only if a held-out scorer prefers it ---

MOST_MEASURED = 500
"""Largest number of images whose captions are used for the decision."""
_BAG = 5
_SAVE_SECONDS = 60  # between checkpoints
_MAX_DEGENERATE = 0.1
_NEIGHBOURS = 20


class _Clock(TrainerCallback, ExportableState):
    """Ends the training when its time is over, saves checkpoints, and shows a bar; a resumed training has the time that is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.interval, self.used = seconds, min(_SAVE_SECONDS, seconds / 5), 0.0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"used": self.used}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kept: Any = state.stateful_callbacks.get(type(self).__name__, {}) if state.global_step else {}
        self._before = self.used = float(kept.get("attributes", {}).get("used", 0.0))
        self._start = self._saved = time.monotonic()
        shape = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
        self._bar = tqdm.tqdm(total=self.seconds, desc="adapting", bar_format=shape, disable=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        self.used = self._before + now - self._start
        self._bar.set_postfix_str(f"{state.global_step} steps", refresh=False)
        self._bar.update(min(self.used, self.seconds) - self._bar.n)
        if control.should_training_stop:  # the guard stopped, and may have loaded earlier weights
            return
        control.should_training_stop = self.used >= self.seconds
        # Also at the end: the command may be killed while the captions are measured.
        if control.should_training_stop or now - self._saved >= self.interval:
            control.should_save, self._saved = True, now

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()


def adapt_to_album(
    captioner: Captioner,
    scorer: Scorer,
    held_out: Scorer,
    images: Sequence[Any],
    folder: str | os.PathLike[str],
    *,
    seconds: float,
    cache_dir: str | None = None,
    batch_size: int = 20,
    seed: int = 0,
    max_steps: int = 1_000_000,
) -> dict[str, Any]:
    """Train a LoRA on the images of the album for a given time; this needs no captions. Returns the decision and its reasons.

    The reward is self-retrieval in bags of 5 look-alikes, or among random images in small albums. The guard returns to the last
    checkpoint before captions degenerated. The adapter is saved, and used if there is such a checkpoint and, with one caption per
    image from beam search, the held-out scorer ranks more images first than before. A killed training resumes from `folder`.
    """
    caches = [FeatureCache.for_scorer(one, cache_dir) for one in (scorer, held_out)]
    facts = read_images(images, scorer, cache=caches[0], unreadable={})
    # Of equal images only the first: an image must not be its own distractor.
    first = sorted({key: at for at, key in reversed(list(enumerate(facts.keys)))}.values())
    number = len(first)
    if number < 2:
        raise ValueError(
            f"The album has {number} different images, and self-retrieval needs at least 2. Leave --adapt out."
        )
    chosen = ChosenImages(images, [facts.rows[at] for at in first])
    features = facts.features[torch.tensor(first)]
    scorers = {
        "scorer": (scorer, features),
        "held_out": (held_out, read_images(chosen, held_out, cache=caches[1]).features),
    }
    said = _captions(captioner, chosen)
    before = _measure(said, scorers)
    # The guard compares lengths with the captions before training. No reward uses them.
    texts, column = list(said.values()), datasets.Image(decode=False)
    plain = (os.fspath(image) if isinstance(image, os.PathLike) else image for image in chosen)
    table = {
        "image": [image if isinstance(image, dict) else column.encode_example(image) for image in plain],
        "image_id": [str(row) for row in range(number)],
        "captions": [[texts[row % len(texts)] or "-"] for row in range(number)],
    }
    text = datasets.Value("string")
    types = datasets.Features({"image": datasets.Image(), "image_id": text, "captions": datasets.List(text)})
    uses_bags = number >= 4 * batch_size and batch_size % _BAG == 0
    trainer = SelfRetrievalTrainer(
        captioner,
        scorer,
        SelfRetrievalConfig(
            str(folder),
            max_steps=max_steps,
            learning_rate=1e-4,
            per_device_train_batch_size=min(batch_size, number),
            do_sample=True,
            bag_schedule=str(_BAG) if uses_bags else None,
            max_completion_length=min(40, *(one.max_text_tokens - 2 for one in (scorer, held_out))),
            guard="rollback",
            save_strategy="no",  # the clock saves
            save_total_limit=3,  # the newest may have been saved when the captions had begun to degenerate
            eval_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            freeze_vision_tower=True,
        ),
        train_dataset=datasets.Dataset.from_dict(table, types),
        held_out_scorer=held_out,
        neighbours=nearest_neighbours(features, min(_NEIGHBOURS, number - 1))[0] if uses_bags else None,
        peft_config=captioner.lora_config(),
    )
    trainer.args.seed = seed  # the adapter starts the same with every seed
    trainer.add_callback(_Clock(seconds))  # after the guard
    with contextlib.redirect_stdout(sys.stderr):  # what the Trainer prints is not the result of the command
        trainer.train(resume_from_checkpoint=has_checkpoint(folder))
    after = _measure(_captions(captioner, chosen), scorers)
    captioner.save_pretrained(Path(folder))
    reason = _reason_against(trainer.guard, before, after)
    path = trainer.guard and trainer.guard.rolled_back_to
    rolled_back_to = path and Path(path).name
    steps = trainer.state.global_step
    sentence = (
        f"Adapted in {steps} steps: R@1 of the held-out scorer {before['held_out']:.3f} before, {after['held_out']:.3f} "
        f"after, of the reward scorer {before['scorer']:.3f} and {after['scorer']:.3f}. "
        + (f"The guard returned to {rolled_back_to}. " if rolled_back_to else "")
        + ("The adapter is used." if reason is None else f"The adapter is not used: {reason}")
    )
    return {
        "kept": reason is None,
        "reason": reason,
        "steps": steps,
        "rolled_back_to": rolled_back_to,
        "seconds": seconds,
        "bags_of": _BAG if uses_bags else None,
        "before": before,
        "after": after,
        "adapter": str(folder),
        "sentence": sentence,
    }


def _captions(captioner: Captioner, images: Sequence[Any]) -> dict[int, str]:
    """One caption from beam search for each of some images, by row."""
    step = max(1, len(images) // MOST_MEASURED)
    rows = list(range(0, len(images), step))[:MOST_MEASURED]
    captions = generate_captions(captioner, ChosenImages(images, rows), do_sample=False, num_beams=3)
    return dict(zip(rows, captions, strict=True))


def _measure(captions: dict[int, str], scorers: dict[str, tuple[Scorer, Tensor]]) -> dict[str, float]:
    """R@1 of captions among the album by each scorer, and the share of degenerate captions."""
    texts = list(captions.values())
    found = {"degenerate": sum(degenerate(texts)) / len(texts)}
    for name, (scorer, features) in scorers.items():
        text = scorer.text_features(spoken(texts)).float().cpu()
        found[name] = float((ranks(text, features, list(captions)) == 1).double().mean())
    return found


def _reason_against(guard: Any, before: dict[str, float], after: dict[str, float]) -> str | None:
    """Why the adapter is not used; None if it is."""
    if guard is not None and guard.trips and guard.rolled_back_to is None:
        return f"the guard stopped the training: {guard.trips[0]['reason']}"
    if after["degenerate"] > max(_MAX_DEGENERATE, before["degenerate"]):
        return f"{after['degenerate']:.0%} of its captions are degenerate."
    if after["held_out"] <= before["held_out"]:
        return "the held-out scorer does not rank more images first."
    return None
