"""Finetune a LLaMA on instructions with LoRA, with SMILE and with maximum likelihood, and compare the answers.

Without arguments, with a tiny LLaMA trained from scratch and the instructions of this package (2 minutes on 1 CPU core,
no network):

    accelerate launch recipes/smile_llama_lora.py

The experiment of the paper's appendix B, LLaMA-13B on Alpaca's 52,000 instructions, with a judge:

    accelerate launch recipes/smile_llama_lora.py --row smile/table7/5-epochs \
        --questions question.jsonl --reference_answers answer_gpt35.jsonl \
        --judge endpoint --judge_base_url http://localhost:8000/v1 --judge_model NAME

Source: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation",
section 6 and appendix B.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available

from hf_captionrl.apps.experiments.arguments import (
    ModelArguments,
    RecipeDefaults,
    describe,
    output_folder,
    parse_arguments,
    with_default,
)
from hf_captionrl.apps.experiments.report import (
    alone_in_folder,
    plan_runs,
    settings_of,
    train_or_resume,
)
from hf_captionrl.apps.instruct.instructions import TINY_LLAMA, format_prompt, load_instructions, tiny_llama
from hf_captionrl.apps.instruct.judges import (
    ANSWER_COLUMNS,
    TEXT_COLUMNS,
    JudgeArguments,
    Question,
    answer_questions,
    answer_row,
    load_questions,
    read_answers,
    write_answers,
)
from hf_captionrl.metrics.table import print_table, write_results
from hf_captionrl.trainers.trl_smile_sft import SCOPES, SmileSFTConfig, SmileSFTTrainer
from hf_captionrl.utils.console import run_main
from hf_captionrl.utils.io import folded
from hf_captionrl.utils.options import documented

__all__ = ["main", "parse_args"]

CONFIGS = Path(__file__).parent / "configs" / "smile_llama_lora"
DATA = Path(__file__).parent / "data"
SHIPPED = "shipped"


@dataclass
class LlamaArguments:
    """The language model and its LoRA."""

    model_name_or_path: str = documented(
        "meta-llama/Llama-3.2-1B",
        f"A folder, a name on the Hub, or {TINY_LLAMA!r}: a tiny one, trained from scratch.",
        aliases=["--model"],
    )
    model_revision: str | None = with_default(ModelArguments, "model_revision", None)
    dtype: str = documented("bfloat16", "Dtype of the frozen weights.")
    lora_r: int = with_default(ModelArguments, "lora_r", 8)
    lora_alpha: int = with_default(ModelArguments, "lora_alpha", 16)
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "v_proj"], metadata={"help": "Modules with a LoRA; lm_head is allowed."}
    )
    pretrain_epochs: float = documented(0.0, f"Epochs of maximum likelihood that pretrain {TINY_LLAMA!r}.")

    def __post_init__(self) -> None:
        if self.pretrain_epochs and self.model_name_or_path != TINY_LLAMA:
            raise ValueError(f"pretrain_epochs is for {TINY_LLAMA!r} only; {self.model_name_or_path!r} is trained.")


@dataclass
class InstructionArguments:
    """The instructions, and the runs to compare."""

    dataset_name: str = documented(
        "tatsu-lab/alpaca",
        f"JSON Lines or Parquet file, a name on the Hub, or {SHIPPED!r}.",
        aliases=["--dataset"],
    )
    max_train_rows: int | None = documented(None, "Maximum number of instructions.")
    compare_mle_weights: list[float] = field(
        default_factory=lambda: [1.0], metadata={"help": "Additional runs with these lambdas; 1 is the control, MLE."}
    )
    compare_scopes: list[str] = field(
        default_factory=list, metadata={"help": f"Additional runs with these subset scopes, of {', '.join(SCOPES)}."}
    )


@dataclass
class SmileLlamaConfig(RecipeDefaults, SmileSFTConfig):
    """[`SmileSFTConfig`] with the settings that appendix B states."""

    output_dir: str | None = output_folder("smile_llama_lora")
    eval_strategy: str = with_default(RecipeDefaults, "eval_strategy", "no")
    per_device_train_batch_size: int = documented(8, "Answers per device and step.")
    num_train_epochs: float = documented(5.0, "Number of epochs: 5, 10 or 20 in the paper.")
    learning_rate: float = documented(1e-4, "Peak learning rate; the paper does not state it.")
    max_length: int | None = documented(
        512, "Maximum length of prompt and answer in tokens; longer ones are truncated."
    )

    def __post_init__(self) -> None:
        # trl enables bf16 by default, which a CPU refuses.
        if self.bf16 is None and not is_torch_bf16_gpu_available():  # type: ignore[has-type]
            self.bf16 = False
        super().__post_init__()


def parse_args(argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line."""
    types = (LlamaArguments, InstructionArguments, JudgeArguments, SmileLlamaConfig)
    return parse_arguments(types, argv, default_config=CONFIGS / "tiny.yaml")


def run_name(config: SmileSFTConfig) -> str:
    """Row name of a finetuned model."""
    if config.mle_weight == 1.0:
        return "MLE"
    notes = [f"lambda={config.mle_weight:g}"] if config.mle_weight > 0 else []
    if config.subset_scope != "document":
        notes.append(config.subset_scope + (f" of {config.window_tokens}" if config.subset_scope == "window" else ""))
    if config.first_token != "mle":
        notes.append(f"first token: {config.first_token}")
    return "SMILE" + (f" ({', '.join(notes)})" if notes else "")


