"""A game of two agents with different information: one sees a number and sends a sign, the other one guesses it.

    env: cory_env.text_envs.signals:game

A sender sees a secret number from 1 to 6 and writes a number other than it. A receiver sees only that sign, and writes
its guess. Both get 1 if the guess is the secret, else 0 (Lewis' signalling game, without the sign that says it all). So
they need a code: an assignment of signs to secrets that both know.
"""

import random
from typing import Any, ClassVar

from cory_env.text_envs.base import TurnBasedEnv

SENDER, RECEIVER = "sender", "receiver"
SYMBOLS = "123456"

SENDER_TEXT = (
    "Your partner has to guess the number {secret}, but sees only one number from 1 to 6 that you write, and not "
    "{secret} itself. Write that number, and nothing else."
)
RECEIVER_TEXT = (
    "Your partner has a secret number from 1 to 6 and sent you {sign}, which is another number. Write the secret "
    "number, and nothing else."
)


class game(TurnBasedEnv):
    """`rounds` rounds of a sign and a guess."""

    metadata: ClassVar[dict[str, Any]] = {"name": "signals_v0", "is_parallelizable": False}

    def __init__(self, rounds: str = "1", prompts: str = "words") -> None:
        """Makes the environment.

        Args:
            rounds: Number of rounds; the secrets are drawn independently.
            prompts: `words`, for models that follow instructions; or `marks`, a few characters for the bundled
                `sudoku-llama-tiny`.

        Raises:
            ValueError: `rounds` is no number above 0, or `prompts` is neither of the two.
        """
        super().__init__(SENDER, RECEIVER)
        if prompts not in ("words", "marks") or int(rounds) < 1:
            raise ValueError(f"rounds={rounds} must be at least 1, and prompts={prompts} must be words or marks.")
        self.rounds, self.prompts = int(rounds), prompts

    def start(self, seed: int) -> None:
        """Draws the secrets of a seed."""
        self.secrets = random.Random(f"signals {seed}").choices(SYMBOLS, k=self.rounds)
        self.round, self.sign = 0, ""

    def observe(self, agent: str) -> str:
        """Returns the secret for the sender, and the sign for the receiver."""
        secret = self.secrets[min(self.round, self.rounds - 1)]
        if self.prompts == "marks":
            return f"{secret}=" if agent == SENDER else f"{self.sign or '.'}~="
        text = SENDER_TEXT if agent == SENDER else RECEIVER_TEXT
        return text.format(secret=secret, sign=self.sign or "nothing that is allowed")

    def act(self, agent: str, text: str) -> dict[str, float]:
        """Takes a sign or a guess: the first digit from 1 to 6 in the text."""
        number, secret = next((character for character in text if character in SYMBOLS), ""), self.secrets[self.round]
        if agent == SENDER:
            self.sign = number if number != secret else ""
            return {}
        self.round += 1
        self.is_over = self.round == self.rounds
        return dict.fromkeys(self.possible_agents, float(bool(self.sign) and number == secret))
