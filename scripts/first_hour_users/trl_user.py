"""A user of TRL: a raw `datasets.Dataset`, a reward function with TRL's signature, arguments mostly default."""

from __future__ import annotations

from scripts.first_hour_users.session import Session


def check_published(session: Session, folder: str, *weights: str) -> None:
    """Write the card of what a program saved, and see what a push would send."""
    session.run(f"captionrl card {folder}", max_lines=12)
    card = session.path(f"{folder}/README.md").read_text(encoding="utf-8")
    session.check("the card is a model's", card.startswith("---\n"), True)
    session.check("paths of this machine in the card", str(session.folder) in card, False)
    output = session.run(f"captionrl push {folder} --repo_id me/captioner --dry_run", max_lines=60)
    sent = [line[2:] for line in output.splitlines() if line.startswith("+ ")]
    session.check(
        "a push would send",
        sent,
        lambda found: {"README.md", *weights} <= set(found),
        f"README.md {' '.join(weights)}",
    )
    kept = ("checkpoint-", ".run.json", "trainer_state.json", "gallery", "optimizer", "training_args")
    session.check("what stays here", [name for name in sent if any(part in name for part in kept)], [])


def play_trl_user(session: Session) -> None:
    """Run the program, look at what it trained, use what it saved."""
    session.take_program("trl_program.py")
    output = session.run("python trl_program.py", max_lines=150)
    session.check("the traceback of a run that works", "Traceback" in output, False)
    found = session.read_json("found.json")
    session.check("the folder of a trainer without args", found["default_folder"], bool, "a name")
    session.check("share of changed weights", found["changed"], lambda share: share > 0.5, "more than 0.5")
    session.check("dtypes of trainable weights", found["dtypes"], ["torch.float32"])
    session.check("calls of the reward function", found["calls"], lambda calls: calls >= 3, "one for each step")
    session.check("completions of a call", found["completions"], found["expected"])
    session.check("columns repeated for each completion", found["columns"], found["expected"])
    session.check("captions beside those of their images", found["matched"], True)
    logged = sorted(found["logged"])
    session.check("the reward in the log", [key for key in logged if "brevity" in key], bool, "a key with its name")
    session.check("steps", found["steps"], 3)
    output = session.run(
        "captionrl caption outputs/sr --dataset imagefolder --data_dir photos --output captions.jsonl", max_lines=8
    )
    session.check_says(output, "captions of 8 of 8 images")
    session.check_captions("captions.jsonl", 8)
    check_published(session, "outputs/sr", "model.safetensors")
