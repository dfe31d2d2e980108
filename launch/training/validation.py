"""Checks a task without a model: its queries, prompts and reward.

All queries of all splits are checked. The reward runs in its own process, as in training. It gets a few responses,
including an empty one (a model may end at once) and the texts of the query's columns. If all get the same reward, that
is a warning. It also gets every gold answer of the task: as the right answer to its query, and as a wrong answer to the
previous query.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from cory_env.chain import Chain
from cory_env.chat import ChatError
from cory_env.episode import ChainEpisode
from cory_env.message import is_blank
from cory_env.prompt_encoder import NoEmbeddingError
from cory_env.prompt_lengths import longest_prompts, max_shown_tokens
from cory_env.rewarding.episodes import give_feedback
from cory_env.rewarding.examples import example_answers, find_constant_rewards, gold_answers, reward_answers
from cory_env.rewarding.worker import RewardError, RewardWorker
from cory_env.tasks import Query, Split, Task
from cory_env.tasks.rows import PROVIDED_ARGUMENTS
from cory_env.tasks.turns import NO_ANSWER, Feedback

NUM_SAMPLES = 3  # queries with example rewards in the report
MAX_FEEDBACK = 100  # queries whose feedback is checked


@dataclass
class ValidationReport:
    """The result of `validate`.

    Attributes:
        task: The task's name.
        kind: What it is.
        facts: Facts about the task, one sentence or number each.
        prompts: Per role, the prompt of the first query as text, and its length in tokens.
        rewards: Example task rewards, as (role, query, completion, reward).
        warnings: Problems that do not prevent training.
        problems: Problems to fix before training.
        has_constant_reward: Whether a reward did not distinguish any of the example answers.
    """

    task: str
    facts: list[str] = field(default_factory=list)
    prompts: dict[str, tuple[str, int]] = field(default_factory=dict)
    rewards: list[tuple[str, str, str, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    has_constant_reward: bool = False
    kind: str = "task"

    @property
    def ok(self) -> bool:
        """Whether the task can be trained on."""
        return not self.problems

    def count(self, split: Split, queries: Sequence[Query], wrong: Sequence[Query], problem: str, advice: str) -> None:
        """Adds a problem of a split if any query has it."""
        if wrong:
            self.problems.append(
                f"{len(wrong)} of {len(queries)} queries of {split} {problem}, the first is query {wrong[0].id}, "
                f"{wrong[0].text[:60]!r}. {advice}"
            )

    def __str__(self) -> str:
        lines = [f"{self.kind.capitalize()} {self.task}"]
        lines += [f"  {fact}" for fact in self.facts]
        for role, (prompt, length) in self.prompts.items():
            lines += ["", f"Prompt of {role}, {length} tokens:"] + [f"  | {line}" for line in prompt.split("\n")]
        if self.rewards:
            lines += ["", "Rewards:"]
            for role, query, text, value in self.rewards:
                lines.append(f"  {value:>9.4f}  {role}: {query[:80]!r} + {text!r}")
        for title, sentences in (("Warnings", self.warnings), ("Problems", self.problems)):
            if sentences:
                lines += ["", f"{title}:"] + [f"  - {sentence}" for sentence in sentences]
        result = f"The {self.kind} {'is sound' if self.ok else 'cannot be trained on yet'}."
        if self.ok and self.has_constant_reward:
            result = "Check the reward before training: it did not distinguish the example answers (see Warnings)."
        return "\n".join([*lines, "", result])


def validate(chain: Chain, reward_timeout: float) -> ValidationReport:
    """Checks a chain's task and shows example prompts and rewards.

    Errors in the task are not raised, but listed in the report's `problems`.
    """
    task = chain.task
    report = ValidationReport(task.name)
    check_queries(task, report)
    try:
        check_lengths(chain, report)
        check_chat(chain, report)
    except (NoEmbeddingError, ChatError) as error:  # ChatError: about a conversation in the data
        report.problems.append(str(error))
    if report.ok:
        show_prompts(chain, report)
        with open_rewards(chain, reward_timeout) as worker:
            try:
                check_columns(chain, worker.start(), report)
                if report.ok:
                    show_rewards(chain, worker, report)
                    check_answers(chain, worker, report)
                    if task.feedback is not None and any(p.role.produces_response for p in chain.positions):
                        check_feedback(chain, worker, report)
            except RewardError as error:
                report.problems.append(str(error))
    return report


def open_rewards(chain: Chain, timeout: float) -> RewardWorker:
    """Returns the rewards and the feedback of a chain."""
    task = chain.task
    return RewardWorker(task.reward, feedback=task.feedback, role_rewards=chain.role_rewards, timeout=timeout)


def check_queries(task: Task, report: ValidationReport) -> None:
    """Finds empty splits, empty queries, wrong numbering, and training queries that are also held out."""
    for split in task.splits:
        queries = task.queries(split)
        report.facts.append(f"{split}: {len(queries)} queries")
        if not queries:
            report.problems.append(f"The {split} split has no queries. Add rows, or set another file.")
        empty = [query for query in queries if is_blank(query.text)]
        report.count(split, queries, empty, "are empty", "Remove them.")
        if any(query.id != index for index, query in enumerate(queries)):
            report.problems.append(f"The queries of {split} are not numbered 0, 1, 2, …. Number them in their order.")
    held_out = {query.text for split in task.splits if split != "train" for query in task.queries(split)}
    if shared := {query.text for query in task.train} & held_out:
        report.warnings.append(
            f"{len(shared)} training queries are also held out, such as {min(shared)[:60]!r}, so held-out rewards will "
            "be too optimistic."
        )


def check_lengths(chain: Chain, report: ValidationReport) -> None:
    """Finds queries whose prompts are too long, and queries whose references may be truncated."""
    references = max_shown_tokens(chain)
    for split in chain.task.splits:
        queries = chain.task.queries(split)
        if not queries:
            continue
        lengths, full_lengths = longest_prompts(chain, queries)
        needed = max(full_lengths) + references
        report.facts.append(
            f"{split}: prompts have up to {max(full_lengths)} tokens, and references up to {references} more"
        )
        empty = [query for query, length in zip(queries, lengths, strict=True) if not length]
        report.count(split, queries, empty, "have prompts without tokens", "Correct or remove them.")
        too_long = [query for query, length in zip(queries, lengths, strict=True) if length > chain.max_prompt_tokens]
        problem = f"do not fit max_prompt_tokens = {chain.max_prompt_tokens}"
        advice = f"Raise max_prompt_tokens to {max(lengths)}, or remove them."
        report.count(split, queries, too_long, problem, advice)
        num_truncated = sum(length + references > chain.max_prompt_tokens for length in full_lengths) - len(too_long)
        if num_truncated:
            report.warnings.append(
                f"{num_truncated} queries of {split} leave too little room for full-length references, which will be "
                f"truncated. Set max_prompt_tokens to {needed} to prevent that."
            )


def check_chat(chain: Chain, report: ValidationReport) -> None:
    """Finds queries that end with the start tag of a thought, and prompts that do not begin with exactly one BOS."""
    encoder = chain.encoders[0]
    tokenizer, tags = encoder.tokenizer, encoder.tags
    if tags and (number := sum(query.text.rstrip().endswith(tags.start) for query in chain.task.train)):
        report.warnings.append(f"{number} training queries end with {tags.start}. Only a template begins a thought.")
    bos = tokenizer.bos_token_id
    if bos is None or not chain.task.train:
        return
    count = len(list(takewhile(lambda token: token == bos, encoder.encode_prompts(chain.task.train[:1])[0])))
    if count > 1 or (not count and tokenizer("a")["input_ids"][:1] == [bos]):
        cause = "`prompt` and the tokenizer" if encoder.chat is None else "the chat template"
        report.warnings.append(
            f"Prompts begin with {count or 'no'} BOS tokens, {tokenizer.bos_token}, because of {cause}. Models expect "
            "one."
        )


def check_columns(chain: Chain, needed: Sequence[str], report: ValidationReport) -> None:
    """Finds queries without a value in `needed`, the columns that the rewards or the feedback require."""
    task = chain.task
    functions = f"the reward {' or '.join([task.reward, *chain.role_rewards.values()])}"
    functions += f" or the feedback {task.feedback}" if task.feedback else ""
    for split in task.splits:
        queries = task.queries(split)
        for name in (name for name in needed if name not in PROVIDED_ARGUMENTS):
            report.count(
                split,
                queries,
                [query for query in queries if query.columns.get(name) is None],
                f"have no value in the column {name!r}, which {functions} requires",
                f"Add it to the data, or give the argument {name} a default; the function then gets None for missing "
                "values. The query itself is the argument `query` or `prompts`.",
            )


def show_prompts(chain: Chain, report: ValidationReport) -> None:
    """Adds each role's prompt for the first training query, with placeholders as responses."""

    def give_placeholders(episode: ChainEpisode) -> None:
        positions = chain.positions[len(episode.feedback) : len(episode.responses)]
        episode.note_feedback(
            [
                f"<feedback on the {position.agent}'s response>" if position.role.produces_response else NO_ANSWER
                for position in positions
            ]
        )

    encoder, episode = chain.encoders[0], ChainEpisode(chain, chain.task.train[0])
    while episode.agent is not None:
        _prepare(episode, give_placeholders)
        prompt = episode.prompt_ids()
        report.prompts[episode.agent] = (encoder.tokenizer.decode(prompt), len(prompt))
        (response,) = encoder.control.encode_text([f" <{episode.agent}'s response>"])
        _respond(episode, response)


