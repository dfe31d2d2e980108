"""`model=ID@REVISION`: a commit, tag or branch of a model on the hub, from a local cache without network."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from cory_env.tokenizer import TokenizerError, load_tokenizer
from launch.console.errors import CommandError
from launch.run_folder.sources import collect_sources
from launch.training.preflight import load_task
from policies.models.fingerprint import COMMIT_KEY, HUB_KEY, model_files
from policies.models.language_model import init_empty, load_language_model, meta_model, shared_base, stop_token_ids
from policies.models.revision import split_revision
from policies.models.stored_weights import StoredWeights
from policies.rllib.causal_lm_module import CausalLMModule, module_config
from policies.settings.settings import Settings
from tests.paper import make_settings

HUB_ID = "owner/model"
MAIN, TAGGED = "1" * 40, "2" * 40
TOKEN = "<new>"
"""A token that only the tagged commit has."""


@pytest.fixture(scope="module")
def commits(small_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, float]]:
    """A hub cache with two commits of a model, `main` and `v2`; commit → an entry of its weights."""
    from huggingface_hub import constants

    cache = tmp_path_factory.mktemp("cache")
    repository = cache / f"models--{HUB_ID.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", MAIN), ("v2", TAGGED)):
        (repository / "refs" / name).write_text(commit)
        shutil.copytree(small_model, repository / "snapshots" / commit)
    folder = repository / "snapshots" / TAGGED
    model = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.wpe.weight += 1
    model.generation_config.eos_token_id = [0, 7]
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([TOKEN])
    tokenizer.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        weights = {
            commit: first_weight(GPT2LMHeadModel.from_pretrained(repository / "snapshots" / commit))
            for commit in (MAIN, TAGGED)
        }
        assert weights[MAIN] + 1 == pytest.approx(weights[TAGGED])
        yield weights


def first_weight(model: torch.nn.Module) -> float:
    return float(model.get_parameter("transformer.wpe.weight").detach()[0, 0])


def settings(**values: object) -> Settings:
    return make_settings(
        {"model": f"{HUB_ID}@v2", "num_agents": 1, "backend": "transformers", "minibatch_size": 1} | values
    )


def test_a_path_names_the_revision_of_a_hub_model(tmp_path: Path) -> None:
    assert settings().model_paths == {"llm_1": "owner/model@v2"}
    assert split_revision("owner/model@refs/pr/1") == (HUB_ID, {"revision": "refs/pr/1"})
    assert split_revision(HUB_ID) == (HUB_ID, {})
    (folder := tmp_path / "a@b").mkdir()
    assert split_revision(str(folder)) == (str(folder), {})
    assert settings(model=str(folder)).model_paths == {"llm_1": str(folder)}


@pytest.mark.parametrize("revision", ["v2", TAGGED])
def test_weights_and_tokenizer_come_from_the_revision(commits: dict[str, float], revision: str) -> None:
    path = settings(model=f"{HUB_ID}@{revision}").model_paths["llm_1"]
    assert TOKEN in load_tokenizer(path).get_vocab() and TOKEN not in load_tokenizer(HUB_ID).get_vocab()
    assert first_weight(load_language_model(path)) == commits[TAGGED] != first_weight(load_language_model(HUB_ID))
    stored = StoredWeights(path)
    assert float(stored.rows("transformer.wpe.weight", 0, 1)[0, 0]) == commits[TAGGED]
    assert stop_token_ids(path) == [0, 7] and stop_token_ids(HUB_ID) == [0]
    for empty in (meta_model(path), init_empty(path)):
        assert empty.get_parameter("transformer.wpe.weight").shape == (128, 64)
    assert model_files(path) == {HUB_KEY: HUB_ID, COMMIT_KEY: TAGGED}
    with pytest.raises(TokenizerError, match="'owner/model@v3' cannot be loaded"):
        load_tokenizer(f"{HUB_ID}@v3")


def test_policy_and_reference_start_from_the_revision(commits: dict[str, float]) -> None:
    reference = shared_base(settings().model_paths["llm_1"], torch.device("cpu"))
    assert first_weight(reference) == commits[TAGGED]
    module = CausalLMModule(model_config=module_config(settings(dtype="fp32"), "llm_1"), inference_only=False)
    assert first_weight(module.policy.lm) == commits[TAGGED]


def test_a_run_records_the_commit_of_the_revision(commits: dict[str, float]) -> None:
    for revision, commit in (("", MAIN), ("@v2", TAGGED), (f"@{TAGGED}", TAGGED)):
        chosen = settings(model=HUB_ID + revision)
        assert collect_sources(chosen, *load_task(chosen)).llms["llm_1"].model == f"{HUB_ID}@{commit}"
    with pytest.raises(CommandError, match="'owner/model@v3' cannot be loaded"):
        load_task(settings(model=f"{HUB_ID}@v3"))


def test_llms_may_have_different_models_with_revisions_of_their_own(
    commits: dict[str, float], small_model: str
) -> None:
    mixed = settings(model=[f"{HUB_ID}@v2", small_model], num_agents=2)
    tokenizers = mixed.make_tokenizers()
    assert [TOKEN in tokenizers[policy_id].get_vocab() for policy_id in ("llm_1", "llm_2")] == [True, False]
    assert mixed.model_paths == {"llm_1": "owner/model@v2", "llm_2": small_model}
