"""`captionrl explain`: a caption token by token, under maximum likelihood, SMILE and self-retrieval."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import Tensor

import hf_captionrl.scenes
from hf_captionrl.apps.explain.options import CLIP, ExplainOptions
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.head_tap import HeadInputs, LogProbsObjective, evaluating
from hf_captionrl.captioners.language_models import default_device
from hf_captionrl.data.images import open_image
from hf_captionrl.evaluation.options import optional_scorer
from hf_captionrl.evaluation.pages import TEMPLATES as SHARED_TEMPLATES
from hf_captionrl.evaluation.pages import content_hash, embedded_image, html_templates
from hf_captionrl.evaluation.plots import COLOURS, new_figure, plain_label, save_figure, tidy
from hf_captionrl.losses.linear_log_probs import IGNORE_INDEX, head_logits
from hf_captionrl.losses.policy_gradient import LossType, policy_gradient_loss
from hf_captionrl.losses.smile import FirstToken, fused_smile_loss, smile_loss
from hf_captionrl.metrics.suites import spoken
from hf_captionrl.retrieval.ranking import ranks_from_scores
from hf_captionrl.rewards.advantages import BASELINES
from hf_captionrl.rewards.claim_rewards import CheckedClaim, SceneChecker, claim_credit, token_spans
from hf_captionrl.rewards.self_retrieval import retrieval_rewards
from hf_captionrl.utils.io import atomic_write_text, to_plain
from hf_captionrl.utils.model_files import model_path

# --- Each token of a caption: its loss under maximum likelihood and SMILE, and its gradient under a reward -----------
# Legend: T tokens of the caption with its end, V vocabulary, K tokens of V_D (those of the caption, each once).
#
# Losses and log-probabilities come from the functions of training, through the head tap. The full distribution, which
# training never builds, is computed for this one caption.


@dataclass(frozen=True)
class Alternative:
    """A token that could stand at a position."""

    token_id: int
    text: str
    probability: float  # in [0, 1], under the distribution that lists it
    in_subset: bool  # whether it is one of the caption's tokens, V_D


@dataclass(frozen=True)
class TokenView:
    """One token of the caption."""

    token_id: int
    text: str
    is_end: bool  # whether it ends the caption
    mle_probability: float  # in [0, 1], among the whole vocabulary
    mle_loss: float  # `-log` of it, in nats: the loss of maximum likelihood
    smile_probability: float  # in [0, 1], among V_D; at the first token among the vocabulary if `first_token` is "mle"
    smile_loss: float  # loss of SMILE in nats, never more than `mle_loss`
    outside: float  # in [0, 1], probability of all tokens outside V_D under the whole vocabulary's distribution
    entropy: float  # of the whole vocabulary's distribution, in nats
    whole_vocabulary: bool  # whether SMILE also uses the whole vocabulary here
    mle_top: tuple[Alternative, ...]  # the most likely tokens of the vocabulary, in descending order
    smile_top: tuple[Alternative, ...]  # the same for SMILE's distribution


@dataclass(frozen=True)
class CaptionView:
    """A caption, token by token."""

    caption: str  # the caption as given
    first_token: str  # `"mle"` or `"smile"`, SMILE's distribution at the first token
    vocab_size: int
    subset: tuple[str, ...]  # texts of the tokens of V_D, in the order of the caption
    complete: bool  # False if the caption was truncated, so that its end token is not scored
    tokens: tuple[TokenView, ...]  # T tokens

    @property
    def mle_loss(self) -> float:
        """Mean nats per token: the model's loss on this caption."""
        return math.fsum(token.mle_loss for token in self.tokens) / len(self.tokens)

    @property
    def smile_loss(self) -> float:
        """Mean nats per token: `smile_loss` of this caption."""
        return math.fsum(token.smile_loss for token in self.tokens) / len(self.tokens)

    @property
    def log_prob(self) -> float:
        """Log-probability of the caption in nats, the sum over its tokens."""
        return -math.fsum(token.mle_loss for token in self.tokens)


