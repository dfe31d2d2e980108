"""The chain of a run's trained policies in this process: answers queries one by one or in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TextIO, cast

import typer

from cory_env.chain import Chain
from cory_env.chain_settings import make_positions
from cory_env.episode import ChainEpisode
from cory_env.message import Message
from cory_env.pickled import display_name
from cory_env.prompt_lengths import bare_responses
from cory_env.rewarding.episodes import compute_awaited
from cory_env.rewarding.worker import RewardWorker
from cory_env.tasks import Query
from cory_env.tasks.rows import PROVIDED_ARGUMENTS
from cory_env.tasks.task import FEEDBACK_PLACEHOLDER, placeholders
from launch.console.errors import CommandError
from launch.display.texts import NOTHING_TO_CORRECT, replace_control_chars
from launch.models.generators import MIN_TEMPERATURE, load_generator
from launch.models.trained import PolicySet
from launch.run_folder.records import GeneratedResponse, GeneratedSample
from launch.run_folder.sources import restore_task
from launch.training.preflight import load_task
from policies.generation.generator import EVALUATION_UPDATE, Request, Sampling, sampling_seed
from policies.generation.token_stream import Detokenizer, StepStreamer
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.model_names import AVERAGE_POLICY
from policies.rollout.chain_scheduler import ChainScheduler, ChainState
from policies.rollout.prompt_sampling import PromptRef
from policies.settings.roles import RoleSettings

if TYPE_CHECKING:
    from policies.generation.vllm_generator import VLLMGenerator

MAX_BATCH_SIZE = {"vllm": 256, "transformers": 32}
"""Maximum number of concurrently generated responses, by backend."""


class TokenPrinter:
    """Prints `role (policy): response` while it is generated, with colours only on a terminal."""

    def __init__(self, output: TextIO, *, print_query: bool) -> None:
        """Creates the printer; `print_query` prints each query before its responses."""
        self._output = output
        self._print_query = print_query
        self._has_text = False

    def query(self, text: str) -> None:
        """Starts the output for a query."""
        if self._print_query:
            typer.secho(replace_control_chars(text), self._output, italic=True)

    def turn(self, role: str, policy_id: str) -> None:
        """Starts a response."""
        typer.secho(f"{role} ({policy_id}): ", self._output, dim=True, nl=False)
        self._has_text = False

    def print(self, text: str) -> None:
        """Prints more text of the response, without leading whitespace of the response."""
        text = text if self._has_text else text.lstrip()
        self._has_text = self._has_text or bool(text)
        # Model output may contain terminal control codes.
        typer.echo(replace_control_chars(text), self._output, nl=False)

    def feedback(self, text: str | None) -> None:
        """Prints the feedback on the last response; None: nothing is to be corrected."""
        line = f"feedback: {replace_control_chars(NOTHING_TO_CORRECT if text is None else text)}"
        typer.secho(line, self._output, dim=True)


class TrainedChain:
    """Answers queries with a chain of policies, sampled as in training."""

    def __init__(
        self,
        trained: PolicySet,
        policy_ids: Sequence[str],
        temperature: float,
        seed: int,
        backend: str = "transformers",
        *,
        feedback: bool = True,
    ) -> None:
        """Creates the chain. The policies are loaded lazily.

        Args:
            trained: the policies.
            policy_ids: in chain order; their number is the length of the chain.
            temperature: of sampling.
            seed: of sampling. With the run's seed and temperature, query n gets the same responses as held-out query n
                in an evaluation.
            backend: `transformers`, or `vllm`, which supports only `answer_all`.
            feedback: give feedback on responses, and stop chains by it, if the run does (`feedback`, `stop_when`).

        Raises:
            CommandError: the checkpoint or the task's data has changed, or the prompts require feedback.
            ModelError: a base model was not found.
        """
        self.chain = make_env_chain(trained, policy_ids, feedback=feedback)
        self.worker = feedback_worker(self.chain, trained.settings.reward_timeout)
        self.policy_ids = policy_ids
        self.temperature = max(temperature, MIN_TEMPERATURE)
        self.seed = seed
        self.backend = backend
        self._trained = trained

    @cached_property
    def generator(self) -> TransformersGenerator | VLLMGenerator:
        """The loaded policies.

        Raises:
            CommandError: the checkpoint or the base model has changed.
            EngineStartError: vLLM could not start.
            ModelError: a base model was not found.
        """
        return load_generator(
            self._trained, tuple(dict.fromkeys(self.policy_ids)), self.backend, MAX_BATCH_SIZE[self.backend]
        )

    def load(self) -> None:
        """Loads the policies before the first query; raises as `generator` does."""
        _ = self.generator

    @property
    def columns(self) -> set[str]:
        """The data columns that the prompt templates contain, except the query, and those that feedback requires.

        Raises:
            RewardError: the feedback function cannot be loaded.
        """
        task, templates = self.chain.task, [self.chain.task.prompt_template]
        if len(self.chain.roles) > 1 and self.chain.knowledge_transfer:
            templates += [task.observer_template, task.reference_separator]
        templates += [position.role.prompt for position in self.chain.positions if position.role.prompt is not None]
        computed = {"query", "reference", *([] if self.worker is None else [FEEDBACK_PLACEHOLDER])}
        return set().union(*map(placeholders, templates), feedback_columns(self.worker)) - computed

    def check_feedback(self, queries: Sequence[Query]) -> None:
        """Checks that queries have the columns that the feedback function requires; loads no model.

        Raises:
            CommandError: a query lacks a column; the message names the first such query.
            RewardError: the feedback function cannot be loaded.
        """
        required = feedback_columns(self.worker)
        for query in queries:
            missing = [name for name in required if query.columns.get(name) is None]
            if missing:
                task = self.chain.task
                columns = f"column{'s' * (len(missing) > 1)} {', '.join(missing)}"
                subject = f"query {query.text[:60]!r} lacks" if query.text else "single queries lack"
                raise CommandError(
                    f"The feedback {display_name(task.feedback or '')} requires the {columns}, which {subject}. Give "
                    "queries with columns as rows of a file (--in FILE; in Python columns=...), use one policy alone "
                    f"(--roles {self.policy_ids[0]})"
                    + ("." if task.shows_feedback else ", or no feedback (--no-feedback; in Python feedback=False).")
                )

    def check(self, queries: Sequence[Query]) -> None:
        """Checks that prompts can be built for all queries, with empty references.

        Raises:
            PromptError: a prompt is too long; the message names the first such query.
            TemplateError: a query lacks a column of the prompt template.
            CommandError: a query is a conversation, but the policies were trained without a chat template, or lacks a
                column of the feedback function.
            RewardError: the feedback function cannot be loaded.
        """
        self.check_feedback(queries)
        for query in queries:
            if query.history is not None and self.chain.chat is None:
                raise CommandError(
                    f"Row {query.id + 1} is a conversation, but this run was trained without a chat template "
                    "(chat=false). Use plain texts."
                )
            for position, position_chain in enumerate(self.chain.by_position):
                responses = bare_responses(self.chain, position)
                position_chain.build_prompt(query, responses, self.chain.positions[position].template)

    def answer_all(self, prompt_refs: Sequence[tuple[Query, int]]) -> list[GeneratedSample]:
        """Answers many queries concurrently.

        Args:
            prompt_refs: queries with the index of the sample.

        Returns:
            The responses, in the same order.

        Raises:
            QueryTooLongError: a query's prompt is longer than `max_prompt_tokens`.
            GenerationError: the engine failed.
            RewardError: the feedback function failed.
        """
        if len(prompt_refs) > (size := MAX_BATCH_SIZE[self.backend]):
            batches = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
            return [answer for batch in batches for answer in self.answer_all(batch)]

        def make_request(key: int, state: ChainState, position: int) -> Request:
            prompt_ref, episode, _ = state
            sampling = self._sampling(prompt_ref.query, position, prompt_ref.sample)
            return Request(key, self.policy_ids[position], episode.prompt_ids(), sampling)

        episodes = [(PromptRef(query.id, sample), ChainEpisode(self.chain, query)) for query, sample in prompt_refs]
        scheduler = ChainScheduler(episodes, make_request, self._compute_awaited)
        self.generator.run_requests(scheduler.start(), scheduler.on_finished)
        return [self._raw_sample(state.episode) for state in scheduler.chains]

    def answer(
        self,
        number: int,
        text: str,
        printer: TokenPrinter | None = None,
        *,
        history: Sequence[Message] | None = None,
        columns: Mapping[str, object] | None = None,
        sample: int = 0,
    ) -> GeneratedSample:
        """Answers a query.

        Args:
            number: of the query; part of the sampling seed.
            text: the query.
            printer: prints the responses while they are generated.
            history: earlier messages of the conversation.
            columns: data columns of the query, for prompt templates and feedback.
            sample: index of the sample; part of the sampling seed.

        Raises:
            QueryTooLongError: a role's prompt is longer than `max_prompt_tokens`; nothing is printed then.
            CommandError: there is a history, but the policies were trained without a chat template; or the query lacks
                a column of the feedback function.
            RewardError: the feedback function failed.
        """
        query = Query(number, text, dict(columns or {}), history=None if history is None else tuple(history))
        self.check([query])
        if printer is None:
            return self.answer_all([(query, sample)])[0]
        printer.query(text)
        episode = ChainEpisode(self.chain, query)
        while (role := episode.role) is not None:
            position = len(episode.responses)
            policy_id, chain = self.policy_ids[position], self.chain.by_position[position]
            printer.turn(role, policy_id)
            if chain.tags is not None and episode.begins_thought:
                printer.print(chain.tags.start)
            detokenizer = Detokenizer(chain.decode_untruncated, chain.stops)
            streamer = StepStreamer(partial(_print_tokens, printer, detokenizer))
            (response,) = cast(TransformersGenerator, self.generator).generate(
                [episode.prompt_ids()], policy_id, self._sampling(number, position, sample), streamer
            )
            episode.respond({"tokens": response.tokens, "length": len(response.tokens)})
            printer.print(f"{detokenizer.end()}\n")
            if episode.awaits_feedback:
                self._compute_awaited([episode])
                for feedback in episode.feedback_entry(position).values():  # none on the text of a critic
                    printer.feedback(feedback)
        return self._raw_sample(episode)

    def _sampling(self, query: int, position: int, sample: int) -> Sampling:
        seed = sampling_seed(self.seed, EVALUATION_UPDATE, query, position, sample)
        return Sampling(
            self.temperature,
            self.chain.response_limits[position],
            [seed],
            self.chain.by_position[position].stop_token_ids,
        )

    def _compute_awaited(self, episodes: Sequence[ChainEpisode]) -> None:
        # No prompt depends on rewards, because `make_env_chain` rejects such chains.
        if self.worker is not None:
            compute_awaited(self.worker, episodes)

    def _raw_sample(self, episode: ChainEpisode) -> GeneratedSample:
        responses = [
            GeneratedResponse(role=role, policy=policy_id, text=text)
            for role, policy_id, text in zip(episode.roles, self.policy_ids, episode.completions, strict=False)
        ]
        for position, response in enumerate(responses):
            entries = episode.thought_entry(position) | episode.feedback_entry(position)  # the last one may have none
            response |= cast(GeneratedResponse, entries)
        return GeneratedSample(query=episode.query.raw, responses=responses)


def _print_tokens(printer: TokenPrinter, detokenizer: Detokenizer, tokens: list[int]) -> None:
    printer.print(detokenizer.add(tokens))


def feedback_worker(chain: Chain, timeout: float) -> RewardWorker | None:
    """Returns a worker for the feedback of a chain, without starting its process; None if the chain needs no feedback.

    Args:
        chain: the chain.
        timeout: seconds that one call may take.
    """
    if len(chain.roles) == 1 or not chain.uses_feedback:
        return None
    return RewardWorker(None, feedback=chain.task.feedback, timeout=timeout)


def feedback_columns(worker: RewardWorker | None) -> list[str]:
    """Returns the data columns that a worker's feedback function requires; starts its process.

    Raises:
        RewardError: the function cannot be loaded.
    """
    return [] if worker is None else [name for name in worker.start() if name not in PROVIDED_ARGUMENTS]


class FeedbackRequiredError(CommandError):
    """A chain cannot be used without feedback, because its prompts show feedback."""


def make_env_chain(trained: PolicySet, policy_ids: Sequence[str], *, feedback: bool = False) -> Chain:
    """Creates the environment's chain for policies of a run, with their tokenizers.

    Args:
        trained: the policies.
        policy_ids: in chain order.
        feedback: whether the chain gets feedback, and stops by it, if the run's chain does.

    Raises:
        CommandError: the task's data has changed, or a policy cannot be used in the chain.
        FeedbackRequiredError: `feedback` is false, but prompts show feedback.
        ModelError: a base model was not found.
    """
    settings = trained.settings
    if settings.roles is not None:
        _check_roles(settings.roles, len(policy_ids))
    task, tokenizers = load_task(settings, restore_task(trained.sources))
    # `AVERAGE_POLICY` has no separate tokenizer.
    tokenizer_ids = [policy_id if policy_id in tokenizers else settings.policy_ids[0] for policy_id in policy_ids]
    if not feedback:
        chain = settings.make_chain(task, tokenizers, tokenizer_ids)
        if any(map(chain.shows_feedback, range(len(chain.positions)))):
            raise FeedbackRequiredError(
                f"The prompts of this run's chain show the feedback {display_name(task.feedback or '')}, so the chain "
                f"cannot answer without it. Use one policy alone (--roles {policy_ids[0]}), or allow feedback."
            )
        task, settings = replace(task, feedback=None), settings.model_copy(update={"stop_when": None})
    if settings.knowledge_transfer and settings.observed == "best" and len(policy_ids) > 2:
        raise CommandError(
            "observed=best requires rewards, which are not computed here, if a chain has more than two policies. Use "
            f"--roles {','.join(policy_ids[:2])}."
        )
    if settings.lora is not None and AVERAGE_POLICY in policy_ids:
        raise CommandError(
            "The mean of adapters cannot be used here, because it has a higher rank. Export it with `cory export "
            "--policy mean`, or choose other policies with --roles."
        )
    return settings.make_chain(task, tokenizers, tokenizer_ids)


def _check_roles(roles: Sequence[RoleSettings], num_agents: int) -> None:
    """Checks that a chain of so many agents with a run's roles ends with an answer.

    Raises:
        CommandError: it does not.
    """
    positions = make_positions([role.role for role in roles])
    if num_agents > len(positions):
        raise CommandError(
            f"This run's chain has {len(positions)} agents, but {num_agents} policies were chosen. Name at most "
            f"{len(positions)} with --roles."
        )
    if num_agents > 1 and not (last := positions[num_agents - 1].role).produces_response:
        raise CommandError(
            f"A chain of {num_agents} policies ends with role {last.name}, which produces no response. Choose another "
            "number of policies with --roles."
        )