def planned_runs(config: SmileSFTConfig, compare: InstructionArguments) -> dict[str, SmileSFTConfig]:
    """The runs by row name: the controls, the other scopes and lambdas, and last the configured run."""
    pairs: list[tuple[float, Any]] = [(weight, config.subset_scope) for weight in compare.compare_mle_weights]
    pairs += [(config.mle_weight, scope) for scope in (*compare.compare_scopes, config.subset_scope)]
    return plan_runs(config, [(None, {"mle_weight": w, "subset_scope": scope}) for w, scope in pairs], run_name)


def starting_point(arguments: LlamaArguments, train: Any, config: SmileLlamaConfig) -> str:
    """Folder or name from which every run loads its model; the tiny one is pretrained and saved there first."""
    if arguments.model_name_or_path != TINY_LLAMA:
        return arguments.model_name_or_path
    folder = Path(str(config.output_dir)) / "base"
    if not config.overwrite_output_dir and (folder / "tokenizer.json").exists():  # written last
        return str(folder)
    model, tokenizer = tiny_llama((row["prompt"] + row["completion"] for row in train), seed=config.seed)
    if arguments.pretrain_epochs:
        first = copy.deepcopy(config)
        first.output_dir, first.save_strategy, first.max_steps = str(folder), "no", -1
        first.mle_weight, first.subset_scope = 1.0, "document"
        first.num_train_epochs, first.learning_rate = arguments.pretrain_epochs, 3e-3
        trainer = SmileSFTTrainer(model, first, train_dataset=train, processing_class=tokenizer)
        trainer.train()
        model = trainer.accelerator.unwrap_model(trainer.model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load_model(arguments: LlamaArguments, name: str) -> tuple[Any, Any]:
    """The model that a run starts from, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    revision = None if arguments.model_name_or_path == TINY_LLAMA else arguments.model_revision
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        name, revision=revision, dtype=arguments.dtype, use_safetensors=True, trust_remote_code=False
    )
    return model, tokenizer


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the recipe."""
    return compare(parse_args(argv))


@alone_in_folder
def compare(arguments: tuple[Any, ...]) -> Path:
    """Train the runs, and let them answer and be judged."""
    *_, judge_args, config = arguments
    output_dir = Path(config.output_dir)
    config.hub_private_repo = True if config.hub_private_repo is None else config.hub_private_repo
    judge = judge_args.load()  # check before hours of training
    questions = load_questions(judge_args.questions or DATA / "questions.jsonl", judge_args.reference_answers)
    if judge is not None and any(not q.reference for q in questions):
        raise ValueError("A judge compares with references, which some questions lack. Set --reference_answers.")
    if judge_args.answers:
        answers, main_process = read_answers(judge_args.answers, questions), True
    else:
        answers, main_process = train_and_answer(arguments, questions)
    if not main_process:
        return output_dir / "results.json"
    write_answers(output_dir / "answers.jsonl", questions, answers)
    rows = [answer_row(name, questions, texts, judge, config.seed) for name, texts in answers.items()]
    references = [q.reference for q in questions if q.reference]
    if references:
        rows.append(answer_row("references", questions, references, None, config.seed))
    title, columns = "SMILE for text", ANSWER_COLUMNS if judge is not None else TEXT_COLUMNS
    path = write_results(output_dir, rows, seed=config.seed, config=describe(arguments), title=title, columns=columns)
    print_table(rows, title=title, columns=columns)
    print(folded(f"Written to {output_dir}: results.json, results.md, answers.jsonl; the adapter is model/"))
    return path


def train_and_answer(arguments: tuple[Any, ...], questions: Sequence[Question]) -> tuple[dict[str, list[str]], bool]:
    """Train every run from the same start, and let each model answer the questions."""
    from peft import LoraConfig

    model_args, data_args, judge_args, config = arguments
    prompts = [format_prompt(q.text) for q in questions]
    name = str(DATA / "instructions.jsonl") if data_args.dataset_name == SHIPPED else data_args.dataset_name
    with config.main_process_first(local=False, desc="loading the instructions"):
        train = load_instructions(name, max_rows=data_args.max_train_rows, exclude=prompts)
    start = starting_point(model_args, train, config)
    model, tokenizer = load_model(model_args, start)
    settings = {"max_new_tokens": judge_args.answer_max_new_tokens, "batch_size": config.per_device_eval_batch_size}
    answers = {"start": answer_questions(model.to(config.device), tokenizer, prompts, **settings)}
    runs = planned_runs(config, data_args)
    differing = settings_of(runs)
    for number, (row, run) in enumerate(runs.items()):
        if config.process_index == 0:
            values = ", ".join(f"{key}={value}" for key, value in differing[row].items())
            print(f"\n-- {number + 1} of {len(runs)}: {row} ({values})", flush=True)
        model, _ = load_model(model_args, start)
        lora = LoraConfig(
            r=model_args.lora_r,
            lora_alpha=model_args.lora_alpha,
            target_modules=list(model_args.lora_target_modules),
            task_type="CAUSAL_LM",
        )
        trainer = SmileSFTTrainer(model, run, train_dataset=train, processing_class=tokenizer, peft_config=lora)
        train_or_resume(trainer)
        trainer.save_model()
        answers[row] = answer_questions(
            trainer.accelerator.unwrap_model(trainer.model), tokenizer, prompts, **settings
        )
    if config.pushes:  # the last run is the recipe's own
        trainer.push_to_hub(commit_message="Add SMILE adapter")
    return answers, trainer.is_world_process_zero()


if __name__ == "__main__":
    run_main(main)
