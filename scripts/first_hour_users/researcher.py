"""A researcher with a Karpathy-split file: SMILE by the recipe, captions of every split, the table of a paper."""

from __future__ import annotations

from typing import Any

from hf_captionrl.scenes import load_scenes
from hf_captionrl.utils.io import write_json
from scripts.first_hour_users.session import Session

SPLITS = {"train": 32, "restval": 8, "val": 10, "test": 12}


def make_karpathy_split(session: Session) -> None:
    """Write images, and a file as that of COCO's Karpathy split."""
    rows = load_scenes(num_train=sum(SPLITS.values()), num_validation=0, num_test=0)["train"]
    splits = [name for name, number in SPLITS.items() for _ in range(number)]
    images = []
    for number, (row, split) in enumerate(zip(rows, splits, strict=True)):
        folder = "val2014" if split in ("val", "test") else "train2014"
        name = f"COCO_{folder}_{number:012d}.png"
        path = session.path(f"coco/{folder}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        row["image"].save(path)
        sentences: list[dict[str, Any]] = [
            {"raw": text, "tokens": text.lower().split(), "imgid": number, "sentid": 5 * number + i}
            for i, text in enumerate(row["captions"])
        ]
        images.append(
            {
                "filepath": folder,
                "filename": name,
                "split": split,
                "cocoid": 1000 + number,
                "imgid": number,
                "sentids": [sentence["sentid"] for sentence in sentences],
                "sentences": sentences,
            }
        )
    write_json(session.path("dataset_coco.json"), {"images": images, "dataset": "coco"})


def play_researcher(session: Session) -> None:
    """Finetune, caption, compare; and what a wrong name and a second run do."""
    make_karpathy_split(session)
    data = "--dataset dataset_coco.json --image_root coco"
    recipe = (
        "captionrl train smile --model_name_or_path scenes:blip-mle --dataset_name dataset_coco.json --image_root coco "
        "--scorer_name_or_path scenes:clip-reward --held_out_scorer_name_or_path scenes:siglip-held-out --perplexity_name_or_path none "
        "--max_steps 4 --learning_rate 1e-3 --per_device_train_batch_size 8 --compare_mle_weights 1.0 --use_cpu "
        "--report_to none --disable_tqdm true --gallery_size 4 --output_dir outputs/smile"
    )
    output = session.run(recipe, max_lines=120)
    session.check("the traceback of a run that works", "Traceback" in output, False)
    results = session.read_json("outputs/smile/results.json")
    names = [row["name"] for row in results["rows"]]
    session.check(
        "rows of the table", names, lambda found: found[0] == "MLE" and found[-1] == "references", "MLE ... references"
    )
    shares = [row[key] for row in results["rows"] for key in ("pool_recall_at_1", "pool_recall_at_5")]
    session.check("recalls in [0, 1]", all(0 <= share <= 1 for share in shares), True)
    bounds = [row["pool_recall_at_1_ci"] for row in results["rows"]]
    session.check(
        "every recall of 12 images has an interval with a width", all(low < high for low, high in bounds), True
    )
    for name in ("results.md", "gallery.html", "curves.png", "model/model.safetensors", "model/README.md"):
        size = session.path(f"outputs/smile/{name}").stat().st_size
        session.check(f"bytes of {name}", size, lambda found: found > 200, "more than 200")
    for model, file in (("scenes:blip-mle", "mle.jsonl"), ("outputs/smile/model", "smile.jsonl")):
        output = session.run(f"captionrl caption {model} {data} --output {file}", max_lines=8)
        session.check_says(output, f"captions of {SPLITS['test']} of {SPLITS['test']} images")
        session.check_captions(file, SPLITS["test"])
    for split, number in (("train", 40), ("validation+test", 22), ("all", 62)):
        file = f"{split.replace('+', '-')}.jsonl"
        output = session.run(f"captionrl caption scenes:blip-mle {data} --split {split} --output {file}", max_lines=8)
        session.check_says(output, f"captions of {number} of {number} images")
        session.check_captions(file, number)
    session.run(
        f"captionrl evaluate --captions mle.jsonl smile.jsonl {data} --suite smile --scorer scenes:siglip-held-out "
        "--language_model none --output_dir outputs/evaluate",
        max_lines=60,
    )
    table = session.path("outputs/evaluate/comparison.md").read_text(encoding="utf-8")
    session.check("captioners in the comparison", all(name in table for name in ("mle", "smile", "references")), True)
    session.check("a share of 12 images with an interval of no width", "±0.000" in table, False)
    session.run(
        f"captionrl gallery --captions mle.jsonl smile.jsonl {data} --scorer scenes:siglip-held-out --output_dir outputs/gallery",
        max_lines=20,
    )
    pages = sorted(path.name for path in session.path("outputs/gallery").glob("*.html"))
    session.check("pages of the gallery", pages, bool, "at least one")
    typo = session.run(recipe.replace("image_root coco ", "image_root koko "), code=2)
    told = [line for line in typo.splitlines() if line.strip()]
    session.check("a wrong folder is answered in", len(told), lambda lines: lines <= 5, "at most 5 lines")
    session.check_says(typo, "koko")
