"""The chain of a run's trained policies, in this process: queries in, each role's response out; many at once or one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, TextIO, cast

import typer

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.message import Message
from cory_env.tasks import Query
from cory_env.tasks.task import placeholders
from launch.console.errors import CommandError
from launch.display.texts import visible
from launch.models.generators import MIN_TEMPERATURE, load_generator
from launch.models.trained import PolicySet
from launch.run_folder.records import RawResponse, RawSample
from launch.run_folder.sources import task_without_queries
from launch.training.preflight import load_task
from policies.generation.generator import EVALUATION_STREAM, Request, Sampling, sampling_seed
from policies.generation.token_stream import Detokenizer, StepStreamer
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.model_names import AVERAGE
from policies.rollout.chain_scheduler import ChainScheduler, ChainState
from policies.rollout.prompt_sampling import PromptRef

if TYPE_CHECKING:
    from policies.generation.vllm_generator import VLLMGenerator

MAX_BATCH_SIZE = {"vllm": 256, "transformers": 32}
"""Responses that are generated at the same time, at most."""


class TokenPrinter:
    """Prints `role (policy): response`, piece by piece; only a terminal gets colours."""

    def __init__(self, output: TextIO, *, repeat: bool) -> None:
        """Notes where to, and whether to `repeat` the query before the responses."""
        self._output = output
        self._repeat = repeat
        self._begun = False

    def query(self, text: str) -> None:
        """Begins with a query."""
        if self._repeat:
            typer.secho(visible(text), self._output, italic=True)

    def turn(self, role: str, policy: str) -> None:
        """Begins a response."""
        typer.secho(f"{role} ({policy}): ", self._output, dim=True, nl=False)
        self._begun = False

    def print(self, text: str) -> None:
        """Goes on with the response; spaces that it starts with are left out."""
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        typer.echo(visible(text), self._output, nl=False)  # what a model writes must not steer the terminal


class TrainedChain:
    """Answers queries, sampled as in training: one after another with `transformers`, or many at once."""

    def __init__(
        self,
        trained: PolicySet,
        policy_ids: Sequence[str],
        temperature: float,
        seed: int,
        backend: str = "transformers",
    ) -> None:
        """Notes who answers; the policies are loaded when they are first needed.

        Args:
            trained: whose they are.
            policy_ids: policies of the run, in the order they answer; the chain is as long.
            temperature: of sampling.
            seed: of sampling; with the run's own and its temperature, query n gets the responses that evaluation
                samples for held-out query n.
            backend: `transformers`, or `vllm` for `answer_all` alone.

        Raises:
            CommandError: the checkpoint or the task's data is not as it was.
            ModelError: there is no base model any more.
        """
        self.chain = chain_of(trained, policy_ids)
        self.policy_ids = policy_ids
        self.temperature = max(temperature, MIN_TEMPERATURE)
        self.seed = seed
        self.backend = backend
        self._trained = trained

    @cached_property
    def generator(self) -> TransformersGenerator | VLLMGenerator:
        """The loaded policies.

        Raises:
            CommandError: the checkpoint or the base model is not as it was.
            EngineStartError: vLLM could not start.
            ModelError: there is no base model any more.
        """
        return load_generator(self._trained, tuple(dict.fromkeys(self.policy_ids)), self.backend, MAX_BATCH_SIZE[self.backend])

    @property
    def columns(self) -> set[str]:
        """The columns of data that the prompts hold beside the query."""
        task, templates = self.chain.task, [self.chain.task.prompt_template]
        if len(self.chain.roles) > 1 and self.chain.knowledge_transfer:
            templates += [task.observer_template, task.reference_separator]
        return set().union(*map(placeholders, templates)) - {"query", "reference"}

    def check(self, queries: Sequence[Query]) -> None:
        """Refuses queries of which a role's prompt does not fit, even without any reference.

        Raises:
            PromptError: names the first.
            TemplateError: a prompt holds a column that a query lacks.
            CommandError: one is a conversation, but the policies were trained without a chat template.
        """
        for query in queries:
            if query.history is not None and self.chain.chat is None:
                raise CommandError(
                    f"Row {query.id + 1} is a conversation, but this run was trained without a chat template "
                    "(chat=false). Give it plain texts."
                )
            ChainEpisode(self.chain, query).prompt_ids()
            for reader in dict.fromkeys(self.chain.at[1:]):
                reader.build_prompt(query, [[]])

    def answer_all(self, prompt_refs: Sequence[tuple[Query, int]]) -> list[RawSample]:
        """Lets the chain answer many queries at once, each at its own pace.

        Args:
            prompt_refs: queries, and which sample of their answers each is.

        Returns:
            In the same order.

        Raises:
            QueryTooLong: a query's prompt is longer than `max_prompt_tokens`.
            GenerationError: the engine failed.
        """
        if len(prompt_refs) > (size := MAX_BATCH_SIZE[self.backend]):
            batches = [prompt_refs[start : start + size] for start in range(0, len(prompt_refs), size)]
            return [answered for batch in batches for answered in self.answer_all(batch)]

        def ask(index: int, playing: ChainState) -> Request:
            prompt_ref, episode, responses = playing
            position = len(responses)
            sampling = self._sampling(prompt_ref.query, position, prompt_ref.sample)
            return Request(index, self.policy_ids[position], episode.prompt_ids(), sampling)

        episodes = [(PromptRef(query.id, sample), ChainEpisode(self.chain, query)) for query, sample in prompt_refs]
        game = ChainScheduler(
            episodes, 1, ask, lambda episodes: None
        )  # no prompt waits for rewards: `chain_of` refuses those
        self.generator.run_requests(game.start(), game.follow)
        return [self._answered(playing.episode) for playing in game.chains]

    def answer(
        self,
        number: int,
        text: str,
        printer: TokenPrinter | None = None,
        *,
        history: Sequence[Message] | None = None,
        sample: int = 0,
    ) -> RawSample:
        """Lets the chain answer a query.

        Args:
            number: of the query; another number draws other samples.
            text: what is asked.
            printer: tells of the responses while they are written.
            history: what was said before, where that is a conversation.
            sample: which of the query's answers it is.

        Raises:
            QueryTooLong: a role's prompt is longer than `max_prompt_tokens`; nothing is told then.
            CommandError: there is a history, but the policies were trained without a chat template.
        """
        query = Query(number, text, history=None if history is None else tuple(history))
        self.check([query])
        if printer is None:
            return self.answer_all([(query, sample)])[0]
        printer.query(text)
        episode = ChainEpisode(self.chain, query)
        for position, (role, policy) in enumerate(zip(self.chain.roles, self.policy_ids, strict=True)):
            printer.turn(role, policy)
            chain = self.chain.at[position]
            detokenizer = Detokenizer(chain.decode_whole, chain.stops)
            streamer = StepStreamer(partial(_print_tokens, printer, detokenizer))
            (response,) = cast(TransformersGenerator, self.generator).generate(
                [episode.prompt_ids()], policy, self._sampling(number, position, sample), streamer
            )
            episode.respond({"tokens": response.tokens, "length": len(response.tokens)})
            printer.print(f"{detokenizer.end()}\n")
        return self._answered(episode)

    def _sampling(self, query: int, position: int, sample: int) -> Sampling:
        seed = sampling_seed(self.seed, EVALUATION_STREAM, query, position, sample)
        return Sampling(
            self.temperature, self.chain.max_response_tokens, [seed], self.chain.at[position].stop_token_ids
        )

    def _answered(self, episode: ChainEpisode) -> RawSample:
        responses = zip(self.chain.roles, self.policy_ids, episode.completions, strict=True)
        return RawSample(
            query=episode.query.raw,
            responses=[RawResponse(role=role, policy=policy, text=text) for role, policy, text in responses],
        )


def _print_tokens(printer: TokenPrinter, detokenizer: Detokenizer, tokens: list[int]) -> None:
    printer.print(detokenizer.add(tokens))


def chain_of(trained: PolicySet, policy_ids: Sequence[str]) -> Chain:
    """Returns the chain that policies of a run play, as they read and write it.

    Args:
        trained: whose they are.
        policy_ids: in the order they answer.

    Raises:
        CommandError: the task's data is not as it was, or one of the policies cannot answer.
        ModelError: there is no base model any more.
    """
    settings = trained.settings
    task, tokenizers = load_task(settings, task_without_queries(trained.sources))
    if settings.knowledge_transfer and settings.observed == "best" and len(policy_ids) > 2:
        raise CommandError(
            "From the third one on, the policies of this run see the best of the earlier responses, and which one "
            f"that is only the reward can tell. Let fewer answer: --roles {','.join(policy_ids[:2])}."
        )
    if settings.lora is not None and AVERAGE in policy_ids:
        raise CommandError(
            "The mean of adapters has a higher rank than they, so it cannot answer here. Write it with `cory "
            "export --policy mean`, or name policies of the run with --roles."
        )
    readers = [
        policy_id if policy_id in tokenizers else settings.policy_ids[0] for policy_id in policy_ids
    ]  # the mean is no LLM
    return settings.make_chain(task, tokenizers, readers)
