"""The chain of a run's trained policies in this process: answers queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

from cory_env.chain import Chain
from cory_env.chain_settings import make_positions
from cory_env.episode import ChainEpisode, Episode
from cory_env.message import Message
from cory_env.pickled import display_name
from cory_env.prompt_lengths import bare_responses
from cory_env.rewarding.episodes import compute_awaited
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Query
from cory_env.tasks.rows import PROVIDED_ARGUMENTS
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, placeholders
from launch.console.errors import CommandError
from launch.models.generators import load_generator
from launch.models.trained import PolicySet
from launch.run_folder.records import GeneratedResponse, GeneratedSample
from launch.training.preflight import load_task
from policies.generation.generator import Generator
from policies.models.model_names import AVERAGE_POLICY
from policies.rollout.chain_generation import ChainRequest, FeedbackTogether, generate_chains

MAX_BATCH_SIZE = {"vllm": 256, "transformers": 32}
"""Maximum number of concurrently generated responses, by backend."""


class TrainedChain:
    """Answers queries with a chain of policies, sampled as in training."""

    def __init__(
        self,
        trained: PolicySet,
        policy_ids: Sequence[str] | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        backend: str = "transformers",
        *,
        feedback: bool = True,
    ) -> None:
        """Creates the chain. The policies are loaded lazily.

        Args:
            policy_ids: in chain order; their number is the length of the chain; None: all, in their current roles.
            temperature, seed: of sampling; None: the run's, with which query n gets the same responses as held-out
                query n in an evaluation.
            backend: `transformers` or `vllm`.
            feedback: give feedback on responses, and stop chains by it, if the run does (`feedback`, `stop_when`).
        """
        self.policy_ids = policy_ids = trained.policy_ids if policy_ids is None else policy_ids
        self.temperature = trained.settings.temperature if temperature is None else temperature
        self.seed = trained.settings.seed if seed is None else seed
        self.backend = backend
        self.chain = make_env_chain(trained, policy_ids, feedback=feedback)
        self.worker: RewardWorker | None = None
        """Computes feedback; starts its process on the first use. None if the chain gets no feedback."""
        if len(policy_ids) > 1 and self.chain.uses_feedback:
            timeout = trained.settings.reward_timeout
            self.worker = RewardWorker(None, feedback=self.chain.task.feedback, timeout=timeout)
        self._trained = trained

    @cached_property
    def generator(self) -> Generator:
        """The loaded policies."""
        return load_generator(
            self._trained, tuple(dict.fromkeys(self.policy_ids)), self.backend, MAX_BATCH_SIZE[self.backend]
        )

    @cached_property
    def feedback_columns(self) -> list[str]:
        """The data columns that the feedback function requires."""
        return [] if self.worker is None else [name for name in self.worker.start() if name not in PROVIDED_ARGUMENTS]

    @property
    def columns(self) -> set[str]:
        """The data columns that the prompt templates contain, except the query, and those that feedback requires."""
        task, templates = self.chain.task, [self.chain.task.prompt_template]
        if len(self.chain.agents) > 1 and self.chain.knowledge_transfer:
            templates += [task.observer_template, task.reference_separator]
        templates += [position.role.prompt for position in self.chain.positions if position.role.prompt is not None]
        computed = {"query", "reference", *([] if self.worker is None else [FEEDBACK_PLACEHOLDER])}
        return set().union(*map(placeholders, templates), self.feedback_columns) - computed

    def check_feedback(self, queries: Sequence[Query]) -> None:
        """Checks that queries have the columns that the feedback function requires; loads no model."""
        for query in queries:
            if missing := [name for name in self.feedback_columns if query.columns.get(name) is None]:
                subject = f"query {query.text[:60]!r} lacks" if query.text else "single queries lack"
                task = self.chain.task
                raise CommandError(
                    f"The feedback {display_name(task.feedback or '')} requires the column {', '.join(missing)}, which "
                    f"{subject}. Give queries with columns as rows of a file (--in FILE; in Python columns=..., in "
                    f"requests `columns`), use one policy alone (--roles {self.policy_ids[0]})"
                    + ("." if task.shows_feedback else ", or no feedback (--no-feedback; in Python feedback=False).")
                )

    def check(self, queries: Sequence[Query]) -> None:
        """Checks that prompts can be built for all queries, with empty references."""
        self.check_feedback(queries)
        for query in queries:
            if query.history is not None and self.chain.encoders[0].chat is None:
                raise CommandError(
                    f"Query {query.id + 1} is a conversation, but this run was trained without a chat template "
                    "(chat=false). Use plain texts; in requests, a single user message."
                )
            for position, encoder in enumerate(self.chain.encoders):
                responses = bare_responses(self.chain, position)
                encoder.build_prompt(query, responses, self.chain.positions[position].template)

    def request(
        self,
        episode: ChainEpisode,
        sample: int = 0,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
    ) -> ChainRequest:
        """Returns the request for the responses of an episode of the chain.

        Args:
            sample: index of the sample; part of the sampling seed.
            temperature, seed: of sampling; None: the chain's.
            max_tokens: limit of the last response; None: the chain's.
        """
        *draft_limits, limit = self.chain.response_limits
        return ChainRequest(
            episode,
            self.policy_ids,
            [*draft_limits, limit if max_tokens is None else min(max_tokens, limit)],
            self.temperature if temperature is None else temperature,
            self.seed if seed is None else seed,
            sample,
        )

    def answer_all(self, prompt_refs: Sequence[tuple[Query, int]]) -> list[GeneratedSample]:
        """Answers many queries concurrently.

        Returns:
            The responses, in the same order.
        """
        size = MAX_BATCH_SIZE[self.backend]
        samples: list[GeneratedSample] = []
        feedback = None if self.worker is None else FeedbackTogether(partial(compute_awaited, self.worker))
        for start in range(0, len(prompt_refs), size):
            batch = [
                self.request(ChainEpisode(self.chain, query), sample)
                for query, sample in prompt_refs[start : start + size]
            ]
            generate_chains(self.generator, batch, feedback)
            samples += [self._raw_sample(request.episode) for request in batch]
        return samples

    def answer(
        self,
        number: int,
        text: str,
        *,
        history: Sequence[Message] | None = None,
        columns: Mapping[str, object] | None = None,
        sample: int = 0,
    ) -> GeneratedSample:
        """Answers a query.

        Args:
            number: of the query; part of the sampling seed.
            columns: data columns of the query, for prompt templates and feedback.
            sample: index of the sample; part of the sampling seed.
        """
        query = Query(number, text, dict(columns or {}), history=None if history is None else tuple(history))
        self.check([query])
        return self.answer_all([(query, sample)])[0]

    def _raw_sample(self, episode: Episode) -> GeneratedSample:
        responses = []
        texts = zip(episode.agents, self.policy_ids, episode.completions, strict=False)
        for position, (role, policy_id, text) in enumerate(texts):
            entries = episode.thought_entry(position) | episode.feedback_entry(position)  # the last one may have none
            responses.append({"role": role, "policy": policy_id, "text": text, **entries})
        return GeneratedSample(query=episode.query.raw, responses=cast(list[GeneratedResponse], responses))


class FeedbackRequiredError(CommandError):
    """A chain cannot be used without feedback, because its prompts show feedback."""


def make_env_chain(trained: PolicySet, policy_ids: Sequence[str], *, feedback: bool = False) -> Chain:
    """Creates the environment's chain for policies of a run, with their tokenizers.

    Args:
        feedback: whether the chain gets feedback, and stops by it, if the run's chain does.
    """
    settings = trained.settings
    if settings.roles is not None:
        positions = enumerate(make_positions(settings.roles), start=1)
        lengths = [number for number, position in positions if number == 1 or position.role.produces_response]
        if len(policy_ids) not in lengths:
            raise CommandError(
                f"{len(policy_ids)} policies were chosen, but this run's chain ends with a response only after "
                f"{', '.join(map(str, lengths))}. Choose so many with --roles."
            )
    task, tokenizers = load_task(settings, trained.task)
    tokenizer_ids = [trained.initial_id(policy_id) for policy_id in policy_ids]
    if not feedback:
        chain = settings.make_chain(task, tokenizers, tokenizer_ids)
        if any(map(chain.shows_feedback, range(len(chain.positions)))):
            raise FeedbackRequiredError(
                f"The prompts of this run's chain show the feedback {display_name(task.feedback or '')}, so the chain "
                f"cannot answer without it. Use one policy alone (--roles {policy_ids[0]}), or allow feedback."
            )
        task, settings = replace(task, feedback=None), settings.model_copy(update={"stop_when": None})
    if settings.lora is not None and AVERAGE_POLICY in policy_ids:
        raise CommandError(
            "The mean of adapters cannot be used here, because it has a higher rank. Export it with `cory export "
            "--policy mean`, or choose other policies with --roles."
        )
    return settings.make_chain(task, tokenizers, tokenizer_ids)
