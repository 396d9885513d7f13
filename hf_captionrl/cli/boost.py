"""`captionrl boost`: blend references, describe images, combine both; sharded, and resumed where a run was stopped."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.cli.arguments import add_common, add_dataset, positive
from hf_captionrl.evaluation.dataset_options import load_split

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.language_models import Backend

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Visual Caption Boosting (No Detail Left Behind, section 2): a language model blends the references of an image into a
BlendCap, a vision model describes the image, and the language model adds the new details to the BlendCap, which wins
conflicts. The output folder gets a journal of every answer, captions.parquet, quarantine.jsonl, statistics.json and
lengths.png, and README.md, the card with which `captionrl push` publishes it. To train on the captions boost the split that is trained on, --split train: the default is test, as in all
commands. After a crash or `kill -9` give the same command again: nothing that was answered is asked for twice.
"""

_EPILOG = """\
backends, for --text and --vision:
  scenes               the embedded world: rules that blend, and a describer with a known error rate (the default there)
  transformers:NAME    a model of transformers, a folder or a name on the Hub
  captioner:NAME       --vision only: a captioner of this package, such as scenes:blip-mle
  vllm:NAME            vLLM in this process, where it is installed
  openai:NAME          any endpoint that speaks OpenAI's chat completions, with --text_url or --vision_url; a key only from
                       the environment variable that --api_key_env names

examples:
  captionrl boost --dataset scenes --split train --output boosted
  captionrl boost --dataset dataset_coco.json --image_root coco --split train --output boosted \\
      --text transformers:mistralai/Mistral-7B-Instruct-v0.2 --vision transformers:Salesforce/instructblip-vicuna-7b
  captionrl boost --dataset dataset_coco.json --image_root coco --split train --output boosted --shard 3/8 \\
      --text openai:mistral --text_url http://127.0.0.1:8000/v1 --vision openai:llava --vision_url http://127.0.0.1:8001/v1
  accelerate launch --config_file recipes/accelerate/ddp.yaml -m hf_captionrl.cli boost --dataset scenes --split train \\
      --output boosted                                 a shard for each process

To publish: images that are files go in with --embed_images, or stay out with --no_images; --merge asks nothing anew.
  captionrl boost --dataset dataset_coco.json --image_root coco --split train --output boosted --merge --no_images
  captionrl push boosted --repo_id me/coco-boosted

Shards on several machines: copy their journals into one folder and give the command with --merge.
"""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "boost",
        help="write richer references with language and vision models, resumable",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("boosted"),
        metavar="DIR",
        help="folder to write into (default: %(default)s)",
    )
    add_dataset(parser)
    group = parser.add_argument_group("backends")
    group.add_argument("--text", metavar="BACKEND", help="writes BlendCap and HolisticCap, see below")
    group.add_argument("--vision", metavar="BACKEND", help="writes VisualCap, see below")
    group.add_argument("--text_revision", metavar="REV", help="branch, tag or commit of the language model")
    group.add_argument("--vision_revision", metavar="REV", help="likewise of the vision model")
    group.add_argument("--text_url", metavar="URL", help="address of openai:, up to /chat/completions")
    group.add_argument("--vision_url", metavar="URL", help="likewise (default: that of --text_url)")
    group.add_argument("--api_key_env", metavar="NAME", help="environment variable with the endpoints' key")
    group.add_argument("--concurrency", type=positive, default=4, metavar="N", help="requests in flight")
    group.add_argument("--timeout_s", type=float, default=120.0, metavar="S", help="of a request")
    group.add_argument("--tries", type=positive, default=6, metavar="N", help="requests for one answer at most")
    group.add_argument("--backoff_s", type=float, default=1.0, metavar="S", help="first wait between them, doubled")
    group.add_argument("--batch_size", type=positive, default=8, metavar="N", help="prompts of transformers at a time")
    group.add_argument("--max_new_tokens", type=positive, default=256, metavar="N", help="longest answer")
    group.add_argument("--error_rate", type=float, default=0.15, metavar="X", help="of the scenes' describer")
    group.add_argument("--mention_rate", type=float, default=0.85, metavar="X", help="of the scenes' describer")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the scenes' describer, and of samples")
    group = parser.add_argument_group("run")
    group.add_argument("--shard", default="0/1", metavar="I/N", help="only every N-th row, from the I-th (from 0) on")
    group.add_argument("--merge", action="store_true", help="ask nothing; merge the journals that are there")
    group.add_argument("--attempts", type=positive, default=3, metavar="N", help="answers a row may get wrong in form")
    group.add_argument("--max_words", type=positive, default=120, metavar="N", help="longest accepted answer")
    group.add_argument("--rows_at_once", type=positive, default=64, metavar="N", help="rows handed over together")
    group.add_argument("--max_failures", type=positive, default=20, metavar="N", help="no answers in a row: stop")
    group.add_argument("--retry_quarantined", action="store_true", help="ask anew where answers were bad")
    images = group.add_mutually_exclusive_group()
    images.add_argument("--embed_images", action="store_true", help="put images into the file, not their paths")
    images.add_argument("--no_images", action="store_true", help="leave the images out, to publish the captions alone")
    group.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="count its tokens, too, as the paper CLIP's (default on scenes: scenes:clip-judge; elsewhere none)",
    )
    group = parser.add_argument_group("publication")
    group.add_argument("--repo_id", metavar="NAME", help="what the card calls it (default: the folder's name)")
    group.add_argument("--license", default="other", metavar="NAME", help="of the captions (default: %(default)s)")
    group.add_argument("--source_license", metavar="TEXT", help="of the images and references (default: see there)")
    group.add_argument("--language", default="en", metavar="CODE", help="of the captions (default: %(default)s)")
    add_common(parser)
    parser.set_defaults(run=run, resumes=True)