def token_text(tokenizer: Any, token_id: int) -> str:
    """Text of a token, or its name in the vocabulary if it is not a whole character."""
    text = tokenizer.decode([token_id]) if token_id < len(tokenizer) else ""
    if text.strip() and "\ufffd" not in text:
        return text
    name = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
    return name or f"<{token_id}>"


def explain_caption(
    captioner: Captioner,
    image: Image.Image,
    caption: str,
    *,
    first_token: FirstToken = "mle",
    top_k: int = 5,
    max_length: int = 77,
) -> CaptionView:
    r"""Every token of a caption under maximum likelihood and under SMILE (Yue et al. 2023, Figure 5 and Eq. 2-3).

    `mle_loss = -log p(w)`; `smile_loss = -log [p(w) / sum_{v in V_D}
    p(v)]`, so they differ by the probability of words that the caption does not use.
    """
    batch = captioner.collate([image], [caption], max_length=max_length)
    batch = {name: value.to(captioner.device) for name, value in batch.items()}

    def objective(head: HeadInputs) -> dict[str, Tensor]:
        """`log_probs`, `entropy` and `smile`, each `(1, T)`, and `distribution` `(1, T, V)`, all in nats."""
        found = LogProbsObjective(return_entropy=True)(head)
        settings: dict[str, Any] = {"first_token": first_token, "reduction": "none"}
        if head.hidden is None or head.weight is None:
            assert head.logits is not None
            found["smile"] = smile_loss(head.logits, head.labels, **settings)
            logits = head.logits.float()  # (1, T, V)
        else:
            settings |= {"bias": head.bias, "softcap": head.softcap}
            found["smile"] = fused_smile_loss(head.hidden, head.weight, head.labels, **settings)
            # The function that training calls for each chunk.
            hidden, dtype = head.hidden.to(head.weight.dtype), found["log_probs"].dtype
            logits = head_logits(hidden, head.weight, head.bias, head.softcap, dtype)
        return {**found, "distribution": logits.log_softmax(-1)}

    with evaluating(captioner.model), torch.no_grad():
        output = captioner.model(**batch, head_objective=objective)
    labels = captioner.align_labels(batch["labels"])[0]  # (T of the row,)
    supervised = labels != IGNORE_INDEX
    ids = labels[supervised].cpu()  # (T,)
    subset = torch.tensor(list(dict.fromkeys(ids.tolist())))  # (K,)
    # fp64: sums over the vocabulary must be 1 to four digits.
    distribution = output["distribution"][0, supervised].double().cpu()  # (T, V)
    mle, smile, entropy = (output[name][0, supervised].double().cpu() for name in ("log_probs", "smile", "entropy"))
    own = distribution[:, subset]  # (T, K)
    vocabulary = torch.arange(distribution.size(1))
    outside = torch.ones_like(vocabulary, dtype=torch.bool)
    outside[subset] = False

    def top(log_probs: Tensor, ids: Tensor) -> tuple[Alternative, ...]:
        """The most likely of some tokens, both `(K,)`."""
        best = log_probs.topk(min(top_k, len(log_probs)))
        return tuple(
            Alternative(token, token_text(captioner.tokenizer, token), math.exp(value), not bool(outside[token]))
            for value, token in zip(best.values.tolist(), ids[best.indices].tolist(), strict=True)
        )

    tokens = []
    for position, token in enumerate(ids.tolist()):
        whole = position == 0 and first_token == "mle"
        mle_top = top(distribution[position], vocabulary)
        tokens.append(
            TokenView(
                token_id=token,
                text=token_text(captioner.tokenizer, token),
                is_end=position == len(ids) - 1 and token == captioner.eos_token_id,
                mle_probability=math.exp(mle[position]),
                mle_loss=-float(mle[position]),
                smile_probability=math.exp(-smile[position]),
                smile_loss=float(smile[position]),
                outside=float(distribution[position, outside].exp().sum()),
                entropy=float(entropy[position]),
                whole_vocabulary=whole,
                mle_top=mle_top,
                smile_top=mle_top if whole else top(own[position].log_softmax(0), subset),
            )
        )
    return CaptionView(
        caption=caption,
        first_token=first_token,
        vocab_size=distribution.size(1),
        subset=tuple(token_text(captioner.tokenizer, token) for token in subset.tolist()),
        complete=int(ids[-1]) == captioner.eos_token_id,
        tokens=tuple(tokens),
    )


