"""Checks an environment without a model: PettingZoo's own test, and an episode of each split."""

from cory_env.chain import Chain
from cory_env.rewarding.worker import RewardError
from cory_env.text_envs.episode import EnvEpisode
from cory_env.text_envs.pool import EnvPool
from launch.training.validation import ValidationReport
from policies.settings.settings import Settings


def validate_env(chain: Chain, settings: Settings) -> ValidationReport:
    """Checks the environment of a chain, and shows the prompts of an episode with placeholders as responses.

    Its errors are not raised, but listed in the report's `problems`.
    """
    assert settings.env is not None
    report = ValidationReport(settings.env, kind="environment")
    unit = "seeds" if settings.data is None else "rows, with seeds"
    report.facts.append(f"agents: {', '.join(chain.agents)}")
    with EnvPool(settings.env, agents=settings.agents, timeout=settings.reward_timeout) as pool:
        try:
            if error := pool.check(EnvEpisode(chain, chain.task.train[0]).row):
                end = "\n" if "\n" in error else ". "  # a traceback ends with its own line
                report.problems.append(f"The environment {error}{end}Correct it.")
            for split in chain.task.splits:
                seeds = chain.task.queries(split)
                episode = run_episode(pool, EnvEpisode(chain, seeds[0]))
                returns = ", ".join(f"{agent} {value:g}" for agent, value in episode.returns().items())
                report.facts.append(
                    f"{split}: {len(seeds)} {unit} from {episode.seed}; the first has {len(episode.responses)} turns"
                    f"{' (truncated)' if episode.is_truncated else ''} and returns {returns}"
                )
                if split == "train":
                    show_turns(episode, report)
        except RewardError as error:
            report.problems.append(str(error))
    return report


def run_episode(pool: EnvPool, episode: EnvEpisode) -> EnvEpisode:
    """Runs an episode to its end; the responses are placeholders such as `<solver's response>`."""
    while episode.is_waiting:
        pool.submit(0, episode)
        pool.collect("all")
        if episode.agent is not None:
            turn = len(episode.responses)
            (tokens,) = episode.encoder(turn).control.encode_text([f"<{episode.agent}'s response>"])
            tokens = tokens[: episode.chain.response_limits[episode.position(turn)]]
            episode.respond({"tokens": tokens, "length": len(tokens)})
    return episode


def show_turns(episode: EnvEpisode, report: ValidationReport) -> None:
    """Adds the first and the last prompt of each agent."""
    for agent in dict.fromkeys(episode.agents):
        turns = [turn for turn, name in enumerate(episode.agents) if name == agent]
        for number, turn in {1: turns[0], len(turns): turns[-1]}.items():
            tokens = episode.prompts[turn].tokens
            name = agent if len(turns) == 1 else f"{agent} in turn {number}"
            report.prompts[name] = (episode.encoder(turn).tokenizer.decode(tokens), len(tokens))
