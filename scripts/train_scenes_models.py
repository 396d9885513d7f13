"""Train the shipped models of the embedded world from scratch, on one machine without a network.

    python scripts/train_scenes_models.py reward-scorer --seed 1
    python scripts/train_scenes_models.py held-out-scorer --seed 2
    python scripts/train_scenes_models.py language-model --seed 3
    python scripts/train_scenes_models.py captioner --seed 4
    python scripts/train_scenes_models.py clipcap --seed 5
    python scripts/train_scenes_models.py adapter --name blip-smile --seed 6
    python scripts/train_scenes_models.py adapter --name blip-sr --seed 7
    python scripts/train_scenes_models.py measure --name blip-mle

A contrastive loss alone learns this world slowly. Every vision tower therefore first learns the facts with linear
heads, which are discarded. Each stage appends to `training_log.json` beside the checkpoints.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from scripts.scenes_models.adapters import ADAPTERS, train_adapter
from scripts.scenes_models.captioners import train_captioner, train_clipcap
from scripts.scenes_models.parts import CHECKPOINTS
from scripts.scenes_models.records import append_log, measure, write_card
from scripts.scenes_models.scorers import train_held_out_scorer, train_language_model, train_reward_scorer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "stage",
        choices=["reward-scorer", "held-out-scorer", "language-model", "captioner", "clipcap", "adapter", "measure"],
    )
    parser.add_argument("--name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fact_steps", type=int, default=2500)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    if args.stage in ("measure", "adapter") and not args.name:
        parser.error("--name is missing: the folder of the checkpoint.")  # checked before training
    torch.set_num_threads(1)  # enough for these models, and results do not depend on the number of cores
    if args.stage == "measure":
        file = CHECKPOINTS / "training_log.json"
        log = next(entry for entry in json.loads(file.read_text()) if entry["name"] == args.name)
        log["measured"] = {key: round(value, 4) for key, value in measure(args.name).items()}
        append_log(log)
        write_card(log)
        print(json.dumps(log["measured"], indent=2))
        return
    if args.stage == "reward-scorer":
        log = train_reward_scorer(args.name or "clip-reward", args.seed, args.fact_steps, args.steps or 1000)
    elif args.stage == "held-out-scorer":
        log = train_held_out_scorer(args.name or "siglip-held-out", args.seed, args.fact_steps, args.steps or 2500)
    elif args.stage == "captioner":
        log = train_captioner(args.name or "blip-mle", args.seed, args.fact_steps, args.steps or 3000)
    elif args.stage == "adapter":
        if args.name not in ADAPTERS:
            parser.error(f"--name is {args.name!r}; the adapters are {sorted(ADAPTERS)}.")
        log = train_adapter(args.name, args.seed, CHECKPOINTS)
    elif args.stage == "clipcap":
        log = train_clipcap(args.name or "clipcap-mle", args.seed, "clip-reward", args.steps or 2000)
    else:
        log = train_language_model(args.name or "gpt2-perplexity", args.seed, args.steps or 600)
    log["command"] = "python scripts/train_scenes_models.py " + " ".join(sys.argv[1:])
    append_log(log)  # a measurement that fails costs no training
    log["measured"] = {key: round(value, 4) for key, value in measure(log["name"]).items()}
    append_log(log)
    write_card(log)
    print(json.dumps(log, indent=2))


if __name__ == "__main__":
    main()
