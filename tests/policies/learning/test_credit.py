"""What agents are paid, against numbers worked out by hand."""

import sys
from pathlib import Path

import pytest
import torch

from cory_env.functions import SpecError
from policies.learning.credit import CreditError, along_chain, assign_credit, check_scheme, collective
from policies.learning.estimation import Estimation
from policies.learning.hyperparameters import Credit, Hyperparameters
from policies.learning.rows import Rows
from policies.settings.settings import Settings


@pytest.mark.parametrize(
    ("alpha", "paid"),
    [(1.0, [7.0, 7.0, 7.0]), (0.0, [1.0, 2.0, 4.0]), (-1.0, [-5.0, -3.0, 1.0]), (0.5, [4.0, 4.5, 5.5])],
)
def test_the_sum_is_the_own_reward_and_a_share_of_all_others(alpha: float, paid: list[float]) -> None:
    found = collective(torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64), alpha)
    assert found.tolist() == [paid, [0.0, 0.0, 0.0]] and found.dtype == torch.float64


def test_an_agent_alone_is_paid_its_own_reward_whatever_the_share() -> None:
    assert collective(torch.tensor([[3.0]], dtype=torch.float64), 1.0).tolist() == [[3.0]]


def rows(chains: list[int], positions: list[int], task_rewards: list[float], forks: list[int] | None = None) -> Rows:
    return {
        "chains": torch.tensor(chains),
        "forks": torch.tensor(chains if forks is None else forks),
        "positions": torch.tensor(positions),
        "task_rewards": torch.tensor(task_rewards, dtype=torch.float64),
    }


def test_rows_are_joined_by_chain_whichever_llm_played_which_role() -> None:
    found = assign_credit(
        {
            "llm_1": rows([2, 0, 1], [1, 0, 0], [4.0, 1.0, 2.0]),  # not in the order of the chains
            "llm_2": rows([0, 1, 2], [1, 1, 0], [10.0, 20.0, 40.0]),
        },
        Credit(partner_reward=0.5),
        {},
    )
    assert found["llm_1"].tolist() == [4 + 20, 1 + 5, 2 + 10]
    assert found["llm_2"].tolist() == [10 + 0.5, 20 + 1, 40 + 2]
    assert found["llm_1"].dtype == torch.float32


def test_one_llm_may_have_several_rows_of_a_chain() -> None:
    found = assign_credit({"llm_1": rows([0, 0, 1, 1], [0, 1, 0, 1], [1.0, 2.0, 3.0, 4.0])}, Credit(), {})
    assert found["llm_1"].tolist() == [3.0, 3.0, 7.0, 7.0]


def test_a_pioneer_is_paid_the_mean_over_the_chains_that_go_on_from_its_response() -> None:
    pioneers = rows([0, 2], [0, 0], [1.0, 5.0])
    observers = rows([0, 1, 2, 3, 4], [1] * 5, [10.0, 20.0, 1.0, 2.0, 6.0], [0, 0, 2, 2, 2])
    llms = {"llm_1": pioneers, "llm_2": observers}
    found = assign_credit(llms, Credit(partner_reward=0.5), {})
    assert found["llm_1"].tolist() == [1 + 0.5 * 15, 5 + 0.5 * 3]
    assert found["llm_2"].tolist() == [10.5, 20.5, 3.5, 4.5, 8.5]
    found = assign_credit(llms, Credit(reward_scope="last"), {})
    assert found["llm_1"].tolist() == [15, 3] and found["llm_2"].tolist() == [10, 20, 1, 2, 6]


