"""Builds the wheel and the sdist, and tests them without the source tree: `make release-check`.

    python scripts/release_check.py                        # both; the files go to outputs/release/
    python scripts/release_check.py --only wheel           # one of them

Each is installed into a fresh environment. In an empty folder, `captionrl` captions images of the embedded world, SMILE
trains two steps, and the saved model writes captions. The packages come from constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "OMP_NUM_THREADS": "2"}

REQUIRED = (
    "hf_captionrl/py.typed",
    "hf_captionrl/evaluation/templates/gallery.html",
    "hf_captionrl/scenes/checkpoints/blip-mle/model.safetensors",
    "recipes/smile_blip.py",
    "recipes/accelerate/",
    "recipes/configs/smile_blip/scenes.yaml",
    "hub_cards/model.md",
    "LICENSE",
    "NOTICE",
)
"""Parts of paths that both archives must contain."""


def _run(command: Sequence[str | os.PathLike[str]], *, cwd: Path = ROOT, offline: bool = False) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if offline:
        environment |= OFFLINE
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise SystemExit(f"{' '.join(map(str, command))}\nfailed with exit code {done.returncode}:\n{end}")
    return done.stdout


def build(folder: Path) -> dict[str, Path]:
    """Build the sdist, and the wheel from the sdist. Returns their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "build", "--installer", "uv" if shutil.which("uv") else "pip", "--outdir", folder])
    return {"sdist": next(folder.glob("*.tar.gz")), "wheel": next(folder.glob("*.whl"))}


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


def try_out(archive: Path, folder: Path) -> dict[str, float]:
    """Install an archive into a fresh environment, and use it from an empty folder. Returns seconds of each part."""
    environment, work = folder / "venv", folder / "work"
    work.mkdir(parents=True)
    seconds: dict[str, float] = {}

    def timed(name: str, *command: str | os.PathLike[str], offline: bool = True) -> str:
        started = time.monotonic()
        said = _run(command, cwd=work, offline=offline)
        seconds[name] = round(time.monotonic() - started, 1)
        return said

    _run([sys.executable, "-m", "venv", environment])
    binaries = environment / ("Scripts" if os.name == "nt" else "bin")
    python = binaries / "python"
    pins = ["--constraint", str(ROOT / "constraints.txt"), str(archive)]
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    installer = [uv, "pip", "install", "--quiet", "--python"] if uv else []
    installer += [str(python)] if uv else [str(python), "-m", "pip", "install", "--quiet"]
    timed("install", *installer, *pins, offline=False)
    home = timed("import", python, "-c", "import hf_captionrl; print(hf_captionrl.__file__)").strip()
    if not Path(home).is_relative_to(environment):
        raise SystemExit(f"The package was imported from {home}, not from the fresh environment.")
    captionrl = binaries / "captionrl"
    for command in ("--help", "train --help", "doctor --help"):
        timed(f"captionrl {command}", captionrl, *command.split())
    few = ["--dataset", "scenes", "--max_images", "4", "--output"]
    timed("caption", captionrl, "caption", "scenes:blip-mle", *few, "start.jsonl")
    trained = ["--max_steps", "2", "--max_train_images", "16", "--max_eval_images", "8", "--max_test_images", "8"]
    timed("train", captionrl, "train", "smile", *trained, "--compare_mle_weights", "1.0", "--output_dir", "run")
    timed("caption the trained model", captionrl, "caption", "run/model", *few, "trained.jsonl")
    lines = [json.loads(line) for line in (work / "trained.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(lines) != 4 or not all(line["caption"].strip() for line in lines):
        raise SystemExit(f"The trained model wrote {lines}, not four captions.")
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Build, inspect, install and use the archives; 1 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("wheel", "sdist"), help="try only one of the two")
    parser.add_argument(
        "--output_dir", type=Path, default=ROOT / "outputs" / "release", help="folder for the archives"
    )
    arguments = parser.parse_args(argv)
    archives = build(arguments.output_dir.resolve())
    faults = [fault for archive in archives.values() for fault in check_contents(archive)]
    for fault in faults:
        print(fault)
    if faults:
        return 1
    for kind, archive in archives.items():
        if arguments.only in (None, kind):
            with tempfile.TemporaryDirectory() as folder:
                seconds = try_out(archive, Path(folder))
            print(f"{archive.name}: " + ", ".join(f"{name} {value} s" for name, value in seconds.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