def _shard(text: str) -> tuple[int, int]:
    """Shard and number of shards, of this machine and its processes."""
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise ValueError(f"--shard {text!r} must be I/N with I from 0 to N-1, such as 0/8.")
    # Of accelerate launch and torchrun. No process waits for another, so none hangs where another one failed.
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return int(index) * world + rank, int(number) * world


def _device() -> str | None:
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return None
    import torch

    return f"cuda:{rank}" if torch.cuda.is_available() else "cpu"


def _backend(arguments: argparse.Namespace, role: str, dataset: datasets.Dataset) -> Backend:
    """The backend that `--text` or `--vision` names."""
    from hf_captionrl import boosting, language_models

    vision = role == "vision"
    spec = getattr(arguments, role) or ("scenes" if arguments.dataset == "scenes" else "")
    kind, _, name = spec.partition(":")
    if kind == "scenes" and not name:
        if "facts" not in dataset.column_names:
            raise ValueError(f"--{role} scenes needs the column 'facts', which embedded scenes have. Name a model.")
        if not vision:
            return boosting.SceneWriter()
        facts = dict(zip(dataset["image_id"][:], dataset["facts"][:], strict=True))
        rates = {"error_rate": arguments.error_rate, "mention_rate": arguments.mention_rate}
        return boosting.SceneDescriber(facts, **rates, seed=arguments.seed)
    kinds = ("transformers", "vllm", "openai", *(("captioner",) if vision else ()))
    if kind not in kinds or not name:
        raise ValueError(
            f"--{role} is {spec!r}. Use 'scenes', or one of {', '.join(kinds)} with a name after a colon."
        )
    revision = getattr(arguments, f"{role}_revision")
    if kind == "openai":
        url = getattr(arguments, f"{role}_url") or arguments.text_url
        if not url:
            raise ValueError(f"--{role} {spec!r} needs an address. Pass --{role}_url http://127.0.0.1:8000/v1, say.")
        return language_models.HTTPBackend(
            url,
            name,
            revision=revision or "",
            api_key_env=arguments.api_key_env,
            sees_images=vision,
            max_new_tokens=arguments.max_new_tokens,
            seed=arguments.seed,
            concurrency=arguments.concurrency,
            timeout_s=arguments.timeout_s,
            tries=arguments.tries,
            backoff_s=arguments.backoff_s,
        )
    if kind == "vllm":
        return language_models.VLLMBackend(
            name, revision=revision, sees_images=vision, max_new_tokens=arguments.max_new_tokens, seed=arguments.seed
        )
    make: Any = language_models.TransformersVisionBackend if vision else language_models.TransformersTextBackend
    if kind == "captioner":
        make = language_models.CaptionerBackend
    return make(
        name,
        revision=revision,
        device=_device(),
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
    )