def token_pushes(
    view: CaptionView, advantage: float, *, loss_type: LossType = "grpo"
) -> tuple[list[float], list[float]]:
    r"""Gradients of one step of the policy gradient at each token of the caption.

    With `L` the [`policy_gradient_loss`] of this one caption, the first list is `-dL / d log p_t = A w_t`, equal for all
    tokens: the advantage `A` is that of the caption, and `w_t` is 1/T (`"grpo"`, `"dapo"`) or 1 (`"sum"`). The second
    is `-dL / d z_t = A w_t (1 - p_t)`, where `z_t` is the logit of the token itself (after the softcap, if any): tokens
    with a probability near 1 hardly change.
    """
    log_probs = torch.tensor([[-token.mle_loss for token in view.tokens]], dtype=torch.float64, requires_grad=True)
    loss = policy_gradient_loss(
        log_probs,
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones_like(log_probs, dtype=torch.bool),
        loss_type=loss_type,
    )["loss"]
    (gradient,) = torch.autograd.grad(loss, log_probs)  # (1, T)
    weights = (-gradient[0]).tolist()
    # d log p_t / d z_t = 1 - p_t
    return weights, [weight * -math.expm1(-token.mle_loss) for weight, token in zip(weights, view.tokens, strict=True)]


@dataclass(frozen=True)
class CaptionClaims:
    """The claims of a caption of a scene, and what `ClaimReward(credit="claim")` adds to the advantage of each token."""

    caption: str  # as the tokens say it, in which the claims have their places
    claims: tuple[CheckedClaim, ...]
    precision: float  # share of true claims
    credits: tuple[float, ...]  # of T tokens, `v - precision`; 0 outside of claims


