"""Faults of what is not training: caches, pushes, actors of a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from tests.data.photos import png
from tests.faults.campaign import Trial, area, damage
from tests.faults.jobs import KEYS


def numbered_images(folder):
    """A folder of small images named by `KEYS`."""
    images = folder / "images"
    images.mkdir(parents=True)
    for number, key in enumerate(KEYS):
        (images / f"{key}.png").write_bytes(png(number))
    return images


def killed_cache(warm_process, folder, rng, kills) -> Iterator[Trial]:
    """Kill the same filling of a pixel cache again and again; what was cached stays, and the last one finishes."""
    images = str(numbered_images(folder))
    warm_process.warm("cached", folder=str(folder / "warm"), images=images)
    whole = warm_process.run("cache", folder=str(folder / "whole"), asked=str(folder / "all"), at=0, images=images)
    assert whole.code == 0, whole.output
    store, asked = folder / "store", folder / "asked"
    there: list[str] = []
    for number in range(kills):
        # A later run has less to do: at most what is left of the calls, or the moment would lie behind its end.
        left = whole.value["calls"] * (len(KEYS) - len(there)) // len(KEYS) if number else whole.value["calls"]
        paid = len(asked.read_text().split()) if asked.exists() else 0
        # Threads do not make the same calls in each run.
        at = rng.randint(1, max(1, left * 9 // 10))
        killed = warm_process.run("cache", folder=str(store), asked=str(asked), at=at, images=images)
        assert killed.killed, killed.output
        found = warm_process.run("cached", folder=str(store), images=images).value
        lost = len(set(there) - set(found["keys"]))
        computed = [KEYS[int(row)] for row in asked.read_text().split()[paid:]] if asked.exists() else []
        repeated = len(set(computed) & set(there))
        there = found["keys"]
        yield Trial(found["right"] and not lost and not repeated, lost, repeated, killed.output[-300:])
    last = warm_process.run("cache", folder=str(store), asked=str(asked), images=images)
    assert last.code == 0, last.output
    found = warm_process.run("cached", folder=str(store), images=images).value
    assert found["keys"] == KEYS
    assert found["right"]


@area("pixels")
def corrupted_pixels(warm_process, folder, rng, kills):
    """A file of the pixel cache, exact or as JPEGs, is damaged: filling it again makes what is missing, and every row is right."""
    images = str(numbered_images(folder))
    for number in range(kills):
        more = {"images": images, "form": ("uint8", "jpeg")[number % 2]}
        store, asked = folder / f"cache-{number}", folder / f"asked-{number}"
        made = warm_process.run("cache", folder=str(store), asked=str(folder / f"all-{number}"), **more)
        assert made.code == 0, made.output
        files = sorted(p for p in store.rglob("*") if p.stat().st_size and p.suffix in (".bin", ".sqlite"))
        done = damage(rng.choice(files), rng)
        again = warm_process.run("cache", folder=str(store), asked=str(asked), **more)
        found = warm_process.run("cached", folder=str(store), **more)
        right = again.code == 0 and found.code == 0 and found.value["right"] and found.value["keys"] == KEYS
        repeated = len(set(asked.read_text().split())) if asked.exists() else 0
        yield Trial(right, 0, repeated, "" if right else f"{done}: {again.output[-300:]} {found.output[-300:]}")


@area("push")
def push(warm_process, folder, rng, kills):
    """Kill -9 while a model is pushed."""
    from hf_captionrl.hub import folder_contents
    from tests.hub.folders import publishable
    from tests.hub.server import HubServer

    source = publishable(folder / "source")
    with HubServer() as hub:
        shutil.copytree(source, folder / "whole")
        shutil.copytree(source, folder / "warm")
        warm_process.warm("push", folder=str(folder / "warm"), url=hub.url)
    with HubServer() as hub:
        whole = warm_process.run("push", folder=str(folder / "whole"), url=hub.url, at=0)
        assert whole.code == 0, whole.output
    for number in range(kills):
        with HubServer() as hub:
            run = folder / f"run-{number}"
            shutil.copytree(source, run)
            weights = (run / "model.safetensors").read_bytes()
            # Threads do not make the same calls in each run, so not the last tenth.
            at = rng.randint(1, whole.value["calls"] * 9 // 10)
            killed = warm_process.run("push", folder=str(run), url=hub.url, at=at)
            assert killed.killed, killed.output
            again = warm_process.run("push", folder=str(run), url=hub.url)
            files = hub.repo("tester/smile").files if hub.repos else {}
            published = folder_contents(run).published
            lost = sum(files.get(name) != (run / name).read_bytes() for name in published)
            # A commit holds all files or none; that of a push that was killed is not made a second time.
            commits = list(hub.repo("tester/smile").commits.values()) if hub.repos else []
            halves = [c for c in commits if 1 < len(c.files) < len(published)]
            repeated = max(0, len(commits) - 3)
            fine = again.code == 0 and not halves and (run / "model.safetensors").read_bytes() == weights
            yield Trial(fine and not lost and not repeated, lost, repeated, "" if fine else again.output[-400:])
            shutil.rmtree(run)