def corner(chain_gamma: float, chain_lam: float) -> list[list[float]]:
    """Two chains of three; the critics expect 10 and 20, and each later agent brings in what it is paid less 0.5."""
    values = {1: 10.0, 2: 20.0}
    task_rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, -1.0]], dtype=torch.float64)
    paid = along_chain(
        task_rewards,
        lambda position, paid: (torch.full_like(paid, values[position]), paid - 0.5),
        chain_gamma,
        chain_lam,
    )
    assert task_rewards.tolist() == [[1.0, 2.0, 4.0], [3.0, 0.0, -1.0]]  # what was given is left as it was
    return [[round(x, 9) for x in row] for row in paid.tolist()]


def test_the_corners_of_the_chain_are_own_reward_reward_to_go_and_bootstrap() -> None:
    assert corner(0.0, 1.0) == corner(0.0, 0.3) == [[1.0, 2.0, 4.0], [3.0, 0.0, -1.0]]
    # The last brings in 3.5 and -1.5; so the second is paid 5.5 and -1.5, and brings in 5 and -2.
    assert corner(1.0, 1.0) == [[6.0, 5.5, 4.0], [1.0, -1.5, -1.0]]
    assert corner(1.0, 0.0) == [[11.0, 22.0, 4.0], [13.0, 20.0, -1.0]]
    # 2 + 0.5 (0.75 * 20 + 0.25 * 3.5) = 9.9375; 1 + 0.5 (0.75 * 10 + 0.25 * 9.4375) = 5.9296875.
    assert corner(0.5, 0.25)[0] == [5.9296875, 9.9375, 4.0]


def scored(each: Rows, values: float) -> Rows:
    """With two tokens a response, of which the second of odd chains is padding, and a KL of 0.1 nats a token."""
    mask = torch.ones(len(each["chains"]), 2)
    mask[each["chains"] % 2 == 1, 1] = 0.0
    logprobs = torch.full_like(mask, -1.0)
    return {**each, "mask": mask, "logprobs": logprobs, "reference_logprobs": logprobs - 0.1, "values": mask * values}


def estimations(**others: object) -> dict[str, Estimation]:
    return {name: Estimation(Hyperparameters(kl_coef=2.0, lam=1.0, **others)) for name in ("llm_1", "llm_2")}  # type: ignore[arg-type]


CHAINS = {
    "llm_1": scored(rows([1, 0], [0, 1], [3.0, 5.0]), values=7.0),
    "llm_2": scored(rows([0, 1], [0, 1], [1.0, 2.0]), values=9.0),
}
"""The first chain is of llm_2 then llm_1, the second of llm_1 then llm_2."""


def test_the_next_agents_critic_and_return_cross_from_one_llm_to_the_other() -> None:
    to_go = assign_credit(CHAINS, Credit("chain", chain_gamma=1.0, chain_lam=1.0), estimations())
    assert to_go["llm_2"].tolist() == pytest.approx([1 + 5 - 2 * 0.2, 2.0])  # two tokens of KL 0.1, weighed by 2
    assert to_go["llm_1"].tolist() == pytest.approx([3 + 2 - 2 * 0.1, 5.0])
    expected = assign_credit(CHAINS, Credit("chain", chain_gamma=0.5, chain_lam=0.0), estimations())
    assert expected["llm_2"].tolist() == pytest.approx([1 + 0.5 * 7, 2.0])
    assert expected["llm_1"].tolist() == pytest.approx([3 + 0.5 * 9, 5.0])


def test_without_a_critic_what_comes_after_is_paid_as_it_came() -> None:
    found = assign_credit(CHAINS, Credit("chain"), estimations(advantage="rloo"))
    assert found["llm_2"].tolist() == pytest.approx([1 + 5 - 2 * 0.2, 2.0])
    in_loss = assign_credit(CHAINS, Credit("chain"), estimations(advantage="grpo", kl_estimator="k3"))
    assert in_loss["llm_2"].tolist() == [6.0, 2.0]  # there the KL is no part of the reward


def test_the_chain_without_what_comes_after_is_the_sum_without_a_share() -> None:
    own = assign_credit(CHAINS, Credit("chain", chain_gamma=0.0), estimations())
    alone = assign_credit(CHAINS, Credit("sum", partner_reward=0.0), estimations())
    assert {name: paid.tolist() for name, paid in own.items()} == {name: paid.tolist() for name, paid in alone.items()}


