"""`captionrl benchmark`: published benchmarks of scorers and captions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.data.options import HeldOutScorerOptions
from hf_captionrl.utils.options import CommandOptions, option

if TYPE_CHECKING:
    from hf_captionrl.data.benchmarks import ImagePair


@dataclass
class BenchmarkOptions(HeldOutScorerOptions, CommandOptions):
    """Evaluate a scorer on Winoground or MMVP-VLM, or captions on ImageCoDe.

    Winoground and MMVP-VLM (code of No Detail Left Behind) ask whether a scorer matches two images with their two captions.
    ImageCoDe (both papers on self-retrieval) ranks the caption of an image among ten similar images.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl benchmark winoground --data_dir winoground --scorer openai/clip-vit-base-patch32
          captionrl benchmark mmvp --data_dir MMVP_VLM --scorer outputs/clip
          captionrl caption outputs/model --dataset imagecode --data_dir imagecode --output imagecode.jsonl
          captionrl benchmark imagecode --data_dir imagecode --captions imagecode.jsonl
    """

    name: Literal["winoground", "mmvp", "imagecode"] = option(positional=True, help="the benchmark")
    data_dir: Path = option(metavar="DIR", help="folder with its files, as published")
    captions: Path | None = option(
        None, metavar="FILE", help="captions to evaluate on imagecode, from `captionrl caption`"
    )
    prefix: str = option(
        "a photo of ",
        metavar="TEXT",
        help="text before each caption of winoground and mmvp, as in the code of No Detail Left Behind",
    )


def _of_pairs(pairs: Sequence[ImagePair], scorer: Any, prefix: str) -> dict[str, Any]:
    """Scores over all pairs, and image score of each category."""
    import torch

    from hf_captionrl.data.images import open_image
    from hf_captionrl.metrics.clip_scores import pair_matching

    rows = []
    for pair in pairs:
        images = scorer.image_features([open_image(path) for path in pair.images])
        rows.append(scorer.text_features([prefix + text for text in pair.captions]) @ images.T)  # (2, 2)
    similarity = torch.stack(rows).cpu().numpy()
    by_category: dict[str, list[Any]] = {}
    for row, pair in zip(similarity, pairs, strict=True):
        by_category.setdefault(pair.category, []).append(row)
    scores = {name: pair_matching(rows)["image_score"] for name, rows in by_category.items()}
    return {"pairs": len(pairs), **pair_matching(similarity), "image_score_by_category": scores}


def _imagecode(options: BenchmarkOptions, scorer: Any) -> dict[str, Any]:
    """Recall at 1 among ten images: all sets, photographs, video frames."""
    import torch

    from hf_captionrl.data.benchmarks import load_imagecode
    from hf_captionrl.data.images import open_image
    from hf_captionrl.evaluation.caption_files import read_files
    from hf_captionrl.metrics import self_retrieval
    from hf_captionrl.metrics.caption_checks import spoken

    if options.captions is None:
        raise ValueError(
            "imagecode ranks captions. Use --captions with a file of `captionrl caption --dataset imagecode`."
        )
    sets = load_imagecode(options.data_dir / "valid_data.json", options.data_dir / "image-sets")
    wanted = [sets.image_ids[row] for row in sets.targets]
    found = read_files([options.captions], None)[0].aligned(list(dict.fromkeys(wanted)), set(wanted))
    texts = {i: group[0] for i, group in zip(dict.fromkeys(wanted), found, strict=True)}
    images = torch.cat([scorer.image_features([open_image(path)]) for path in sets.paths])
    text = scorer.text_features(spoken([texts[i] for i in wanted]))
    result: dict[str, Any] = {"descriptions": len(wanted)}
    for kind, keep in (("all", None), ("static", False), ("video", True)):
        rows = [n for n, is_video in enumerate(sets.is_video) if keep is None or is_video == keep]
        if rows:
            recall = self_retrieval(
                text[rows], images, targets=[sets.targets[n] for n in rows], sets=[sets.sets[n] for n in rows], ks=(1,)
            )
            result[f"recall_at_1_{kind}"] = recall["recall_at_1"]
    return result


def benchmark(options: BenchmarkOptions) -> None:
    """Print the numbers of a benchmark."""
    from hf_captionrl.data.benchmarks import load_mmvp, load_winoground
    from hf_captionrl.evaluation.options import load_evaluators

    scorer, _, reasons = load_evaluators("", options.scorer, "none")
    if scorer is None:
        raise ValueError(f"{reasons.get('no scorer', 'There is no scorer')}. Use --scorer with a dual encoder.")
    if options.name == "imagecode":
        result = _imagecode(options, scorer)
    else:
        load = load_winoground if options.name == "winoground" else load_mmvp
        result = _of_pairs(load(options.data_dir), scorer, options.prefix)
    result = {"benchmark": options.name, "scorer": scorer.signature, **result}
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    for key, value in result.items():
        print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}")
