"""The chain of a run's trained policies, in this process: queries in, each role's response out; many at once or one."""

from collections.abc import Sequence
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.text import Text

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.message import Message
from cory_env.tasks import Query, Task
from cory_env.tasks.task import placeholders
from launch.console.errors import CommandError
from launch.display.texts import visible
from launch.models.generators import transformers_generator, vllm_generator
from launch.models.trained import Trained
from launch.run_folder.records import Answer, Answered
from launch.run_folder.sources import task_alone
from launch.training.preflight import load_task
from policies.generation.generator import EVALUATION_STREAM, Generator, Request, Sampling, sampling_seed
from policies.generation.token_stream import Detokenizer, StepStreamer
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.model_names import AVERAGE
from policies.rollout.dealing import Deal
from policies.rollout.game import Game, InPlay

COLDEST = 1e-4
"""The temperature that stands for 0: always the likeliest token, without a division by zero."""


class TokenPrinter:
    """Prints `role (policy): response`, piece by piece; only a terminal gets colours."""

    def __init__(self, output: TextIO, *, repeat: bool) -> None:
        """Notes where to, and whether to `repeat` the query before the responses."""
        self._console = Console(file=output, highlight=False, soft_wrap=True)
        self._repeat = repeat
        self._begun = False

    def query(self, text: str) -> None:
        """Begins with a query."""
        if self._repeat:
            self.line(text, style="italic")

    def turn(self, role: str, policy: str) -> None:
        """Begins a response."""
        self._print(f"{role} ({policy}): ", style="dim")
        self._begun = False

    def say(self, text: str) -> None:
        """Goes on with the response; spaces that it starts with are left out."""
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        self._print(text)

    def line(self, text: str, style: str = "") -> None:
        """Prints a line, or what ends one."""
        self._print(f"{text}\n", style)

    def _print(self, text: str, style: str = "") -> None:
        # What a model writes must not steer the terminal.
        self._console.print(Text(visible(text), style=style), end="")


class TrainedChain:
    """Answers queries, sampled as in training: one after another with `transformers`, or many at once."""

    generator: Generator

    def __init__(
        self, trained: Trained, players: Sequence[str], temperature: float, seed: int, *, many: bool = False
    ) -> None:
        """Loads each policy once, for `answer`.

        Args:
            trained: whose they are.
            players: policies of the run, in the order they answer; the chain is as long.
            temperature: of sampling.
            seed: of sampling; with the run's own and its temperature, query n gets the responses that evaluation
                samples for held-out query n.
            many: queries are rows, with columns that prompts may hold, for `answer_all`; `load` loads the policies.

        Raises:
            CommandError: the checkpoint, the base model or the task's data is not as it was, or a prompt needs more
                than a query.
            ModelError: there is no base model any more.
        """
        self.chain = chain_of(trained, players, many=many)
        self.columns = columns_of(self.chain.task, len(self.chain.roles) > 1 and trained.settings.knowledge_transfer)
        """Those that prompts hold beside the query."""
        self.players = players
        self.temperature = max(temperature, COLDEST)
        self.seed = seed
        self._trained = trained
        if not many:
            self.load("transformers", 1)

    def load(self, backend: str, at_once: int) -> None:
        """Starts what generates, and loads the policies.

        Args:
            backend: `transformers` or `vllm`.
            at_once: queries that are answered at the same time, at most.

        Raises:
            CommandError: the checkpoint or the base model is not as it was.
            EngineStartError: vLLM could not start.
            ModelError: there is no base model any more.
        """
        policies = tuple(dict.fromkeys(self.players))
        if backend == "vllm":
            self.generator = vllm_generator(self._trained, policies, at_once)
        else:
            self.generator = transformers_generator(self._trained, policies)

    def fits(self, queries: Sequence[Query]) -> None:
        """Refuses queries of which a role's prompt does not fit, even without any reference.

        Raises:
            QueryTooLong: names the first.
            CommandError: one is a conversation, but the policies were trained without a chat template.
        """
        for query in queries:
            if query.history is not None and self.chain.chat is None:
                raise CommandError(
                    f"Row {query.id + 1} is a conversation, but this run was trained without a chat template "
                    "(chat=false). Give it plain texts."
                )
            check_prompts(self.chain, query)

    def answer_all(self, deals: Sequence[tuple[Query, int]]) -> list[Answered]:
        """Lets the chain answer many queries at once, each at its own pace.

        Args:
            deals: queries, and which sample of their answers each is.

        Returns:
            In the same order.

        Raises:
            QueryTooLong: a query's prompt is longer than `max_prompt`.
            GenerationError: the engine failed.
        """

        def ask(place: int, playing: InPlay) -> Request:
            deal, episode, responses = playing
            position = len(responses)
            sampling = self._sampling(deal.query, position, deal.sample)
            return Request(place, self.players[position], episode.prompt_ids(), sampling)

        dealt = [(Deal(query.id, sample), ChainEpisode(self.chain, query)) for query, sample in deals]
        game = Game(dealt, 1, ask, lambda episodes: None)  # no prompt waits for rewards: `__init__` refuses those
        self.generator.converse(game.start(), game.follow)
        return [self._answered(playing.episode) for playing in game.chains]

    def answer(
        self,
        number: int,
        text: str,
        printer: TokenPrinter | None = None,
        *,
        history: Sequence[Message] | None = None,
        sample: int = 0,
    ) -> Answered:
        """Lets the chain answer a query.

        Args:
            number: of the query; another number draws other samples.
            text: what is asked.
            printer: tells of the responses while they are written.
            history: what was said before, where that is a conversation.
            sample: which of the query's answers it is.

        Raises:
            QueryTooLong: a role's prompt is longer than `max_prompt`; nothing is told then.
            CommandError: there is a history, but the policies were trained without a chat template.
        """
        query = Query(number, text, history=None if history is None else tuple(history))
        self.fits([query])
        if printer is None:
            return self.answer_all([(query, sample)])[0]
        episode = ChainEpisode(self.chain, query)
        printer.query(text)
        assert isinstance(self.generator, TransformersGenerator)
        for position, (role, policy) in enumerate(zip(self.chain.roles, self.players, strict=True)):
            printer.turn(role, policy)
            chain = self.chain.at[position]
            detokenizer = Detokenizer(chain.decode_whole, chain.stops)
            streamer = StepStreamer(partial(_print_tokens, printer, detokenizer))
            sampling = self._sampling(number, position, sample)
            (response,) = self.generator.generate([episode.prompt_ids()], policy, sampling, streamer)
            episode.respond({"tokens": response.tokens, "length": len(response.tokens)})
            printer.say(detokenizer.end())
            printer.line("")
        return self._answered(episode)

    def _sampling(self, query: int, position: int, sample: int) -> Sampling:
        seed = sampling_seed(self.seed, EVALUATION_STREAM, query, position, sample)
        return Sampling(self.temperature, self.chain.max_response, [seed], self.chain.at[position].stop_token_ids)

    def _answered(self, episode: ChainEpisode) -> Answered:
        each = zip(self.chain.roles, self.players, episode.completions, strict=True)
        responses = [Answer(role=role, policy=policy, text=text) for role, policy, text in each]
        return Answered(query=episode.query.raw, responses=responses)


