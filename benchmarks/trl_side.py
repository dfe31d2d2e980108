"""CORY in a plain loop around two classic `PPOTrainer`s of trl 0.11.4, in a separate process; see `benchmarks.side`.

The same queries, prompts, lengths, epochs, mini-batches, objective and reward function; generation in one batch.
"""

from __future__ import annotations

import time

import torch
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

from benchmarks.processes import watched_memory
from benchmarks.side import Took, read_work
from cory_env.chain import Chain
from cory_env.rewards.sentiment import positive_logit
from cory_env.tasks.turns import SeenResponse
from policies.settings.settings import Settings, make_settings


class TwoTrainers:
    """A trainer per role, each with its own policy, reference and Adam."""

    def __init__(self, settings: Settings) -> None:
        """Loads models, references and queries."""
        s = self.settings = settings
        tokenizers = s.make_tokenizers()
        tokenizer = tokenizers["llm_1"]
        tokenizer.pad_token = tokenizer.eos_token
        self.chain: Chain = s.make_chain(s.make_task(), tokenizers)
        config = {
            "batch_size": s.queries_per_update,
            "mini_batch_size": s.responses_per_step,
            "gradient_accumulation_steps": 1,
            "ppo_epochs": s.num_epochs,
            "learning_rate": s.learning_rate,
            "init_kl_coef": s.kl_coef,
            "adap_kl_ctrl": False,
            "kl_penalty": "kl",
            "gamma": s.gamma,
            "lam": s.lam,
            "cliprange": s.clip_range[0],
            "cliprange_value": s.value_clip,
            "vf_coef": s.value_coef,
            "max_grad_norm": s.grad_clip,
            "seed": s.seed,
        }
        self.trainers = [
            PPOTrainer(
                PPOConfig(**config),
                AutoModelForCausalLMWithValueHead.from_pretrained(s.model_paths["llm_1"]),
                tokenizer=tokenizer,
            )
            for _ in self.chain.agents
        ]
        self.updates = 0

    def update(self) -> tuple[int, dict[str, float]]:
        """One update of both; returns its response tokens and the seconds of its phases."""
        s, seconds = self.settings, dict.fromkeys(("rollout", "reward", "learn"), 0.0)
        train, encoder = self.chain.task.train, self.chain.encoders[0]
        queries = [
            train[(self.updates * s.queries_per_update + index) % len(train)] for index in range(s.queries_per_update)
        ]
        earlier: list[list[list[int]]] = [[] for _ in queries]
        turns = []
        started = time.perf_counter()
        for trainer in self.trainers:
            prompts = [
                torch.tensor(
                    encoder.build_prompt(
                        query, [SeenResponse.decoded(encoder.decode, tokens) for tokens in responses]
                    ).tokens
                )
                for query, responses in zip(queries, earlier, strict=True)
            ]
            responses = trainer.generate(
                prompts,
                batch_size=s.queries_per_update,
                return_prompt=False,
                max_new_tokens=s.max_response_tokens,
                do_sample=True,
                temperature=s.temperature,
                top_k=0,
                top_p=1.0,
                eos_token_id=encoder.stop_token_ids[0],
                pad_token_id=encoder.stop_token_ids[0],
            )
            for texts, response in zip(earlier, responses, strict=True):
                texts.append(response.tolist())
            turns.append((prompts, responses))
        seconds["rollout"], started = time.perf_counter() - started, time.perf_counter()
        rewards = positive_logit(
            [query.text for query in queries for _ in self.trainers],
            [encoder.decode(response) for texts in earlier for response in texts],
        )
        collective = torch.tensor(rewards).reshape(len(queries), -1).sum(1)
        seconds["reward"], started = time.perf_counter() - started, time.perf_counter()
        for trainer, (prompts, responses) in zip(self.trainers, turns, strict=True):
            trainer.step(prompts, responses, list(collective))
        seconds["learn"] = time.perf_counter() - started
        self.updates += 1
        return sum(len(response) for texts in earlier for response in texts), seconds


def main() -> None:
    """Builds the trainers, runs the updates and answers."""
    work, took = read_work(), Took()
    with watched_memory() as peak:
        loop = TwoTrainers(make_settings(work["settings"]))
        for _ in range(work["warm_up"]):
            loop.update()
    took.note_memory(peak)
    took.time_updates(loop.update, work["updates"])
    took.answer()


if __name__ == "__main__":
    main()
