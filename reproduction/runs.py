"""Runs of the embedded world: what is finished, what is left, and how a killed one resumes.

A run's folder is named by what it does (commands, versions of package and world), so that what a kill left in it is of the same run,
and a change of either begins anew. Each step that ended well leaves a marker there.
"""

from __future__ import annotations

import graphlib
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_captionrl.apps.experiments.arguments import load_row, read_yaml
from hf_captionrl.utils.io import installed_versions, write_json
from reproduction import RESULTS, ROOT
from reproduction.measurements import look_up
from reproduction.run_seeds import aggregate, aggregate_curves, collapsed

CONFIGS = ROOT / "recipes" / "configs"
_DIGESTS = RESULTS / "scenes_digests.json"
_EACH = "for each seed s: "

Caller = Callable[..., int]


class UnreachedError(Exception):
    """A learning curve does not reach a number of another result."""


# --- the settings of a result: a digest per preset, to see that a preset changed afterwards ------------------------

UNKNOWN = "unknown"
IGNORED = {"title", "output_dir", "paper", "learning_curves", "gallery_size", "disable_tqdm", "logging_steps"}
IGNORED |= {"dataloader_pin_memory", "per_device_eval_batch_size", "model_license"}
"""Settings that change no number of a result; `paper` and `learning_curves` add some."""


def presets_of(preset: str, *commands: str) -> list[str]:
    """The presets of a run: its own and those that its commands name; none of a command that has no preset."""
    named = [preset] if "/" in preset else []
    for command in commands:
        named += re.findall(r"--row ([\w./-]+)", command)
        named += re.findall(r"--config recipes/configs/([\w/-]+)\.yaml", command)
    return list(dict.fromkeys(named))


def settings_in(configs: Path, preset: str) -> dict[str, Any]:
    """The settings of a preset in a folder of configurations."""
    base = configs / f"{preset}.yaml"
    return read_yaml(base) if base.is_file() else load_row(configs, preset).settings


_BEFORE: dict[str, dict[str, Any]] = {
    "claim_f1=1": {"claim_f1_weight": 1.0},
    "claim_f1:credit=claim=1": {"claim_f1_weight": 1.0, "claim_credit": "claim"},
    "claim_f1:credit=caption=1": {"claim_credit": "caption"},
}
"""Settings under the names that they had when the committed results were made, by the words of `rewards`."""


def under_former_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the names of options as the committed results recorded them."""
    names: dict[str, Any] = {
        key: under_former_names(value) if isinstance(value, Mapping) else value for key, value in settings.items()
    }
    for reward in names.pop("rewards", ()):
        names |= _BEFORE.get(reward, {"rewards": reward})
    return names


def digest(settings: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of the settings that matter to a result, in any order."""
    counted = {key: value for key, value in under_former_names(settings).items() if key not in IGNORED}
    if counted.get("compare_mle_weights") == [1.0, 0.01]:  # the default before presets named it
        del counted["compare_mle_weights"]
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def digests(presets: list[str], configs: Path) -> dict[str, str]:
    """The digest of each preset, for a result's key `settings`."""
    return {preset: digest(settings_in(configs, preset)) for preset in presets}


def changed(record: Mapping[str, Any], presets: list[str], configs: Path) -> dict[str, str]:
    """Presets of a result that are not as they were: "stale", or "unknown" where the result does not say."""
    made = record.get("settings", {})
    now = digests(presets, configs)
    return {
        preset: UNKNOWN if made.get(preset, UNKNOWN) == UNKNOWN else "stale"
        for preset in presets
        if made.get(preset) != now[preset]
    }


# --- runs -----------------------------------------------------------------------------------------------------------


def world_version() -> str:
    """The version of the embedded world, of which reproduction/results has the digests."""
    return str(json.loads(_DIGESTS.read_text(encoding="utf-8"))["world_version"])


