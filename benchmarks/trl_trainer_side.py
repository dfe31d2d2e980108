"""TRL's `RLOOTrainer` or `GRPOTrainer` on one of our tasks, in a separate process; see `benchmarks.time_to_reward`.

The same model, queries, prompts, reward function, lengths, mini-batches, epochs and KL penalty as a single agent of
ours; held-out queries are measured as ours are, while the clock stands still.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Query
from policies.generation.generator import EVALUATION_UPDATE, Sampling, sampling_seed
from policies.generation.transformers_generator import TransformersGenerator
from policies.learning.metrics import compute_response_metrics
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import make_rows
from policies.settings.settings import Settings, make_settings

POLICY_ID = "llm_1"
MARK = "SIDE "


class Referee(TrainerCallback):
    """Measures the model on held-out queries, as `cory train` does, at regular intervals."""

    def __init__(self, settings: Settings, steps: int, began: float) -> None:
        """Takes the optimizer steps of an update, and when the command began, in seconds since the epoch."""
        s = self.settings = settings
        self.task, self.steps, self.began, self.paused = s.make_task(), steps, began, 0.0
        self.encoder = s.make_chain(self.task, s.make_tokenizers()).encoders[0]
        self.generator = TransformersGenerator(
            {POLICY_ID: s.model_paths[POLICY_ID]}, dtype="fp32", device=torch.device("cpu")
        )
        self.model = PolicyModel(s.model_paths[POLICY_ID], critic=False, temperature=s.temperature, dtype="fp32")
        self.worker = RewardWorker(self.task.reward)
        self.curve: list[tuple[int, float, float]] = []
        """Updates, seconds since the command began without those of evaluations, held-out combined reward."""

    def rewards(self, queries: Sequence[Query], responses: Sequence[str]) -> list[float]:
        """The task's rewards."""
        names = queries[0].columns
        columns = {name: [query.columns[name] for query in queries] for name in names}
        rewards = self.worker.rewards([query.text for query in queries], list(responses), columns)
        return [float(reward) for reward in rewards if reward is not None]

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: PreTrainedModel, **kwargs: Any) -> None:
        """Measures, after the last step of every `eval_every`th update."""
        update, rest = divmod(state.global_step, self.steps)
        if not rest and (update % self.settings.eval_every == 0 or update == self.settings.num_updates):
            stopped = time.time()
            reward = self.measure(model)
            self.curve.append((update, stopped - self.began - self.paused, reward))
            self.paused += time.time() - stopped

    def measure(self, model: PreTrainedModel) -> float:
        """The mean combined reward on the validation queries."""
        s = self.settings
        weights = {name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()}
        self.generator.load(POLICY_ID, weights, 0)
        self.model.load({f"lm.{name}": array for name, array in weights.items()})
        queries = self.task.queries("validation")[: s.eval_queries]
        prompts = self.encoder.encode_prompts(queries)
        seeds = [sampling_seed(s.seed, EVALUATION_UPDATE, query.id, 0) for query in queries]
        sampling = Sampling(s.temperature, s.max_response_tokens, seeds, self.encoder.stop_token_ids)
        responses = self.generator.generate(prompts, POLICY_ID, sampling)
        rows = make_rows(
            prompts,
            [response.tokens for response in responses],
            [response.logprobs for response in responses],
            self.rewards(queries, [self.encoder.decode(response.tokens) for response in responses]),
            [self.encoder.truncate_response(response.tokens)[1] for response in responses],
        )
        scored = rows.with_scores(self.model.score(rows))  # zero outside the mask
        return float(compute_response_metrics(scored, s.report_kl_coef)["combined_reward"].mean())


def main() -> None:
    """Trains, and prints the curve."""
    work: dict[str, Any] = json.loads(sys.argv[1])
    settings = make_settings(work["settings"])
    batch = settings.queries_per_update * settings.num_generations
    steps = batch // settings.responses_per_step
    referee = Referee(settings, steps * settings.num_epochs, work["began"])
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
        callbacks=[referee],
    )
    referee.curve.append((0, time.time() - work["began"], referee.measure(trainer.model)))
    referee.paused = time.time() - work["began"] - referee.curve[0][1]
    trainer.train()
    referee.worker.close()
    tokens = max(entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry)
    print(MARK + json.dumps({"curve": referee.curve, "paused": referee.paused, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
