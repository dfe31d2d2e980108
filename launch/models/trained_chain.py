"""The chain of a run's trained policies, in this process: a query in, each role's response out as it is written."""

from collections.abc import Sequence

import torch

from cory_env.chain import Chain
from cory_env.episode import ChainEpisode
from cory_env.tasks import Query, Task
from cory_env.tasks.template import placeholders
from launch.console.errors import CommandError
from launch.models.token_printer import TokenPrinter
from launch.models.trained import Trained
from launch.run_folder.records import Answer, Answered
from launch.training.preflight import load_task
from policies.generation.generator import EVALUATION_STREAM, Sampling, sampling_seed
from policies.generation.token_stream import TokenStream
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.model_names import AVERAGE, model_path

COLDEST = 1e-4
"""The temperature that stands for 0: always the likeliest token, without a division by zero."""


class TrainedChain:
    """Answers queries, sampled as in training; it generates with `transformers`, whatever the run did with."""

    def __init__(self, trained: Trained, players: Sequence[str], temperature: float, seed: int) -> None:
        """Loads each policy once.

        Args:
            trained: whose they are.
            players: policies of the run, in the order they answer; the chain is as long.
            temperature: of sampling.
            seed: of sampling; with the run's own and its temperature, query n gets the responses that evaluation
                samples for held-out query n.

        Raises:
            CommandError: the checkpoint, the base model or the task's data is not as it was, or a prompt needs more
                than a query.
            ModelError: there is no base model any more.
        """
        self.players = players
        self.temperature = max(temperature, COLDEST)
        self.seed = seed
        self.chain = chain_of(trained, players)
        self.generator = transformers_generator(trained, tuple(dict.fromkeys(players)))

    def answer(self, number: int, text: str, printer: TokenPrinter | None = None) -> Answered:
        """Lets the chain answer a query.

        Args:
            number: of the query; another number draws other samples.
            text: what is asked.
            printer: tells of the responses while they are written.

        Raises:
            QueryTooLong: the query's prompt is longer than `max_prompt`.
        """
        episode = ChainEpisode(self.chain, Query(number, text))
        episode.prompt_ids()  # refuses what is too long before anything is told
        if printer is not None:
            printer.query(text)
        responses: list[Answer] = []
        for position, (role, policy) in enumerate(zip(self.chain.roles, self.players, strict=True)):
            stream = None
            if printer is not None:
                printer.turn(role, policy)
                stream = TokenStream(self.chain.at[position].decode, printer.say)
            seed = sampling_seed(self.seed, EVALUATION_STREAM, number, position)
            ends = self.chain.at[position].stop_token_ids
            sampling = Sampling(self.temperature, self.chain.max_response, [seed], ends)
            (response,) = self.generator.generate([episode.prompt_ids()], policy, sampling, stream)
            episode.respond({"tokens": response.tokens, "length": len(response.tokens)})
            responses.append({"role": role, "policy": policy, "text": episode.completions[-1]})
            if printer is not None:
                printer.line("")
        return {"query": text, "responses": responses}


def chain_of(trained: Trained, players: Sequence[str]) -> Chain:
    """Returns the chain that policies of a run play, as they read and write it.

    Args:
        trained: whose they are.
        players: in the order they answer.

    Raises:
        CommandError: the task's data is not as it was, a prompt needs more than a query, or one of them cannot answer.
        ModelError: there is no base model any more.
    """
    settings = trained.settings
    task, tokenizers = load_task(settings)
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


def transformers_generator(trained: Trained, policies: Sequence[str]) -> TransformersGenerator:
    """Loads policies of a run, each once.

    Raises:
        CommandError: the checkpoint or the base model is not as it was.
        ModelError: there is no base model any more.
    """
    settings = trained.settings
    generator = TransformersGenerator(
        {policy: model_path(trained.base(policy)) for policy in policies},
        dtype=settings.dtype,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        trust_remote_code=settings.trust_remote_code,
        lora=settings.lora,
        quantization=settings.quantization,
    )
    for policy in policies:
        weights = trained.weights(policy)
        trained.check_base(policy, weights, generator.own[policy])
        generator.load(policy, weights, trained.update)
    return generator


def _check_prompts(task: Task, later: bool) -> None:
    """Refuses prompts that hold columns of the data, which a query alone does not have.

    Raises:
        CommandError: names the columns.
    """
    templates = (task.observer_template, task.reference_separator) if later else ()
    names = placeholders(task.prompt_template).union(*map(placeholders, templates)) - {"query", "reference"}
    if names:
        raise CommandError(
            f"The prompts of this run hold {', '.join(f'{{{name}}}' for name in sorted(names))} from its data beside "
            "the query, so a query alone cannot be answered. Export the policies, and fill in the prompts yourself."
        )