def explain_claims(captioner: Captioner, view: CaptionView, facts: Any) -> CaptionClaims:
    """The claims of a caption against the facts of its scene, exactly."""
    ids = torch.tensor([[token.token_id for token in view.tokens]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    (caption,) = captioner.decode(ids, mask)
    (checked,) = SceneChecker(positions=True)([caption], [facts])
    credits = claim_credit(checked, token_spans(captioner.decode, ids, mask)[0])
    return CaptionClaims(caption, tuple(checked.claims), checked.precision, tuple(credits))


# --- One caption, token by token: a page, a picture, and JSON --------------------------------------------------------

TEMPLATES = Path(__file__).parent / "templates"
# The page is self-contained: it holds image and style, and its content security policy forbids requests and scripts.
# Captions and tokens are escaped everywhere.

_WEIGHTS = {"grpo": "1 / tokens of the caption", "dapo": "1 / tokens of the batch, here this caption", "sum": "1"}


@dataclass(frozen=True)
class CaptionReward:
    """Reward of the caption for self-retrieval."""

    reward: float  # log-probability of the target among the images of the pool, in nats, at most 0
    baseline: float  # subtracted from the reward, in nats
    baseline_name: str  # description of the baseline
    rank: int  # rank of the image, 1 = best
    pool_size: int  # number of images in the pool, the target included
    scorer: str  # name of the scorer
    loss_type: LossType = "grpo"  # weight of a token in the policy gradient

    @property
    def advantage(self) -> float:
        """Reward minus baseline, in nats."""
        return self.reward - self.baseline


def visible_token(text: str) -> str:
    """A token without surrounding blanks, and with invisible characters escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text.strip(" "))
    return shown or "␣"


def explanation_json(
    view: CaptionView, reward: CaptionReward | None = None, claims: CaptionClaims | None = None
) -> dict[str, Any]:
    """Everything the page shows, in full precision."""
    losses = {"mle_loss": view.mle_loss, "smile_loss": view.smile_loss, "log_prob": view.log_prob}
    found: dict[str, Any] = {**asdict(view), **losses, "reward": None, "claims": None}
    if claims is not None:
        found["claims"] = {**asdict(claims), "claims": [claim._asdict() for claim in claims.claims]}
    if reward is not None:
        weights, pushes = token_pushes(view, reward.advantage, loss_type=reward.loss_type)
        found["reward"] = {**asdict(reward), "advantage": reward.advantage, "weights": weights, "pushes": pushes}
    return found


def _percent(value: float) -> str:
    """A probability as percent."""
    if value >= 0.9995:
        return "100 %"
    return f"{100 * value:.1f} %" if value >= 0.001 else "<0.1 %"


def _loss(value: float) -> str:
    return f"{abs(value) if abs(value) < 0.005 else value:.2f}"  # never -0.00


def write_explanation(
    path: str | os.PathLike[str],
    view: CaptionView,
    image: Image.Image,
    title: str,
    *,
    image_name: str = "Image",
    note: str = "",
    reward: CaptionReward | None = None,
    claims: CaptionClaims | None = None,
) -> Path:
    """Write the page (SMILE, Figure 5), atomically."""
    values: dict[str, Any] = {"view": view, "title": title, "note": note, "image_name": image_name, "reward": reward}
    values["claims"] = claims
    if reward is not None:
        weights, pushes = token_pushes(view, reward.advantage, loss_type=reward.loss_type)
        values |= {"pushes": pushes, "largest_push": max(map(abs, pushes)) or 1.0}
        values |= {"weight": weights[0], "weight_name": _WEIGHTS[reward.loss_type]}
    styles = (SHARED_TEMPLATES / "gallery.css", TEMPLATES / "explain.css")
    style = "".join(path.read_text(encoding="utf-8") for path in styles)
    environment = html_templates(TEMPLATES)
    environment.filters |= {"visible": visible_token, "percent": _percent, "loss": _loss}
    html = environment.get_template("explain.html.j2").render(
        image=embedded_image(image),
        longest=max(max(token.mle_loss, token.smile_loss) for token in view.tokens) or 1.0,
        # The only text that is not escaped. The policy allows only its hash.
        style=Markup(style),
        style_hash=content_hash(style),
        **values,
    )
    return atomic_write_text(path, html)


def _drawn(text: str, longest: int = 18) -> str:
    """Text that matplotlib can draw, truncated to fit the panels."""
    shown = visible_token(text)
    return plain_label(shown if len(shown) <= longest else shown[: longest - 1] + "…")


def write_explanation_picture(
    path: str | os.PathLike[str], view: CaptionView, reward: CaptionReward | None = None
) -> Path:
    """Draw the tokens of the caption from top to bottom, and write the PNG atomically.

    Left: loss of each token under MLE and under SMILE. Middle: probability of the token, of the caption's other tokens and
    of all other tokens, with the most likely of these; SMILE ignores them. Right, with a reward: gradient of one step of
    the policy gradient at the token's logit.
    """
    columns = 2 if reward is None else 3
    figure, axes = new_figure(3.4 * columns + 0.8, 1.5 + 0.34 * len(view.tokens), columns=columns)
    places = range(len(view.tokens))
    for axis in axes:
        axis.set_ylim(len(places) - 0.4, -0.6)
        axis.set_yticks(places, [""] * len(places))
        tidy(axis, grid="x")
    axes[0].set_yticks(places, [_drawn(token.text) for token in view.tokens])
    grey, orange, blue = COLOURS[:3]
    axes[0].barh([p - 0.19 for p in places], [t.mle_loss for t in view.tokens], 0.36, color=grey, label="MLE")
    axes[0].barh(
        [p + 0.19 for p in places], [t.smile_loss for t in view.tokens], 0.36, color=orange, hatch="//", label="SMILE",
        edgecolor="white", linewidth=0,
    )  # fmt: skip
    axes[0].set_xlabel("Loss in nats")
    own = [token.mle_probability for token in view.tokens]
    outside = [token.outside for token in view.tokens]
    others = [max(1 - p - q, 0.0) for p, q in zip(own, outside, strict=True)]
    left = [0.0] * len(places)
    for values, colour, label, hatch in (
        (own, orange, "the token", ""),
        (others, grey, "other caption words", ".."),
        (outside, "#b9d7ea", "other words", ""),
    ):
        axes[1].barh(places, values, 0.7, left=left, color=colour, hatch=hatch, label=label, edgecolor="white", linewidth=0)  # fmt: skip
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, token in zip(places, view.tokens, strict=True):
        # The most likely listed token that the caption does not use.
        words = [other.text for other in token.mle_top if not other.in_subset and other.probability > 0.05]
        if words:
            axes[1].text(0.985, place, _drawn(words[0]), ha="right", va="center", fontsize=8, color="#12344d")
    axes[1].set_xlim(0, 1)
    axes[1].set_xlabel("Probability among the whole vocabulary")
    if reward is not None:
        _, pushes = token_pushes(view, reward.advantage, loss_type=reward.loss_type)
        axes[2].barh(places, pushes, 0.7, color=blue)
        axes[2].axvline(0.0, color="#5d6370", linewidth=0.8)
        axes[2].xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes[2].set_xlabel("RL: gradient at the token's logit")
        axes[2].set_title(f"advantage {reward.advantage:+.2f}, rank {reward.rank} of {reward.pool_size}", fontsize=9)
    for axis, number in zip(axes[:2], (2, 3), strict=True):
        axis.legend(frameon=False, fontsize=8, ncols=number, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderpad=0.1, handlelength=1.2, columnspacing=0.9)  # fmt: skip
    figure.suptitle(_drawn(" ".join(view.caption.split()), 100), fontsize=12)
    return save_figure(path, figure)


# --- `captionrl explain`: a caption token by token, under maximum likelihood, SMILE and self-retrieval ---------------

_SCENES = "scenes:"


def _images(arguments: ExplainOptions) -> tuple[list[Image.Image], Any]:
    """The image and its distractors, by name; the facts of the image, if it is a scene."""
    asked = [arguments.image, *(arguments.distractors or [])]
    scenes: dict[str, dict[str, Any]] = {}
    if any(name.startswith(_SCENES) for name in asked):
        rows = hf_captionrl.scenes.load_scenes(num_train=0, num_validation=0)["test"]
        scenes = {_SCENES + row["image_id"]: row for row in rows}
    names: list[str] = []
    for name in asked:
        if name != "scenes:bag":
            names.append(name)
            continue
        bag = scenes[arguments.image]["bag_id"] if arguments.image in scenes else ""
        if not bag:
            raise ValueError(
                f"{arguments.image!r} is not in a bag of the embedded world. Use --distractors IMAGE ... instead."
            )
        names += [other for other, row in scenes.items() if row["bag_id"] == bag]
    found = []
    for name in dict.fromkeys(names):  # a copy of the target among the distractors would lower its rank
        if name.startswith(_SCENES):
            if name not in scenes:
                ids = [known.removeprefix(_SCENES) for known in scenes]
                wanted = name.removeprefix(_SCENES)
                raise ValueError(f"There is no scene {wanted!r}. The test split has {ids[0]} to {ids[-1]}.")
            found.append(open_image(scenes[name]["image"]))
        elif Path(name).is_file():
            found.append(open_image(name))
        else:
            raise FileNotFoundError(f"There is no image {name!r}. Use a file, or scenes:ID such as scenes:test-00012.")
    return found, scenes[arguments.image]["facts"] if arguments.image in scenes else None


def _reward(arguments: ExplainOptions, captioner: Captioner, images: list[Image.Image], caption: str) -> CaptionReward:
    """Reward and baseline of the caption, as `SelfRetrieval` and the trainer's baselines compute them."""
    embedded = arguments.image.startswith(_SCENES)
    name = arguments.scorer or ("scenes:clip-reward" if embedded else CLIP)
    scorer: Any = optional_scorer(name)
    if scorer is None:
        raise ValueError("--distractors needs a scorer. Use --scorer NAME, or leave --distractors out.")
    encoded = captioner.encode_images(images[:1])
    captions = [caption]
    greedy = arguments.baseline == "greedy"
    if arguments.baseline != "none":
        torch.manual_seed(arguments.seed)
        decoding: dict[str, Any] = {"num_beams": 1, "do_sample": not greedy, "max_new_tokens": arguments.max_length}
        if not greedy:
            decoding |= {"num_return_sequences": arguments.num_samples, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        captions += captioner.generate(**encoded, **decoding).captions
    texts = scorer.text_features(spoken(captions)).float()
    pool = scorer.image_features(images).float()
    similarity = texts @ pool.T  # (captions, K), the target first
    target = torch.zeros(len(captions), dtype=torch.long, device=similarity.device)
    rewards = retrieval_rewards(similarity, target, "log_prob", scorer.logit_scale).double().cpu()
    baseline = BASELINES[arguments.baseline]()
    found = baseline(rewards[None, :1], rewards[1:]) if greedy else baseline(rewards[None])
    advantage = float(found[0, 0])
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
        rank=int(ranks_from_scores(similarity, target)[0]),
        pool_size=len(pool),
        scorer=Path(name).name if Path(name).exists() else name,
        loss_type=arguments.loss_type,
    )


def explain(arguments: ExplainOptions) -> None:
    if arguments.caption is not None and not arguments.caption.strip():
        raise ValueError("--caption is empty. Use a text, or leave --caption out for a generated caption.")
    (image, *others), facts = _images(arguments)  # before anything slow
    if arguments.distractors and not others:
        raise ValueError("--distractors names only the image itself. Use at least one other image.")

    captioner = load_captioner(
        model_path(arguments.model),
        revision=arguments.revision,
        prompt=arguments.prompt,
        dtype=getattr(torch, arguments.dtype),
        device=default_device(arguments.device),
    )
    caption = arguments.caption
    if caption is None:
        encoded = captioner.encode_images([image])
        (caption,) = captioner.generate(**encoded, num_beams=1, do_sample=False).captions
        if not caption.strip():
            raise ValueError("The model's caption of this image is empty. Use --caption TEXT.")
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in ("first_token", "top_k", "max_length")}
    view = explain_caption(captioner, image, caption, **settings)
    reward = _reward(arguments, captioner, [image, *others], caption) if others else None
    claims = None if facts is None else explain_claims(captioner, view, facts)
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
        claims=claims,
    )
    picture = write_explanation_picture(folder / "explain.png", view, reward=reward)
    if arguments.json:
        result = {"model": model, "image": name, "page": str(page), "picture": str(picture)}
        print(json.dumps(to_plain({**result, **explanation_json(view, reward, claims)}), ensure_ascii=False))
        return
    text = f"{caption}: {view.mle_loss:.3f} nats per token under MLE, {view.smile_loss:.3f} under SMILE"
    if reward is not None:
        text += f", advantage {reward.advantage:+.3f} (rank {reward.rank} of {reward.pool_size})"
    if claims is not None:
        wrong = [claim.text for claim in claims.claims if not claim.is_true]
        text += f", {len(claims.claims)} claims" + (f", wrong: {', '.join(wrong)}" if wrong else ", all true")
    print(f"{text}.")
    print(f"Written to {folder}: explain.html, explain.png")