def _print_tokens(printer: TokenPrinter, detokenizer: Detokenizer, tokens: list[int]) -> None:
    printer.say(detokenizer.add(tokens))


def check_prompts(chain: Chain, query: Query) -> list[int]:
    """Refuses a query that a role's prompt has no room for, even without any reference.

    Returns:
        The first prompt, in token ids.

    Raises:
        PromptError: the prompt does not fit, or holds a token that the model has no embedding for.
        ChatError: the chat template cannot render it.
    """
    first = ChainEpisode(chain, query).prompt_ids()
    for reader in dict.fromkeys(chain.at[1:]):
        reader.build_prompt(query, [[]])
    return first


def chain_of(trained: Trained, players: Sequence[str], *, many: bool = False) -> Chain:
    """Returns the chain that policies of a run play, as they read and write it.

    Args:
        trained: whose they are.
        players: in the order they answer.
        many: queries are rows, with columns that prompts may hold.

    Raises:
        CommandError: the task's data is not as it was, a prompt needs more than a query, or one of them cannot answer.
        ModelError: there is no base model any more.
    """
    settings = trained.settings
    task, tokenizers = load_task(settings, task_alone(trained.sources))
    if not many:
        _check_prompts(task, settings.knowledge_transfer and len(players) > 1)
    if settings.knowledge_transfer and settings.observed == "best" and len(players) > 2:
        raise CommandError(
            "From the third one on, the policies of this run see the best of the earlier responses, and which one "
            f"that is only the reward can tell. Let fewer answer: --roles {','.join(players[:2])}."
        )
    if settings.lora is not None and AVERAGE in players:
        raise CommandError(
            "The mean of adapters has a higher rank than they, so it cannot answer here. Write it with `cory "
            "export --policy mean`, or name policies of the run with --roles."
        )
    read_by = [player if player in tokenizers else settings.modules[0] for player in players]  # the mean is no LLM
    return settings.make_chain(task, tokenizers, read_by)


def _check_prompts(task: Task, later: bool) -> None:
    """Refuses prompts that hold columns of the data, which a query alone does not have.

    Raises:
        CommandError: names the columns.
    """
    names = columns_of(task, later)
    if names:
        raise CommandError(
            f"The prompts of this run hold {', '.join(f'{{{name}}}' for name in sorted(names))} from its data beside "
            "the query, so a query alone cannot be answered. Give it rows with these columns, by --in FILE."
        )


def columns_of(task: Task, later: bool) -> set[str]:
    """Returns the columns that the prompts of a task hold beside the query; of later roles too, or of the first."""
    templates = (task.observer_template, task.reference_separator) if later else ()
    return set(placeholders(task.prompt_template)).union(*map(placeholders, templates)) - {"query", "reference"}
