"""Measures models on held-out queries, as `cory train` does: those of another library's trainer, or of a run's folder.

python -m benchmarks.referee '{"run": "runs/NAME"}'
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from benchmarks.side import print_answer, read_work
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Query
from launch.models.trained import open_trained
from policies.generation.generator import EVALUATION_UPDATE, Sampling, sampling_seed
from policies.generation.transformers_generator import TransformersGenerator
from policies.learning.metrics import compute_response_metrics
from policies.learning.policy_model import PolicyModel
from policies.learning.rows import make_rows
from policies.models.weights import Weights
from policies.settings.settings import Settings

POLICY_ID = "llm_1"


class Referee:
    """Measures models on held-out queries, while the clock stands still."""

    def __init__(self, settings: Settings, began: float) -> None:
        """Takes the time at which the command began, in seconds since the epoch."""
        s = self.settings = settings
        self.task, self.began, self.paused = s.make_task(), began, 0.0
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

    def is_due(self, update: int) -> bool:
        """Whether models are measured after this update."""
        return update % self.settings.eval_every == 0 or update == self.settings.num_updates

    def add_point(self, update: int, models: Sequence[PreTrainedModel]) -> None:
        """Adds a point to the curve: the mean over the models."""
        stopped = time.time()
        reward = statistics.mean(self.measure(model) for model in models)
        self.curve.append((update, stopped - self.began - self.paused, reward))
        self.paused += time.time() - stopped

    def measure(self, model: PreTrainedModel) -> float:
        """The mean combined reward of a model on the validation queries."""
        return self.measure_weights(
            {name: parameter.detach().float().numpy() for name, parameter in model.named_parameters()}
        )

    def measure_weights(self, weights: Weights) -> float:
        """The mean combined reward on the validation queries, of weights by Hugging Face names."""
        s = self.settings
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
    """Measures the first and the last checkpoint of a run, as the mean over its LLMs."""
    run = read_work()["run"]
    referee = Referee(open_trained(run, "latest").settings, time.time())
    rewards = {}
    for checkpoint in (0, "latest"):
        policies = open_trained(run, checkpoint)
        rewards[policies.update] = statistics.mean(
            referee.measure_weights(policies.weights(policy_id)) for policy_id in policies.settings.policy_ids
        )
    referee.worker.close()
    print_answer({"rewards": rewards})


if __name__ == "__main__":
    main()
