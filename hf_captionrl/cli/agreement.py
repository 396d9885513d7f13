"""`captionrl agreement`: how well metrics agree with human ratings of captions."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_captionrl.utils.io import installed_versions, write_json
from hf_captionrl.utils.options import CommandOptions, DeviceOptions, NotNegative, SeedOptions, option

_TEXT_METRICS = ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l", "meteor", "cider_d", "cider", "spice")
_WITH_SCORER = ("clip_score", "ref_clip_score")


@dataclass
class AgreementOptions(SeedOptions, DeviceOptions, CommandOptions):
    """Kendall's tau of metrics with human ratings, with intervals over images, beside published numbers.

    The annotations and captions of a benchmark are read from --data_root, as their authors publish them.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl agreement --benchmark flickr8k-expert --data_root Flickr8k_text --metrics bleu_4 meteor cider_d
          captionrl agreement --benchmark flickr8k-expert --data_root Flickr8k --metrics cider_d clip_score \\
              --scorer openai/clip-vit-base-patch32 --image_dir Flickr8k/images
          captionrl agreement --benchmark flickr8k-cf --data_root Flickr8k_text --metrics cider_d --command "python mine.py"
    """

    benchmark: Literal["flickr8k-expert", "flickr8k-cf"] = option(help="the ratings")
    data_root: Path = option(help="folder with the files of the benchmark")
    metrics: list[str] = option(
        ["bleu_4", "rouge_l", "cider_d"], nargs="+", choices=(*_TEXT_METRICS, *_WITH_SCORER), help="metrics to compare"
    )
    command: str | None = option(
        None,
        metavar="COMMAND",
        help="another metric: a program that reads JSON lines with 'candidate', 'references' and 'image', and writes a number "
        "per line",
    )
    scorer: str | None = option(None, help="dual encoder of clip_score and ref_clip_score")
    image_dir: Path | None = option(None, help="folder of the images, for these two (default: --data_root/images)")
    num_bootstrap: NotNegative = option(1000, help="resamples of the images")
    output: Path | None = option(None, metavar="FILE", help="also write the result as JSON")


def measure_agreement(options: AgreementOptions) -> None:
    """Compute the scores, their agreement with the ratings, and print both beside the published numbers."""
    from hf_captionrl.evaluation.ratings import PUBLISHED, load_ratings

    asked = [name for name in options.metrics if name in _WITH_SCORER]
    if asked and options.scorer is None:
        raise ValueError(f"{asked[0]} needs a scorer. Use --scorer openai/clip-vit-base-patch32.")
    rated = load_ratings(options.benchmark, options.data_root)
    scores = {name: _text_scores(name, rated) for name in options.metrics if name not in _WITH_SCORER}
    scores |= _scorer_scores(asked, rated, options) if asked else {}
    if options.command is not None:
        scores["command"] = _command_scores(options.command, rated)
    found = rated.agreement(scores, num_bootstrap=options.num_bootstrap, seed=options.seed)
    published = PUBLISHED[options.benchmark]
    for name, row in found["metrics"].items():
        row["published"] = published.get(name)
    result = {"benchmark": options.benchmark, **found, "bad_lines": rated.num_bad_lines, "scorer": options.scorer}
    if options.output is not None:
        write_json(options.output, result | {"versions": installed_versions()})
    print(json.dumps(result) if options.json else _text(options.benchmark, rated, result))


def _text_scores(name: str, rated: Any) -> Sequence[float]:
    from hf_captionrl import metrics

    function = metrics.bleu if name.startswith("bleu") else getattr(metrics, name)
    found = function(rated.candidates, rated.references)["per_sample"]
    return found[name] if isinstance(found, dict) else found


def _scorer_scores(names: Sequence[str], rated: Any, options: AgreementOptions) -> dict[str, Sequence[float]]:
    """CLIPScore and RefCLIPScore; captions and images that occur several times are encoded once."""
    import torch
    from PIL import Image

    from hf_captionrl.metrics import clip_score, ref_clip_score
    from hf_captionrl.metrics.clip_scores import score_prefix
    from hf_captionrl.retrieval import load_scorer

    folder = options.image_dir or options.data_root / "images"
    images = list(dict.fromkeys(rated.images))
    missing = [name for name in images if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} of {len(images)} images, such as {missing[0]!r}.")
    scorer: Any = load_scorer(options.scorer, device=options.device)
    prefix = score_prefix("hessel")

    def encoded(texts: Sequence[str]) -> tuple[Any, dict[str, int]]:
        distinct = list(dict.fromkeys(texts))
        features = scorer.text_features([prefix + text for text in distinct])
        return features, {text: row for row, text in enumerate(distinct)}

    parts = (images[start : start + scorer.batch_size] for start in range(0, len(images), scorer.batch_size))
    pictures = torch.cat(
        [scorer.image_features([Image.open(folder / name).convert("RGB") for name in part]) for part in parts]
    )
    own = pictures[[*map({name: row for row, name in enumerate(images)}.get, rated.images)]]
    texts, row_of = encoded(rated.candidates)
    candidates = texts[[row_of[text] for text in rated.candidates]]
    scores = {"clip_score": clip_score(candidates, own)["per_sample"]}
    if "ref_clip_score" in names:
        features, row_of = encoded([text for each in rated.references for text in each])
        references = [features[[row_of[text] for text in each]] for each in rated.references]
        scores["ref_clip_score"] = ref_clip_score(candidates, own, references)["per_sample"]
    return {name: scores[name] for name in names}


def _command_scores(command: str, rated: Any) -> list[float]:
    rows = zip(rated.candidates, rated.references, rated.images, strict=True)
    lines = "".join(json.dumps({"candidate": c, "references": r, "image": i}) + "\n" for c, r, i in rows)
    done = subprocess.run(shlex.split(command), input=lines, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(f"--command {command!r} ended with exit code {done.returncode}.")
    written = done.stdout.split()
    try:
        numbers = [float(word) for word in written]
    except ValueError as error:
        raise ValueError(f"--command {command!r} must write a number per line: {error}.") from error
    if len(numbers) != len(rated.candidates):
        raise ValueError(f"--command {command!r} wrote {len(numbers)} numbers for {len(rated.candidates)} captions.")
    return numbers


def _text(benchmark: str, rated: Any, result: dict[str, Any]) -> str:
    first = next(iter(result["metrics"].values()))
    lines = [
        f"{benchmark}: {first['num_captions']:,} captions of {first['num_images']:,} images, {first['num_ratings']:,} ratings; "
        f"Kendall's tau-{rated.variant} x 100, 95 % intervals over images.",
        f"{'':16}{'tau':>6}  {'interval':16}published",
    ]
    if rated.num_bad_lines:
        lines.insert(1, f"{rated.num_bad_lines} lines of the annotations could not be read.")
    for name, row in result["metrics"].items():
        interval = "[{:.1f}, {:.1f}]".format(*(100 * end for end in row["tau_ci"])) if "tau_ci" in row else ""
        tau, published, said = 100 * row["tau"], row["published"], ""
        if published is not None and name in _WITH_SCORER:
            said = f"{published:.1f} (CLIP ViT-B/32)"
        elif published is not None:
            differs = f"differs by {tau - published:+.1f}" if round(tau, 1) != published else "reproduced"
            said = f"{published:.1f}, {differs}"
        lines.append(f"{name:16}{tau:6.1f}  {interval:16}{said}".rstrip())
    for row in result["differences"]:
        low, high = (100 * end for end in row["interval"])
        lines.append(
            f"{row['first']} - {row['second']}: {100 * row['difference']:+.1f} [{low:+.1f}, {high:+.1f}], "
            f"p = {row['adjusted_p_value']:.3f} (Benjamini and Hochberg)"
        )
    return "\n".join(lines)