def _load(arguments: argparse.Namespace) -> datasets.Dataset:
    """The images, unchecked: each shard looks at its own rows, whose images alone need be there."""
    loaded = load_split(arguments, quarantine_path=None)
    number, total = len(loaded.all_ids), sum(loaded.sizes.values())
    if number < total and arguments.dataset != "scenes":
        print(
            f"captionrl boost: {number} of {total} images are boosted, the split {arguments.split!r}. Use --split train for "
            "captions to train on, or --split all for every image.",
            file=sys.stderr,
        )
    return loaded.dataset


def _statistics(path: Path, tokenizer: str | None) -> dict[str, Any]:
    """Table 9 and Figure 4, beside the captions."""
    import pyarrow.parquet

    from hf_captionrl.boosting import source_statistics, write_source_histogram
    from hf_captionrl.io import write_json

    names = {"blend_caption": "BlendCap", "visual_caption": "VisualCap", "holistic_caption": "HolisticCap"}
    table = pyarrow.parquet.read_table(path, columns=["references", *names]).to_pydict()
    sources = {"references": [caption for group in table["references"] for caption in group]}
    sources |= {shown: table[name] for name, shown in names.items()}
    count = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        from hf_captionrl.scenes.models import model_path

        loaded = AutoTokenizer.from_pretrained(model_path(tokenizer), trust_remote_code=False)
        count = lambda texts: [len(ids) for ids in loaded(texts)["input_ids"]]  # noqa: E731
    found = source_statistics(sources, count_tokens=count)
    write_json(path.parent / "statistics.json", found)
    write_source_histogram(path.parent / "lengths.png", sources)
    return found


def run(arguments: argparse.Namespace) -> None:
    """Boost the captions."""
    shard, num_shards = _shard(arguments.shard)  # before anything slow
    tokenizer = arguments.tokenizer or ("scenes:clip-judge" if arguments.dataset == "scenes" else None)
    output = arguments.output
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {str(output)!r} is a file. Name a folder.")

    from dataclasses import asdict

    from tqdm import tqdm

    from hf_captionrl.boosting import UnfinishedError, boost_shard, merge_journals
    from hf_captionrl.boosting.card import write_boosted

    dataset = _load(arguments)
    text, vision = _backend(arguments, "text", dataset), _backend(arguments, "vision", dataset)
    summary: dict[str, Any] = {"output": str(output), "shard": shard, "num_shards": num_shards}
    if not arguments.merge:
        # Progress only where somebody watches.
        with tqdm(total=len(range(shard, len(dataset), num_shards)), unit=" rows", disable=None) as progress:
            report = boost_shard(
                dataset,
                output,
                text=text,
                vision=vision,
                shard=shard,
                num_shards=num_shards,
                attempts=arguments.attempts,
                max_words=arguments.max_words,
                rows_at_once=arguments.rows_at_once,
                max_bad_fraction=arguments.max_bad_fraction,
                max_failures=arguments.max_failures,
                retry_quarantined=arguments.retry_quarantined,
                progress=progress.update,
            )
        summary |= asdict(report)
    try:
        # Whoever is through last finds everything there, and merges.
        merged = merge_journals(
            dataset,
            output,
            text=text,
            vision=vision,
            embed_images=arguments.embed_images,
            with_images=not arguments.no_images,
            exact_facts=arguments.dataset == "scenes",
        )
    except UnfinishedError as error:
        if arguments.merge:
            raise
        print(f"captionrl boost: shard {shard} of {num_shards} is through. {error}", file=sys.stderr)
        summary["merged"] = None
    else:
        summary["merged"] = asdict(merged) | {"path": str(merged.path)}
        summary["statistics"] = _statistics(merged.path, tokenizer)
        summary["card"] = str(write_boosted(arguments, merged, text, vision))
    if arguments.json:
        print(json.dumps(summary))
    elif summary["merged"]:
        print(
            f"{merged.path}: {merged.rows} captions, {merged.conflicts} of them in conflict with their BlendCap; "
            f"{merged.quarantined} rows in quarantine."
        )