def show_rewards(chain: Chain, worker: RewardWorker, report: ValidationReport) -> None:
    """Adds the rewards of a few example answers, and warns about a reward that is the same for all of them."""
    queries = chain.task.train[:NUM_SAMPLES]
    shown = [(query, chain.task.gold(query) or " " + query.text) for query in queries] + [(queries[0], "")]
    answers = [*shown, *example_answers(chain.task, queries)]
    rewards = {
        position: reward_answers(chain, worker, answers, position)
        for position in range(len(chain.agents))
        if chain.positions[position].role.has_reward
    }
    for position, values in rewards.items():
        for (query, text), value in zip(shown, values, strict=False):
            assert value is not None  # this worker stops on errors
            report.rewards.append((chain.agents[position], query.text, text, value))
    warnings = find_constant_rewards(chain, answers, rewards)
    report.warnings += warnings
    report.has_constant_reward = bool(warnings)


def check_answers(chain: Chain, worker: RewardWorker, report: ValidationReport) -> None:
    """Finds gold answers with a reward other than 1.0 or too long for a response, and wrong answers with reward 1.0.

    The wrong answer to a query is the gold answer of the next query, if it differs.
    """
    for split in chain.task.splits:
        answers = gold_answers(chain.task, split)
        if not answers:
            continue
        rewards = reward_answers(chain, worker, answers)
        missed = [(*answer, reward) for answer, reward in zip(answers, rewards, strict=True) if reward != 1.0]
        report.facts.append(f"{split}: {len(answers) - len(missed)} of {len(answers)} gold answers score 1.0")
        if missed:
            query, gold, reward = missed[0]
            report.problems.append(
                f"{len(missed)} gold answers of {split} do not score 1.0, the first is {gold[:80]!r} to query "
                f"{query.id} with {reward}. Correct the reward or the data."
            )
        lengths = map(len, chain.encoders[0].control.encode_text([gold for _, gold in answers]))
        if too_long := [length for length in lengths if length > chain.max_response_tokens]:
            report.warnings.append(
                f"{len(too_long)} gold answers of {split} do not fit max_response_tokens = "
                f"{chain.max_response_tokens}. Raise it to {max(too_long)} or more."
            )
        wrong = _wrong_answers(answers)
        rewards = reward_answers(chain, worker, wrong)
        accepted = [answer for answer, reward in zip(wrong, rewards, strict=True) if reward == 1.0]
        if wrong:
            report.facts.append(
                f"{split}: {len(accepted)} of {len(wrong)} wrong answers (those of the next query) score 1.0"
            )
        if accepted:
            query, other = accepted[0]
            report.problems.append(
                f"{len(accepted)} wrong answers to queries of {split} score 1.0, the first is {other[:80]!r} to query "
                f"{query.id}, {query.text[:60]!r}. Correct the reward or the data."
            )


