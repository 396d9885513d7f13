"""Run in a new process and folder: loads models from the Hub and prints their captions. Arguments are JSON on stdin."""

import json
import sys


def main():
    asked = json.load(sys.stdin)
    if asked.get("without_package"):
        sys.modules["hf_captionrl"] = None  # as if it were not installed
    found = {}
    for name, revision in asked["captioners"].items():
        found[name] = captions(name, revision, asked)
    for name, revision in asked["pipelines"].items():
        try:
            found[f"pipeline {name}"] = pipeline(name, revision, asked)
        except ValueError as error:
            found[f"pipeline {name}"] = f"refused: {error}"
    for name in asked["cards"]:
        found[f"card {name}"] = printed_code(name, asked)
    print("\nFOUND " + json.dumps(found))


def captions(name, revision, asked):
    import torch

    from hf_captionrl.captioners import load_captioner

    captioner = load_captioner(name, revision=revision, dtype=torch.float32)
    images = opened(asked)
    return captioner.generate(**captioner.encode_images(images), **asked["generation"]).captions


def pipeline(name, revision, asked):
    """The pipeline of transformers; ClipCap needs the package to be imported first."""
    if not asked.get("without_package"):
        import hf_captionrl  # noqa: F401
    from transformers import pipeline as transformers_pipeline

    pipe = transformers_pipeline("image-text-to-text", model=name, revision=revision, device="cpu")
    out = []
    for image in opened(asked):
        (said,) = pipe(images=image, text=asked["prompt"], return_full_text=False, generate_kwargs=asked["generation"])
        out.append(said["generated_text"])
    return out


def printed_code(name, asked):
    """Output of the code blocks of a card, executed in a folder with a photo."""
    import contextlib
    import io
    import re
    import shutil
    from pathlib import Path

    from huggingface_hub import hf_hub_download

    shutil.copyfile(asked["photo"], "photo.jpg")
    card = Path(hf_hub_download(name, "README.md")).read_text(encoding="utf-8")
    said = []
    for code in re.findall(r"```python\n(.*?)\n```", card, re.DOTALL):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, name, "exec"), {})
        said.append(out.getvalue().strip())
    return said


def opened(asked):
    from PIL import Image

    return [Image.open(path).convert("RGB") for path in asked["images"]]


if __name__ == "__main__":
    main()
