"""`captionrl truematch build`: find bags with Algorithms 1 and 2, and write the benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.dataset_options import load_split
from hf_captionrl.truematch.benchmark_files import (
    DATA_FOLDER,
    MANIFEST_FILE,
    TrueMatch,
    bags_fingerprint,
    load_truematch,
    write_data,
    write_truematch,
)

if TYPE_CHECKING:
    import torch

    from hf_captionrl.retrieval import BagFile
    from hf_captionrl.truematch.options import BuildOptions

__all__ = ["build", "print_status"]

_CURATED = (
    "candidates by nearest neighbours, then the most similar disjoint ones (No Detail Left Behind, Algorithms 1 and 2)"
)
_PUBLISHED = "the paper's release, by COCO id; similarity measured here"


def _check(arguments: BuildOptions) -> list[int]:
    """Check the options before anything slow; returns the sizes."""
    if arguments.output.exists() and not arguments.output.is_dir():
        raise ValueError(f"--output {str(arguments.output)!r} is a file. Name a folder.")
    if arguments.seed < 0:
        raise ValueError(f"--seed is {arguments.seed}, but must be at least 0.")
    sizes = sorted(set(arguments.bag_sizes))
    if sizes[0] < 2:
        raise ValueError(f"--bag_sizes {sizes[0]}: a bag needs at least 2 images.")
    return sizes


def _mine(
    arguments: BuildOptions, sizes: list[int], ids: list[str], features: torch.Tensor, signature: str
) -> BagFile:
    """Bags of all sizes, most similar first within a size."""
    from hf_captionrl.data.retrieval_benchmarks import load_published_bags, match_coco_ids
    from hf_captionrl.retrieval import BagFile
    from hf_captionrl.retrieval.bags import bag_similarities, candidate_bags, curate_bags

    published = None
    if arguments.published_bags is not None:
        published = match_coco_ids(load_published_bags(arguments.published_bags, sizes), ids)
    row = {image_id: number for number, image_id in enumerate(ids)}
    bags: list[list[str]] = []
    scores: list[float] = []
    for size in sizes:
        if published is None:
            rows, score = curate_bags(*candidate_bags(features, size, device=arguments.device))
            found = [[ids[i] for i in bag] for bag in rows.tolist()]
        else:
            found = published[size]
            score = bag_similarities(features, [[row[i] for i in bag] for bag in found])
        bags += found
        scores += score.tolist()
    return BagFile(bags, scores, signature, arguments.features, "truematch")


def _refuse_other(output: Path, settings: dict[str, Any]) -> None:
    """Refuse to change a benchmark that was built with other settings."""
    if not (output / MANIFEST_FILE).is_file():
        return
    before = load_truematch(output)
    for name, value in settings.items():
        if before.manifest.get(name) != value:
            raise ValueError(
                f"{output} holds a benchmark that was built with {name} {before.manifest.get(name)!r}, not {value!r}. Use "
                "--overwrite, which keeps decisions on unchanged bags, or another --output."
            )


def print_status(found: TrueMatch) -> None:
    """Print how many bags of each size are kept, dropped and undecided."""
    for size, counts in found.status().items():
        print(
            f"  {counts['bags']} bags of {size}: {counts['kept']} kept, {counts['dropped']} dropped, "
            f"{counts['undecided']} undecided"
        )
    if found.foreign:
        print(f"  {found.foreign} lines of decisions.jsonl are about bags of other benchmarks and are ignored")


def build(arguments: BuildOptions) -> None:
    """Build the benchmark, or resume an interrupted build."""
    sizes = _check(arguments)

    from hf_captionrl.evaluation.similarity import features_of, similarity_scorer
    from hf_captionrl.hub import public_values
    from hf_captionrl.reports.versions import installed_versions
    from hf_captionrl.truematch.card import write_truematch_card

    output: Path = arguments.output
    dataset = load_split(
        arguments,
        quarantine_path=output / "quarantine.jsonl",
        require_captions=arguments.features == "multimodal",
    ).dataset
    ids = [str(i) for i in dataset["image_id"][:]]
    if len(ids) < sizes[-1]:
        raise ValueError(f"the split has {len(ids)} images, but a bag needs {sizes[-1]}. Lower --bag_sizes.")
    scorer = similarity_scorer(arguments)
    settings = {
        "source": public_values(arguments.dataset),
        "split": arguments.split,
        "images": len(ids),
        "embed_images": not arguments.no_images,
        "sizes": sizes,
        "method": _CURATED if arguments.published_bags is None else _PUBLISHED,
        "features": arguments.features,
        "scorer": scorer.signature,
        "seed": arguments.seed,
    }
    card = {
        "dataset_id": arguments.repo_id or output.resolve().name,
        "license": arguments.license,
        "source_license": arguments.source_license_of(arguments.dataset),
        "language": arguments.language,
    }
    if not arguments.overwrite:
        _refuse_other(output, settings)
    # The folder counts as unfinished until the manifest is written again.
    (output / MANIFEST_FILE).unlink(missing_ok=True)
    write_data(output, dataset, embed_images=not arguments.no_images)
    features = features_of(arguments, dataset, scorer, arguments.features)
    bags = _mine(arguments, sizes, ids, features, scorer.signature)
    manifest = {
        "format": 1,
        **settings,
        "has_facts": "facts" in dataset.column_names,
        "card": card,
        "versions": installed_versions(),
    }
    found = write_truematch(output, bags, manifest)
    write_truematch_card(found)
    if arguments.json:
        print(
            json.dumps(
                {
                    "output": str(output),
                    **settings,
                    "bags": found.status(),
                    "fingerprint": bags_fingerprint(found.kept),
                }
            )
        )
        return
    print(f"{output}: {len(ids)} images in {DATA_FOLDER}/, {arguments.features} features of {scorer.signature}")
    print_status(found)