def check_feedback(chain: Chain, worker: RewardWorker, report: ValidationReport) -> None:
    """Adds prompts with feedback on wrong answers, and warns if feedback contains the right answer.

    The wrong answer to a query is the gold answer of the next query, if it differs; without gold answers, the query.
    """
    queries = chain.task.train
    answers = [(query, chain.task.gold(query) or " " + query.text) for query in queries]
    wrong = _wrong_answers(answers)[:MAX_FEEDBACK]
    encoder = chain.encoders[0]
    tokens = encoder.control.encode_text([text for _, text in wrong])
    answer_position = next(k for k, position in enumerate(chain.positions) if position.role.produces_response)
    episodes = [ChainEpisode(chain, query) for query, _ in wrong]

    def give(episode: ChainEpisode) -> None:
        give_feedback(worker, [episode])

    def respond_up_to(end: int, episode: ChainEpisode, tokens: Sequence[int]) -> None:
        while len(episode.responses) < end and episode.agent is not None:
            _prepare(episode, give)
            _respond(episode, tokens)

    for episode, ids in zip(episodes, tokens, strict=True):
        respond_up_to(answer_position + 1, episode, ids)
    give_feedback(worker, episodes)
    feedback = [episode.feedback[answer_position] for episode in episodes]
    leaking = [k for k, episode in enumerate(episodes) if _shows_gold(chain.task, episode, feedback[k])]
    if len(leaking) > len(episodes) / 2:  # a few may contain a short answer by chance
        query = episodes[leaking[0]].query
        report.warnings.append(
            f"The feedback contains the gold answer for {len(leaking)} of {len(episodes)} wrong answers, such as "
            f"{feedback[leaking[0]]!r:.80} for query {query.id}, {query.text[:60]!r}. If it is in the prompt, agents "
            "can copy it."
        )
    report.facts.append(f"feedback: nothing to correct in {feedback.count(None)} of {len(episodes)} wrong answers")
    reader = next((k for k in range(len(chain.positions)) if chain.shows_feedback(k)), None)
    if reader is None:
        if chain.knowledge_transfer:
            report.warnings.append("No prompt contains {feedback}. Add it to a prompt, unless it only stops chains.")
        return
    for episode, ids in zip(episodes[:NUM_SAMPLES], tokens, strict=False):
        respond_up_to(reader, episode, ids)
        if episode.agent is None:
            continue
        _prepare(episode, give)
        prompt = episode.prompt_ids()
        name = f"{episode.agent} after a wrong response to query {episode.query.id}"
        report.prompts[name] = (encoder.tokenizer.decode(prompt), len(prompt))
        if episode.prompt().is_truncated:
            report.warnings.append(
                f"The prompt of {name} is truncated. Raise max_prompt_tokens, or shorten the feedback."
            )


