"""TRL's `RLOOTrainer` or `GRPOTrainer` on one of our tasks, in a separate process; see `benchmarks.time_to_reward`.

The same model, queries, prompts, reward function, lengths, mini-batches, epochs and KL penalty as a single agent of
ours; held-out queries are measured as ours are, while the clock stands still.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from benchmarks.referee import POLICY_ID, Referee
from benchmarks.side import print_answer, read_work
from policies.settings.settings import make_settings


class RefereeCallback(TrainerCallback):
    """Lets the referee measure the model at regular intervals."""

    def __init__(self, referee: Referee, steps: int) -> None:
        """Takes the optimizer steps of an update."""
        self.referee, self.steps = referee, steps

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: PreTrainedModel, **kwargs: Any) -> None:
        """Measures, after the last step of every `eval_every`th update."""
        update, rest = divmod(state.global_step, self.steps)
        if not rest and self.referee.is_due(update):
            self.referee.add_point(update, [model])


def main() -> None:
    """Trains, and prints the curve."""
    work = read_work()
    settings = make_settings(work["settings"])
    batch = settings.queries_per_update * settings.num_generations
    steps = batch // settings.responses_per_step
    referee = Referee(settings, work["began"])
    task = referee.task
    tokenizer = settings.make_tokenizers()[POLICY_ID]
    tokenizer.padding_side = "left"
    prompts = [task.prompt(query) for query in task.train]
    if tokenizer(prompts[:100])["input_ids"] != referee.encoder.encode_prompts(task.train[:100]):
        raise RuntimeError("The trainer would read other prompts than ours.")
    kind = {"rloo": (trl.RLOOTrainer, trl.RLOOConfig), "grpo": (trl.GRPOTrainer, trl.GRPOConfig)}[work["trainer"]]
    bf16 = settings.dtype == "bf16"
    schedule = "constant_with_warmup" if settings.lr_schedule == "constant" else settings.lr_schedule
    trainer = kind[0](
        AutoModelForCausalLM.from_pretrained(settings.model_paths[POLICY_ID], dtype=torch.float32),
        reward_funcs=lambda completions, query, **_: referee.rewards([task.train[q] for q in query], completions),
        args=kind[1](
            output_dir=str(Path(work["folder"])),
            per_device_train_batch_size=settings.responses_per_step,
            steps_per_generation=steps,
            num_generations=settings.num_generations,
            num_iterations=settings.num_epochs,
            max_steps=settings.num_updates * steps * settings.num_epochs,
            max_completion_length=settings.max_response_tokens,
            temperature=settings.temperature,
            beta=settings.kl_coef,
            learning_rate=settings.learning_rate,
            lr_scheduler_type=schedule,
            warmup_steps=settings.warmup_updates * steps * settings.num_epochs,
            max_grad_norm=settings.grad_clip,
            weight_decay=settings.weight_decay,
            seed=settings.seed,
            bf16=bf16,
            use_cpu=True,
            disable_dropout=True,
            gradient_checkpointing=False,  # on by default: slower, to save memory
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=steps * settings.num_epochs,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts, "query": list(range(len(prompts)))}),
        processing_class=tokenizer,
        callbacks=[RefereeCallback(referee, steps * settings.num_epochs)],
    )
    referee.add_point(0, [trainer.model])
    trainer.train()
    referee.worker.close()
    tokens = max(entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry)
    print_answer({"curve": referee.curve, "paused": referee.paused, "tokens": tokens})


if __name__ == "__main__":
    main()
