"""`captionrl explain`: a caption token by token, under maximum likelihood, SMILE and self-retrieval."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.evaluation.dataset_options import CaptionerOptions
from hf_captionrl.options import option, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import Image

    from hf_captionrl.captioners import Captioner
    from hf_captionrl.explain.page import CaptionReward

__all__ = ["ExplainOptions", "explain"]

_SCENES = "scenes:"
_CLIP = "openai/clip-vit-base-patch32"


@dataclass
class ExplainOptions(CaptionerOptions):
    """Explain one caption of one image, token by token.

    Shows the loss of each token under maximum likelihood (the whole vocabulary) and under SMILE (the caption's own words),
    its most likely alternatives and, with --distractors, the effect of one step of self-retrieval. Writes explain.html, a
    self-contained page, and explain.png.
    """

    examples: ClassVar[str] = """
        images: a file, or scenes:ID, an image of the embedded world's test split, such as scenes:test-00012. --distractors
        also takes scenes:bag, the look-alikes of a scenes: image.

        baselines of the reward:
          leave_one_out   the mean reward of --num_samples captions that the model samples (the default)
          greedy          the reward of the model's greedy caption
          none            no baseline: the advantage is the reward

        examples:
          captionrl explain scenes:blip-mle scenes:test-00012 --caption "two small pigs on a blue background"
          captionrl explain scenes:blip-mle scenes:test-00012 --distractors scenes:bag
          captionrl explain Salesforce/blip-image-captioning-base dog.jpg --caption "a dog" --distractors cat.jpg horse.jpg
    """

    model: str = option(positional=True, metavar="MODEL", help="a folder, a name on the Hub, or scenes:blip-mle")
    image: str = option(positional=True, metavar="IMAGE", help="a file, or scenes:ID")
    caption: str | None = option(None, metavar="TEXT", help="the caption (default: the model's own, decoded greedily)")
    output_dir: Path = option(Path("outputs/explain"), metavar="DIR", help="folder to write")
    top_k: int = option(5, parse=positive, metavar="N", help="alternatives per token")
    max_length: int = option(77, parse=positive, group="captioner", metavar="N", help="longest text in tokens")
    first_token: Literal["mle", "smile"] = option(
        "mle",
        group="losses",
        help="distribution of SMILE at the first token: the whole vocabulary, as in the paper, or the caption's words",
    )
    distractors: list[str] | None = option(
        None, group="self-retrieval", metavar="IMAGE", help="other images, or scenes:bag"
    )
    scorer: str | None = option(
        None,
        group="self-retrieval",
        metavar="NAME",
        help="dual encoder that rewards: a folder, a name on the Hub, open_clip:NAME@TAG (default: scenes:clip-reward for "
        f"images of the embedded world, else {_CLIP})",
    )
    baseline: Literal["leave_one_out", "greedy", "none"] = option(
        "leave_one_out", group="self-retrieval", help="see below"
    )
    num_samples: int = option(8, parse=positive, group="self-retrieval", metavar="N", help="for leave_one_out")
    seed: int = option(0, group="self-retrieval", metavar="N", help="of the samples")
    logprob_reduction: Literal["mean", "sum"] = option(
        "mean", group="self-retrieval", help="weight of a token: 1/tokens or 1"
    )


class _Images:
    """Opens images by name; generates the embedded world at most once."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] | None = None

    def scene(self, name: str) -> dict[str, Any]:
        """A row of the embedded world's test split."""
        if self._rows is None:
            from hf_captionrl.scenes import load_scenes

            rows = load_scenes(num_train=0, num_validation=0)["test"]
            self._rows = {row["image_id"]: row for row in rows}
        wanted = name.removeprefix(_SCENES)
        if wanted not in self._rows:
            ids = list(self._rows)
            raise ValueError(f"There is no scene {wanted!r}. The test split has {ids[0]} to {ids[-1]}.")
        return self._rows[wanted]

    def open(self, name: str) -> Image.Image:
        from hf_captionrl.data import open_image

        if name.startswith(_SCENES):
            return open_image(self.scene(name)["image"])
        if not Path(name).is_file():
            raise FileNotFoundError(f"There is no image {name!r}. Use a file, or scenes:ID such as scenes:test-00012.")
        return open_image(name)

    def distractors(self, names: Sequence[str], image: str) -> list[Image.Image]:
        wanted: list[str] = []
        for name in names:
            if name != "scenes:bag":
                wanted.append(name)
                continue
            bag = self.scene(image)["bag_id"] if image.startswith(_SCENES) else ""
            if not bag or self._rows is None:
                raise ValueError(
                    f"{image!r} is not in a bag of the embedded world. Use --distractors IMAGE ... instead."
                )
            wanted += [_SCENES + i for i, row in self._rows.items() if row["bag_id"] == bag]
        # A copy of the target among the distractors would lower its rank.
        return [self.open(name) for name in dict.fromkeys(wanted) if name != image]


def _reward(
    arguments: ExplainOptions, captioner: Captioner, image: Image.Image, others: list[Image.Image], caption: str
) -> CaptionReward:
    """Reward and baseline of the caption, as `SelfRetrieval` and the trainer's baselines compute them."""
    import torch

    from hf_captionrl.evaluation.arguments import optional_scorer
    from hf_captionrl.explain.page import CaptionReward
    from hf_captionrl.metrics.suites.suite_row import spoken
    from hf_captionrl.retrieval.ranking import ranks_from_scores
    from hf_captionrl.rewards.advantages import BASELINES
    from hf_captionrl.rewards.self_retrieval import retrieval_rewards

    embedded = arguments.image.startswith(_SCENES)
    name = arguments.scorer or ("scenes:clip-reward" if embedded else _CLIP)
    scorer: Any = optional_scorer(name)
    if scorer is None:
        raise ValueError("--distractors needs a scorer. Use --scorer NAME, or leave --distractors out.")
    encoded = captioner.encode_images([image])
    captions = [caption]
    greedy = arguments.baseline == "greedy"
    if arguments.baseline != "none":
        torch.manual_seed(arguments.seed)
        decoding: dict[str, Any] = {"num_beams": 1, "do_sample": not greedy, "max_new_tokens": arguments.max_length}
        if not greedy:
            decoding |= {"num_return_sequences": arguments.num_samples, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        captions += captioner.generate(**encoded, **decoding).captions
    texts = scorer.text_features(spoken(captions)).float()
    pool = scorer.image_features([image, *others]).float()
    similarity = texts @ pool.T  # (captions, K), the target first
    own = torch.zeros(len(captions), dtype=torch.long, device=similarity.device)
    rewards = retrieval_rewards(similarity, own, "log_prob", scorer.logit_scale).double().cpu()
    baseline = BASELINES[arguments.baseline]()
    if greedy:
        advantage = float(baseline(rewards[None, :1], rewards[1:])[0, 0])
    else:
        advantage = float(baseline(rewards[None])[0, 0])
    said = {
        "none": "as there is no baseline",
        "greedy": f"the reward of the greedy caption, \u201c{captions[-1]}\u201d",
        "leave_one_out": f"the mean reward of {len(captions) - 1} sampled captions",
    }
    reward = float(rewards[0])
    return CaptionReward(
        reward=reward,
        baseline=reward - advantage,
        baseline_name=said[arguments.baseline],
        rank=int(ranks_from_scores(similarity, own)[0]),
        pool_size=len(pool),
        scorer=Path(name).name if Path(name).exists() else name,
        logprob_reduction=arguments.logprob_reduction,
    )


def explain(arguments: ExplainOptions) -> None:
    """Write page and picture."""
    if arguments.caption is not None and not arguments.caption.strip():
        raise ValueError("--caption is empty. Use a text, or leave --caption out for the model's own caption.")
    images = _Images()
    image = images.open(arguments.image)  # before anything slow
    others = images.distractors(arguments.distractors, arguments.image) if arguments.distractors else []
    if arguments.distractors and not others:
        raise ValueError("--distractors names only the image itself. Use at least one other image.")

    import torch

    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.explain.page import explanation_json, write_explanation, write_explanation_picture
    from hf_captionrl.explain.token_view import explain_caption
    from hf_captionrl.io import to_plain
    from hf_captionrl.scenes.models import model_path

    captioner = load_captioner(
        model_path(arguments.model),
        revision=arguments.revision,
        prompt=arguments.prompt,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    caption = arguments.caption
    if caption is None:
        written = captioner.generate(**captioner.encode_images([image]), num_beams=1, do_sample=False)
        caption = written.captions[0]
        if not caption.strip():
            raise ValueError("The model's caption of this image is empty. Use --caption TEXT.")
    view = explain_caption(
        captioner,
        image,
        caption,
        first_token=arguments.first_token,
        top_k=arguments.top_k,
        max_length=arguments.max_length,
    )
    reward = _reward(arguments, captioner, image, others, caption) if others else None
    folder = arguments.output_dir
    model = Path(arguments.model).name if Path(arguments.model).exists() else arguments.model
    name = arguments.image if arguments.image.startswith(_SCENES) else Path(arguments.image).name
    page = write_explanation(
        folder / "explain.html",
        view,
        image,
        "A caption, token by token",
        image_name=name,
        note=f"What {model} expects at each token of the caption.",
        reward=reward,
    )
    picture = write_explanation_picture(folder / "explain.png", view, reward=reward)
    if arguments.json:
        result = {"model": model, "image": name, "page": str(page), "picture": str(picture)}
        print(json.dumps(to_plain({**result, **explanation_json(view, reward)}), ensure_ascii=False))
        return
    gained = (
        "" if reward is None else f", advantage {reward.advantage:+.3f} (rank {reward.rank} of {reward.pool_size})"
    )
    print(f"{caption}: {view.mle_loss:.3f} nats per token under MLE, {view.smile_loss:.3f} under SMILE{gained}.")
    print(f"Written to {folder}: explain.html, explain.png")
