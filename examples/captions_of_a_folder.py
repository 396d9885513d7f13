"""Captions of all images of a folder, as lines of JSON; without a folder, of six scenes of the embedded world.

    python examples/captions_of_a_folder.py photos Salesforce/blip-image-captioning-base > captions.jsonl

`captionrl caption` does the same with many options, and resumes after a crash.
"""

import json
import sys
import tempfile
from pathlib import Path

from hf_captionrl import load_scenes, pipeline

KINDS = {".jpg", ".jpeg", ".png", ".webp"}


def captions_of(folder, model):
    """Pairs of a file and its caption; images are opened one batch at a time."""
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in KINDS)
    write = pipeline(model, num_beams=3, max_new_tokens=40)
    return zip(files, write([str(path) for path in files]), strict=True)


if __name__ == "__main__":
    folder, model = [*sys.argv[1:], "", ""][:2]
    with tempfile.TemporaryDirectory() as place:
        if not folder:
            for number, scene in enumerate(load_scenes(num_train=0, num_validation=0, num_test=6)["test"]):
                scene["image"].save(Path(place, f"{number}.png"))
        for path, caption in captions_of(folder or place, model or "scenes:blip-mle"):
            print(json.dumps({"file_name": path.relative_to(folder or place).as_posix(), "caption": caption}))