def _wrong_answers(answers: Sequence[tuple[Query, str]]) -> list[tuple[Query, str]]:
    """Returns the queries with the answer to the next query, if it differs from theirs."""
    return [
        (query, answer)
        for (query, right), (_, answer) in zip(answers, [*answers[1:], *answers[:1]], strict=True)
        if answer != right
    ]


def _prepare(episode: ChainEpisode, give: Callable[[ChainEpisode], None]) -> None:
    """Gives feedback that the next prompt depends on."""
    if episode.is_waiting:
        give(episode)


def _respond(episode: ChainEpisode, tokens: Sequence[int]) -> None:
    """Makes the next agent respond with these tokens."""
    limit = episode.chain.response_limits[len(episode.responses)]
    response = episode.answer_tokens(tokens)[:limit] or list(episode.chain.encoders[0].stop_token_ids[:1])
    episode.respond({"tokens": response, "length": len(response)})


def _shows_gold(task: Task, episode: ChainEpisode, feedback: Feedback) -> bool:
    """Whether the feedback on a wrong last response contains the right answer, which query and response do not."""
    gold = (task.gold(episode.query) or "").strip()
    pattern = re.compile(rf"(?<!\w){re.escape(gold)}(?!\w)")
    texts = (feedback, episode.query.text, episode.completions[-1])
    in_feedback, *elsewhere = (isinstance(text, str) and bool(pattern.search(text)) for text in texts)
    return bool(gold) and in_feedback and not any(elsewhere)