def test_a_team_reward_is_the_last_answers_alone_and_reaches_the_others_by_the_scheme() -> None:
    everyone = assign_credit(CHAINS, Credit(reward_scope="last"), {})
    assert everyone["llm_2"].tolist() == [5.0, 2.0] and everyone["llm_1"].tolist() == [2.0, 5.0]
    halves = assign_credit(CHAINS, Credit(partner_reward=0.5, reward_scope="last"), {})
    assert halves["llm_2"].tolist() == [2.5, 2.0] and halves["llm_1"].tolist() == [1.0, 5.0]
    to_go = assign_credit(CHAINS, Credit("chain", reward_scope="last"), estimations())
    assert to_go["llm_2"].tolist() == pytest.approx([5 - 2 * 0.2, 2.0])
    assert to_go["llm_1"].tolist() == pytest.approx([2 - 2 * 0.1, 5.0])
    expected = assign_credit(CHAINS, Credit("chain", chain_lam=0.0, reward_scope="last"), estimations())
    assert expected["llm_2"].tolist() == pytest.approx([7.0, 2.0])  # what the observer's critic expects
    assert CHAINS["llm_2"]["task_rewards"].tolist() == [1.0, 2.0]  # what is reported stays as it was


def test_an_agent_alone_is_the_last_one() -> None:
    alone = {"llm_1": rows([0, 1], [0, 0], [3.0, 4.0])}
    assert assign_credit(alone, Credit(reward_scope="last"), {})["llm_1"].tolist() == [3.0, 4.0]


SCHEMES = """
def improvement(task_rewards, share="1"):
    paid = task_rewards.clone()
    paid[:, 1:] += float(share) * (task_rewards[:, 1:] - task_rewards[:, :-1])
    task_rewards.zero_()
    return paid

def of_team(task_rewards):
    return task_rewards.mean(1, keepdim=True).expand_as(task_rewards)

def of_first(task_rewards):
    return task_rewards[:, 0]

def fails(task_rewards):
    raise KeyError("nobody")

def infinite(task_rewards):
    return task_rewards / 0
"""


def own(name: str) -> Credit:
    return Settings(credit=f"own_schemes:{name}").credit_assignment


def test_a_scheme_of_one_s_own_is_a_function_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_schemes.py").write_text(SCHEMES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    played = {"llm_1": rows([0, 1], [0, 0], [1.0, 2.0]), "llm_2": rows([0, 1], [1, 1], [4.0, 0.0])}
    paid = assign_credit(played, own("improvement?share=0.5"), {})
    assert paid["llm_1"].tolist() == [1.0, 2.0] and paid["llm_2"].tolist() == [5.5, -1.0]
    last = assign_credit(played, own("improvement")._replace(reward_scope="last"), {})
    assert last["llm_1"].tolist() == [0.0, 0.0] and last["llm_2"].tolist() == [8.0, 0.0]
    forked = {"llm_1": rows([0], [0], [2.0]), "llm_2": rows([0, 1], [1, 1], [4.0, 0.0], forks=[0, 0])}
    assert assign_credit(forked, own("of_team"), {})["llm_2"].tolist() == [
        3.0,
        1.0,
    ]  # though what it returns shares memory
    check_scheme(own("improvement"), 3)
    for name, why in (
        ("of_first", r"returned \(2,\) for task rewards of \(2, 3\)"),
        ("fails", "raised KeyError: 'nobody'"),
        ("infinite", "returned NaN or infinity"),
    ):
        with pytest.raises(CreditError, match=why):
            check_scheme(own(name), 3)
    with pytest.raises(SpecError, match=r"has no function 'nowhere'. Correct the credit's name"):
        own("nowhere")