def of_older_world(*records: Mapping[str, Any]) -> str:
    """A note on results of an older version of the embedded world; empty if there are none. Version 1 was not recorded."""
    versions = sorted({str(record.get("world", "1")) for record in records} - {world_version()})
    return f" (version {', '.join(versions)} of the world)" if versions else ""


@dataclass(frozen=True)
class Run:
    """A run of reproduction/paper_index.yaml; its keys are described there."""

    name: str  # its result is NAME.json
    preset: str
    minutes: int  # how long it takes on two busy cores
    seeds: Sequence[int] = ()  # those of the committed result
    command: str = ""  # what the result records
    steps: Sequence[str] = ()  # what is run instead of the command
    # Where the steps' rows stand: the result's row to its folder and which of its rows.
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Rows that are their learning curve where it reaches a number of another result: that run, and the place there.
    until: Mapping[str, Sequence[str]] = field(default_factory=dict)
    after: Sequence[str] = ()  # runs whose folders or results it reads
    needs: Sequence[str] = ()
    # Rows of the result that stand on docs/leaderboard.md, with their titles there.
    leaderboard: Mapping[str, str] = field(default_factory=dict)

    @property
    def presets(self) -> list[str]:
        """All presets that it runs, its own first."""
        return presets_of(self.preset, self.command, *self.steps)

    def changed(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Presets that are not as they were when a result was made: "stale" or "unknown"."""
        return changed(record, self.presets, CONFIGS)

    def recorded(self, seeds: Sequence[int], output: str) -> str | list[str]:
        """What a finished result has under `command` or `commands`."""
        return self._filled(self.command, seeds, output) if self.command else list(self.steps)

    def _filled(self, text: str, seeds: Sequence[int], output: str) -> str:
        return text.replace("{seeds}", " ".join(map(str, seeds))).replace("{output}", output)

    def folder(self, runs_dir: Path) -> Path:
        """Where its models and markers go."""
        text = json.dumps([self.command, list(self.steps), version("hf_captionrl"), world_version()])
        return runs_dir / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def commands(
        self, seeds: Sequence[int], output: str, runs_dir: Path, others: Mapping[str, Run]
    ) -> list[tuple[str, str]]:
        """What is executed, one after the other: name of the marker, and the command."""
        found = []
        for number, step in enumerate(self.steps or [self.command]):
            text = self._filled(step, seeds, output).replace("{folder}", str(self.folder(runs_dir)))
            for name in self.after:
                text = text.replace(f"{{folder:{name}}}", str(others[name].folder(runs_dir)))
            if text.startswith(_EACH):
                text = text.removeprefix(_EACH)
                for seed in seeds:
                    of_seed = text.replace("--seed s", f"--seed {seed}").replace("seed-s", f"seed-{seed}")
                    found.append((f"step-{number}-seed-{seed}", of_seed))
            else:
                found.append((f"step-{number}-{'-'.join(map(str, seeds))}", text))
        return found


def processor_name() -> str:
    """Name of the processor, or its architecture if the system does not tell the name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def hardware() -> str:
    """Processor with the vector instructions and threads that torch uses, on which the last digits depend; GPU if there is one."""
    import torch

    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    return ", ".join([processor_name(), torch.backends.cpu.get_cpu_capability(), threads, *gpu])


PLACES = {"--output", "--output_dir", "--runs_dir"}
"""Options that say where a result goes, not what it is."""


def made_by(commands: str | Sequence[str]) -> list[tuple[str, list[list[str]]]]:
    """What commands do, wherever their programs and results lie: names of programs, and options with their values in any order."""
    made = []
    for command in [commands] if isinstance(commands, str) else commands:
        prefix, _, text = command.rpartition(_EACH)
        start, *options = re.split(r" (?=--\w)| (?=-- )", text)
        words = list(map(str.split, options))
        program = " ".join(Path(word).name if word.endswith(".py") else word for word in start.split())
        made.append((prefix + _EACH + program, sorted(option for option in words if option[0] not in PLACES)))
    return made


def finished(run: Run, seeds: Sequence[int], output: Path) -> dict[str, Any] | None:
    """The result of a run, if these seeds and the settings of this run made it; `changed` compares those of its presets.

    A result that names no command was made before these were recorded, and counts.
    """
    path = output / f"{run.name}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    now = run.recorded(seeds, said_of(path.with_suffix("")))
    then = record.get("command", record.get("commands", now))
    return record if list(record.get("seeds", ())) == list(seeds) and made_by(then) == made_by(now) else None


def to_run(run: Run, seeds: Sequence[int], output: Path) -> bool:
    """Whether a run has no result yet, or one of an older version of the embedded world or of a preset."""
    record = finished(run, seeds, output)
    if record is None or of_older_world(record) or moved_targets(run, record, output):
        return True
    return "stale" in run.changed(record).values()


def moved_targets(run: Run, record: Mapping[str, Any], output: Path) -> list[str]:
    """Rows that are where their curve reaches a number of another result that has changed since."""
    moved = []
    for title, (name, place) in run.until.items():
        if (output / f"{name}.json").exists():
            targets = by_seed(output, name, place)
            now = [targets[seed][1] for seed in record.get("seeds", ()) if seed in targets]
            moved += [title] * (record.get("until", {}).get(title) != now)
    return moved


def words_of(command: str) -> list[str]:
    """A command as this process can start it."""
    words = shlex.split(command)
    if words[0] == "captionrl":
        return [sys.executable, "-m", "hf_captionrl.cli", *words[1:]]
    if words[:2] == ["accelerate", "launch"]:
        return [sys.executable, "-m", "accelerate.commands.launch", *words[2:]]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def call(words: Sequence[str], folder: Path = ROOT) -> int:
    """Run a command."""
    return subprocess.run(list(words), cwd=folder, check=False).returncode


def said_of(place: Path) -> str:
    """A result's place as a command says it, in this project from its root."""
    return (place.relative_to(ROOT) if place.is_relative_to(ROOT) else place).as_posix()


def execute(
    run: Run,
    seeds: Sequence[int],
    *,
    output: Path,
    runs_dir: Path,
    others: Mapping[str, Run],
    caller: Caller = call,
    told: Callable[[str], None] = print,
) -> str | None:
    """Do what is left of a run and write its result."""
    missing = [program for program in run.needs if shutil.which(program) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    unknown = [name for name, _ in run.until.values() if not (output / f"{name}.json").exists()]
    if unknown:
        return f"needs the results of {', '.join(dict.fromkeys(unknown))}"
    folder = run.folder(runs_dir)
    place = output / run.name
    name = said_of(place)
    commands = run.commands(seeds, name, runs_dir, others)
    for marker, command in commands:
        done = folder / f"{marker}.json"
        # Where no rows are put together, the last command writes the result, and nothing else says that it is there.
        if done.exists() and (run.rows or marker != commands[-1][0]):
            told(f"{run.name}: {marker} is done")
            continue
        told(f"{run.name}: {command}")
        words = words_of(command)
        if "reproduction/run_seeds.py" in command:  # which does not name the folder
            at = words.index("--") if "--" in words else len(words)
            words[at:at] = ["--runs_dir", str(folder)]
        start = time.monotonic()
        code, places = caller(words), dict(itertools.pairwise(words))
        if code and not ("--output_dir" in places and collapsed(ROOT / places["--output_dir"])):
            return f"exit code {code} of `{command}`"
        write_json(done, {"command": command, "seconds": time.monotonic() - start, "versions": installed_versions()})
    try:
        complete(run, seeds, place.with_suffix(".json"), name, folder)
    except UnreachedError as error:
        return str(error)
    return None


def in_order(needs: Mapping[str, Collection[str]], work: Callable[[str], None], processes: int) -> None:
    """Call `work` for each name, at most `processes` at a time and after those of the names that it needs."""
    order = graphlib.TopologicalSorter({name: [o for o in others if o in needs] for name, others in needs.items()})
    order.prepare()
    running: dict[Future[None], str] = {}
    with ThreadPoolExecutor(processes) as pool:
        while order.is_active():
            running |= {pool.submit(work, name): name for name in order.get_ready()}
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                done.result()
                order.done(running.pop(done))


def complete(run: Run, seeds: Sequence[int], path: Path, name: str, folder: Path) -> None:
    """Put rows together where the steps do not, and say what made the result."""
    if run.rows:
        places = {t: (ROOT / where.replace("{folder}", str(folder)), which) for t, (where, which) in run.rows.items()}
        targets = {title: by_seed(path.parent, *number) for title, number in run.until.items()}

        def row(title: str, seed: int) -> dict[str, Any]:
            if title in targets:
                return reached(title, *places[title], seed, targets[title])
            place, which = places[title]
            return {**look_up(which, _results_of(place, seed)), "name": title}

        runs = [[row(title, seed) for title in places] for seed in seeds]
        record: dict[str, Any] = {"commands": list(run.steps), "rows": aggregate(runs)}
        curves = [{title: _curve(*place, seed) for title, place in places.items()} for seed in seeds]
        if any(curves[0].values()):
            record["learning_curves"] = aggregate_curves(curves)
        made = {
            _results_of(place, seed).get("versions", {}).get("git_revision")
            for place, _ in places.values()
            for seed in seeds
        }
        record["revisions"] = sorted(made - {None})  # that of this process is the collector's
        if targets:
            record["until"] = {title: [of_seed[seed][1] for seed in seeds] for title, of_seed in targets.items()}
    else:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["command"] = run.recorded(seeds, name)
    if run.seeds:
        record["seeds"] = list(seeds)
    record.setdefault("versions", installed_versions())
    if run.presets:
        record["settings"] = digests(run.presets, CONFIGS)
    write_json(path, record | {"hardware": hardware(), "world": world_version()})


def _results_of(folder: Path, seed: int) -> dict[str, Any]:
    paths = [folder / f"seed-{seed}" / name for name in ("results.json", "comparison.json")]
    return json.loads(next(filter(Path.exists, paths), paths[0]).read_text(encoding="utf-8"))


def reached(
    title: str, folder: Path, which: str, seed: int, targets: Mapping[int, tuple[str, float]]
) -> dict[str, Any]:
    """The learning curve of a row where its key reaches the target of the seed, interpolated between two evaluations.

    If the run starts above the target, this is its first evaluation after the start: a captioner that was trained.
    """
    if seed not in targets:
        raise UnreachedError(f"{title}: the other result has no seed {seed}.")
    key, least = targets[seed]
    for before, after in itertools.pairwise(_curve(folder, which, seed)):
        if after[key] >= least:
            share = 1.0 if before[key] >= least else (least - before[key]) / (after[key] - before[key])
            return {"name": title, **{name: before[name] + share * (after[name] - before[name]) for name in after}}
    raise UnreachedError(f"{title}: {key} does not reach {least:.3f} with seed {seed}. Train for more steps.")


def by_seed(output: Path, name: str, place: str) -> dict[int, tuple[str, float]]:
    """A number of another result by seed, with its key."""
    record = json.loads((output / f"{name}.json").read_text(encoding="utf-8"))
    key = place.rpartition("/")[2]
    return {seed: (key, value) for seed, value in zip(record["seeds"], look_up(place, record)["values"], strict=True)}


def _curve(folder: Path, which: str, seed: int) -> list[dict[str, float]]:
    """The points of a row's learning curve; empty if the run has none."""
    record = _results_of(folder, seed)
    return record.get("learning_curves", {}).get(look_up(which, record)["name"], [])
