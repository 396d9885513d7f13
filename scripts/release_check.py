"""Builds the wheel and the sdist, and tests them without the source tree: `make release-check`.

The archives go to outputs/release/. Each is installed into a fresh environment, in which the tokenizer class of every checkpoint of the
pages must load (`load_tokenizers.py`). In an empty folder, `captionrl` captions images of the embedded world, SMILE
trains two steps, and the saved model writes captions. The packages come from constraints.txt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "outputs" / "release"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "OMP_NUM_THREADS": "2"}

REQUIRED = """hf_captionrl/py.typed
hf_captionrl/evaluation/templates/gallery.html
hf_captionrl/scenes/checkpoints/blip-mle/model.safetensors
recipes/smile_blip.py
examples/smile_in_one_file.py
recipes/accelerate/
recipes/configs/smile_blip/scenes.yaml
hub_cards/model.md
LICENSE
NOTICE""".split()
"""Parts of paths that both archives must contain."""


def run(*command: str | os.PathLike[str], cwd: Path = ROOT) -> str:
    """Standard output of a command that must succeed; the package comes from the environment of that command."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment | OFFLINE, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout)
        done.check_returncode()
    return done.stdout


def check_contents(archive: Path) -> list[str]:
    """Paths of `REQUIRED` that an archive lacks, and paths that it must not contain."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = wheel.namelist()
    else:
        with tarfile.open(archive) as sdist:
            names = sdist.getnames()
    faults = [f"{archive.name} lacks {part}." for part in REQUIRED if not any(part in name for name in names)]
    unwanted = [name for name in names if "__pycache__" in name or "/outputs/" in name or "/.venv/" in name]
    return faults + [f"{archive.name} holds {name}." for name in unwanted]


def try_out(archive: Path, folder: Path) -> None:
    """Install an archive into a fresh environment, and use it from an empty folder."""
    environment, work = folder / "venv", folder / "work"
    work.mkdir(parents=True)
    run(sys.executable, "-m", "venv", environment)
    python, captionrl = environment / "bin" / "python", environment / "bin" / "captionrl"
    uv = Path(sys.executable).with_name("uv")
    installer: list[str | Path] = (
        [uv, "pip", "install", "--python", python] if uv.is_file() else [python, "-m", "pip", "install"]
    )
    run(*installer, "--quiet", "--constraint", ROOT / "constraints.txt", archive)
    home = run(python, "-c", "import hf_captionrl; print(hf_captionrl.__file__)", cwd=work).strip()
    if not Path(home).is_relative_to(environment):
        raise SystemExit(f"The package was imported from {home}, not from the fresh environment.")
    run(python, ROOT / "scripts" / "load_tokenizers.py", cwd=work)
    for command in ("--help", "train --help", "env --help"):
        run(captionrl, *command.split(), cwd=work)
    few = ("--dataset", "scenes", "--max_images", "4", "--output")
    run(captionrl, "caption", "scenes:blip-mle", *few, "start.jsonl", cwd=work)
    trained = "--max_steps 2 --max_train_images 16 --max_eval_images 8 --max_test_images 8 --compare_mle_weights 1.0"
    run(captionrl, "train", "smile", *trained.split(), "--output_dir", "run", cwd=work)
    run(captionrl, "caption", "run/model", *few, "trained.jsonl", cwd=work)
    lines = [json.loads(line) for line in (work / "trained.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(lines) != 4 or not all(line["caption"].strip() for line in lines):
        raise SystemExit(f"The trained model wrote {lines}, not four captions.")


def main() -> int:
    """Build the sdist, and the wheel from it; inspect, install and use both. 1 if something is missing."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    run(sys.executable, "-m", "build", "--installer", "uv" if shutil.which("uv") else "pip", "--outdir", OUTPUT)
    archives = [*OUTPUT.glob("*.whl"), *OUTPUT.glob("*.tar.gz")]
    faults = [fault for archive in archives for fault in check_contents(archive)]
    if faults:
        print(*faults, sep="\n")
        return 1
    for archive in archives:
        with tempfile.TemporaryDirectory() as folder:
            try_out(archive, Path(folder))
        print(f"{archive.name} works.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
