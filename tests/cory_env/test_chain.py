"""The episode logic: turns, prompts, responses and collective rewards."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from cory_env.chain import Chain
from cory_env.chain_settings import ObservedResponses, role_names
from cory_env.episode import ChainEpisode
from cory_env.prompt_encoder import NoEmbeddingError, Prompt, QueryTooLongError
from cory_env.tasks import Query, Task
from cory_env.tasks.turns import SeenResponse
from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from tests.cory_env.sample_tasks import QUERIES, chain, response, tokenizer, tokens_of, validate

EOS = tokenizer().eos_token_id


def test_roles_are_pioneer_then_observers_numbered_from_three_agents_on() -> None:
    assert role_names(1) == ("pioneer",)
    assert role_names(2) == ("pioneer", "observer")
    assert role_names(4) == ("pioneer", "observer_1", "observer_2", "observer_3")
    with pytest.raises(ValueError, match="must be from 1 to 32"):
        role_names(0)


def test_agents_respond_in_order_and_then_the_episode_ends() -> None:
    episode = ChainEpisode(chain(3), QUERIES[0])
    turns = []
    while episode.agent is not None:
        turns.append(episode.agent)
        episode.respond(response(" great"))
    assert turns == ["pioneer", "observer_1", "observer_2"]
    with pytest.raises(ValueError, match="takes no more actions"):
        episode.respond(response(" great"))
    with pytest.raises(ValueError, match="no prompt"):
        episode.prompt_ids()


def test_the_observer_sees_the_paper_s_prompt_with_the_pioneer_s_response() -> None:
    episode = ChainEpisode(chain(), QUERIES[0])
    assert episode.prompt_ids() == tokenizer()("This movie was")["input_ids"]
    episode.respond(response(" a great deal of fun."))
    text = 'I can make this sentence "This movie was a great deal of fun." more positive: This movie was'
    assert episode.prompt_ids() == tokenizer()(text)["input_ids"]


def test_a_third_agent_sees_both_earlier_responses_in_order() -> None:
    episode = ChainEpisode(chain(3), QUERIES[1])
    episode.respond(response(" like it"))
    episode.respond(response(" hate it"))
    assert tokenizer().decode(episode.prompt_ids()) == (
        'I can make this sentence "I did not like it" and this sentence "I did not hate it" more positive: I did not'
    )


def reference_text(episode: ChainEpisode) -> str:
    """The reference inside the current role's prompt."""
    start, end = 'I can make this sentence "This movie was', '" more positive: This movie was'
    return tokenizer().decode(episode.prompt_ids()).removeprefix(start).removesuffix(end)


@pytest.mark.parametrize(
    ("text", "stop", "response_text", "completion", "ended"),
    [
        (" a good film", "f", " a good film", " a good ", True),  # " film" is one token
        ("ok\n\nQ: more", "\n\n", "ok\n\n", "ok", True),  # no token here holds both line breaks
        ("ok\nno\n\n", "\n\n", "ok\nno\n\n", "ok\nno", True),
        ("ok\n", "\n\n", "ok\n", "ok\n", False),
        ("a 🙂 b", "🙂", "a 🙂", "a ", True),  # a character of several tokens
        ("\nlate", "\n", "\n", "", True),
        ("all of it", "?", "all of it", "all of it", False),
    ],
)
def test_a_response_ends_at_the_stop_string_and_keeps_the_text_before_it(
    text: str, stop: str, response_text: str, completion: str, ended: bool
) -> None:
    episode = ChainEpisode(chain(stop=stop, max_response_tokens=20), QUERIES[0])
    episode.respond(response(text))
    assert episode.responses == [tokens_of(response_text)]
    assert (episode.completions, episode.ended, reference_text(episode)) == ([completion], [ended], completion)


def test_a_token_that_contains_the_stop_string_is_kept_with_its_text_before_the_stop() -> None:
    r"""For example Qwen's `}\n`."""
    tokens = load_tokenizer(DEFAULT_TOKENIZER)
    tokens.add_tokens([AddedToken("}\n", normalized=False), AddedToken("a\nb", normalized=False)])
    stop_chain = Chain(chain().task, tokens, stop="\n")
    for end, text in zip(tokens.convert_tokens_to_ids(["}\n", "a\nb"]), (" {42}", " {42a"), strict=True):
        episode = ChainEpisode(stop_chain, QUERIES[0])
        ids = [*tokens_of(" {42"), end]
        episode.respond({"tokens": [*ids, *ids], "length": 2 * len(ids)})
        assert (episode.responses, episode.completions, episode.ended) == ([ids], [text], [True])
        assert reference_text(episode) == text


def test_observed_last_shows_only_the_last_response() -> None:
    episode = ChainEpisode(chain(4, observed="last"), QUERIES[0])
    for previous, text in ((None, " good"), (" good", " fine"), (" fine", " bad"), (" bad", " dull")):
        assert previous is None or reference_text(episode) == previous
        episode.respond(response(text))


@pytest.mark.parametrize("observed", get_args(ObservedResponses))
def test_observed_makes_no_difference_with_two_agents_or_without_transfer(observed: ObservedResponses) -> None:
    episode = ChainEpisode(chain(2, observed=observed), QUERIES[0])
    episode.respond(response(" good"))
    assert reference_text(episode) == " good"
    independent = ChainEpisode(chain(3, observed=observed, knowledge_transfer=False), QUERIES[0])
    for _ in range(3):
        assert tokenizer().decode(independent.prompt_ids()) == "This movie was"
        independent.respond(response(" good"))


def test_observing_one_response_avoids_truncation_of_references() -> None:
    words = " one two three four five"
    num_truncated = {}
    for observed in get_args(ObservedResponses):
        episode = ChainEpisode(chain(8, observed=observed, max_prompt_tokens=48), QUERIES[0])
        while episode.agent is not None:
            assert len(episode.prompt_ids()) <= 48
            episode.respond(response(words))
        num_truncated[observed] = sum(prompt.is_truncated for prompt in episode.prompts)
    assert num_truncated == {"all": 5, "last": 0}


def test_without_knowledge_transfer_every_agent_sees_only_the_query() -> None:
    episode = ChainEpisode(chain(3, knowledge_transfer=False), QUERIES[0])
    for _ in range(3):
        assert episode.prompt_ids() == tokenizer()("This movie was")["input_ids"]
        episode.respond(response(" great"))


def test_an_observation_is_the_padded_prompt_and_empty_before_an_agent_s_turn() -> None:
    padded_chain = chain(max_prompt_tokens=64)
    episode = ChainEpisode(padded_chain, QUERIES[0])
    space = padded_chain.observation_space()
    assert episode.observation("observer")["length"] == 0
    first = episode.observation()
    episode.respond(response(" great"))
    second = episode.observation("observer")
    for observation in (first, second, episode.observation("pioneer")):
        assert observation in space
    np.testing.assert_array_equal(episode.observation("pioneer")["tokens"], first["tokens"])
    assert second["tokens"][: second["length"]].tolist() == episode.prompt_ids()
    assert (second["tokens"][second["length"] :] == padded_chain.encoders[0].pad_token_id).all()
    with pytest.raises(ValueError, match="Agents: pioneer, observer"):
        episode.observation("llm_1")


def test_a_response_is_truncated_at_its_length_and_first_eos() -> None:
    episode = ChainEpisode(chain(3), QUERIES[0])
    episode.respond({"tokens": [5, EOS, 6, EOS, 7], "length": 5})
    episode.respond({"tokens": np.array([5, 6, 7, EOS]), "length": np.int64(2)})
    episode.respond({"tokens": [5, 6, -100], "length": 2})
    assert episode.responses == [[5, EOS], [5, 6], [5, 6]]


def test_no_eos_is_added_and_eos_is_not_in_the_text() -> None:
    episode = ChainEpisode(chain(1, max_response_tokens=4), QUERIES[0])
    tokens = tokens_of(" good good good good")[:4]
    episode.respond({"tokens": tokens, "length": 4})
    assert EOS not in episode.responses[0]
    ended = ChainEpisode(chain(1), QUERIES[0])
    ended.respond({"tokens": [*tokens_of(" good"), EOS], "length": len(tokens_of(" good")) + 1})
    assert ended.completions == [" good"]


def test_a_response_of_only_eos_is_an_empty_completion() -> None:
    episode = ChainEpisode(chain(1), QUERIES[0])
    episode.respond({"tokens": [EOS], "length": 1})
    assert episode.responses == [[EOS]] and episode.completions == [""]


def test_completions_keep_their_leading_space_if_decoding_drops_it() -> None:
    pieces = {"<unk>": 0, "</s>": 1, "▁a": 2, "▁great": 3, "▁film": 4, "a": 5}
    model = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    word_tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    assert word_tokenizer.decode([3, 4]) == "great film"
    task = Task(name="x", train=QUERIES, test=QUERIES, reward="tests.cory_env.sample_rewards:length")
    assert Chain(task, word_tokenizer).encoders[0].decode([3, 4, 1]) == " great film"


def test_a_long_reference_is_truncated_at_its_end_until_the_prompt_fits() -> None:
    words = " one two three four five six seven eight"
    full = ChainEpisode(chain(), QUERIES[0])
    full.respond(response(words))
    limit = len(full.prompt_ids()) - 3
    episode = ChainEpisode(chain(max_prompt_tokens=limit), QUERIES[0])
    episode.respond(response(words))
    prompt = tokenizer().decode(episode.prompt_ids())
    start, end = 'I can make this sentence "This movie was', '" more positive: This movie was'
    assert len(episode.prompt_ids()) <= limit
    assert prompt.startswith(start) and prompt.endswith(end)
    reference = prompt.removeprefix(start).removesuffix(end)
    assert 0 < len(reference) < len(words) and words.startswith(reference)
    assert episode.prompt().is_truncated and not full.prompt().is_truncated
    one_more = tokens_of(words)[: len(tokens_of(reference)) + 1]
    assert len(tokenizer()(start + tokenizer().decode(one_more) + end)["input_ids"]) > limit


def test_agents_with_different_tokenizers_exchange_text() -> None:
    byte_tokenizer = ByT5Tokenizer()
    settings = {"num_agents": 3, "observed": "last", "max_prompt_tokens": 90}
    word_chain, byte_chain = chain(**settings), Chain(chain().task, byte_tokenizer, **settings)  # type: ignore[arg-type]
    mixed = word_chain.with_encoders([chain.encoders[0] for chain in (word_chain, byte_chain, word_chain)])
    assert mixed.vocab_size == max(word_chain.vocab_size, byte_chain.vocab_size)
    episode = ChainEpisode(mixed, QUERIES[0])
    assert episode.prompt_ids() == tokens_of("This movie was")
    episode.respond(response(" one two three four five six seven eight nine ten"))
    prompt = byte_tokenizer.decode(episode.prompt_ids(), skip_special_tokens=True)
    assert len(episode.prompt_ids()) <= 90 and episode.prompt().is_truncated
    assert 'I can make this sentence "This movie was one two' in prompt and " ten" not in prompt
    second = [*byte_tokenizer(" best", add_special_tokens=False)["input_ids"], byte_tokenizer.eos_token_id]
    episode.respond({"tokens": second, "length": len(second)})
    assert episode.completions[1] == " best" and episode.responses[1] == second
    assert '"This movie was best" more' in tokenizer().decode(episode.prompt_ids())
    with pytest.raises(ValueError, match=f"from 0 to {word_chain.vocab_size - 1}"):
        episode.respond({"tokens": [word_chain.vocab_size], "length": 1})


def test_the_last_of_several_references_is_truncated_first() -> None:
    full = ChainEpisode(chain(3), QUERIES[0])
    for text in (" good", " really good"):
        full.respond(response(text))
    episode = ChainEpisode(chain(3, max_prompt_tokens=len(full.prompt_ids()) - 1), QUERIES[0])
    for text in (" good", " really good"):
        episode.respond(response(text))
    prompt = tokenizer().decode(episode.prompt_ids())
    assert '"This movie was good"' in prompt and "really good" not in prompt


def test_a_response_without_remaining_tokens_is_left_out() -> None:
    encoder = chain().encoders[0]
    responses = [SeenResponse.decoded(encoder.decode, tokens_of(text)) for text in (" good", " really good")]
    prompt = encoder.build_prompt(QUERIES[0], responses[:1]).tokens
    small_encoder = chain(3, max_prompt_tokens=len(prompt)).encoders[2]
    assert small_encoder.build_prompt(QUERIES[0], responses) == Prompt(prompt, is_truncated=True)


def test_a_too_long_query_is_reported_with_the_setting_to_change() -> None:
    with pytest.raises(QueryTooLongError, match=r"Query 0 of task reviews .* max_prompt_tokens is 2") as error:
        ChainEpisode(chain(max_prompt_tokens=2), QUERIES[0]).prompt_ids()
    assert "Raise max_prompt_tokens to at least" in str(error.value)
    episode = ChainEpisode(chain(max_prompt_tokens=8), QUERIES[0])
    with pytest.raises(QueryTooLongError, match="without any reference"):
        episode.respond(response(" great"))
        episode.prompt_ids()


@pytest.mark.parametrize(
    "action",
    [
        [1, 2],
        {"tokens": [1]},
        {"tokens": [], "length": 0},
        {"tokens": [1] * 16, "length": 16},
        {"tokens": [[1, 2]], "length": 1},
        {"tokens": [1.0, 2.0], "length": 2},
        {"tokens": [1, 2], "length": 3},
        {"tokens": [1, 2], "length": 0},
        {"tokens": [1, 2], "length": 1.5},
        {"tokens": [1, 4096], "length": 2},
        {"tokens": [-1], "length": 1},
    ],
)
def test_an_invalid_action_names_the_agent_and_changes_nothing(action: object) -> None:
    episode = ChainEpisode(chain(), QUERIES[0])
    with pytest.raises(ValueError, match=r"pioneer: invalid action .*1 to 15 ids from 0 to 4095"):
        episode.respond(action)  # type: ignore[arg-type]
    assert episode.agent == "pioneer" and episode.responses == []


def test_a_padded_vocabulary_widens_the_action_space() -> None:
    padded_chain = chain(1, vocab_size=5000)
    episode = ChainEpisode(padded_chain, Query(0, "A film"))
    episode.respond({"tokens": [4999], "length": 1})
    assert episode.completions == [""]
    assert {"tokens": np.full(15, 4999), "length": 3} in padded_chain.action_space()


def test_ids_beyond_the_tokenizer_decode_to_nothing_even_if_its_decoder_raises() -> None:
    byte_chain = Chain(
        Task(name="bytes", train=QUERIES, test=QUERIES, reward="any:thing"), ByT5Tokenizer(), vocab_size=512
    )
    (word,) = byte_chain.encoders[0].control.encode_text(["word"])
    assert byte_chain.encoders[0].decode([500, *word, 511]) == "word"


def tokenizer_with_added(*texts: str, special: bool = False) -> Any:
    """The bundled tokenizer with additional tokens beyond the model's 4096 embeddings."""
    tokens = load_tokenizer(DEFAULT_TOKENIZER)
    tokens.add_tokens([AddedToken(text, normalized=False, special=special) for text in texts])
    return tokens


def test_a_template_with_a_token_beyond_the_embeddings_is_rejected() -> None:
    for special in (False, True):
        tokens = tokenizer_with_added("<unused>", "<go>", special=special)
        settings: dict[str, Any] = {"vocab_size": 4096}
        encoder = Chain(chain().task, tokens, **settings).encoders[0]
        assert encoder.build_prompt(QUERIES[0]) == Prompt(tokens_of("This movie was"))
        message = f"token '<go>' with id 4097, but `{tokens.name_or_path}` has only 4096 embeddings"
        assert (
            max(encoder.build_prompt(Query(7, "a <go> b")).tokens) < 4096
        )  # split into characters, because it is not a plain word
        templates = replace(chain().task, observer_template="<go> {reference}{query}")
        with pytest.raises(NoEmbeddingError, match=message):
            Chain(templates, tokens, **settings).encoders[0].build_prompt(QUERIES[0], [SeenResponse(" good")])
        report = validate(templates, tokens, num_embeddings=4096)
        assert message in report.problems[0] and validate(chain().task, tokens, num_embeddings=4096).ok


def test_a_response_with_a_special_token_beyond_the_embeddings_becomes_its_characters() -> None:
    tokens = tokenizer_with_added("<go>")
    episode = ChainEpisode(Chain(chain().task, tokens, vocab_size=4096), QUERIES[0])
    episode.respond(response(" so <go> on"))  # the plain tokenizer's tokens
    assert max(episode.prompt_ids()) < 4096
    assert tokens.decode(episode.prompt_ids()) == tokenizer().decode(
        chain().encoders[0].encode_prompts([QUERIES[0]], [SeenResponse(" so <go> on")])[0]
    )


def test_words_beyond_the_embeddings_are_split_in_responses_and_rejected_in_queries() -> None:
    tokens = tokenizer_with_added("zork", "~")
    encoder = Chain(chain().task, tokens, vocab_size=4096).encoders[0]
    (prompt,) = encoder.encode_prompts([QUERIES[0]], [SeenResponse(" so zork ~ on")])
    assert max(prompt) < 4096 and "zork" in tokens.decode(prompt).replace(" ", "")
    with pytest.raises(NoEmbeddingError, match="query 7 of task reviews contains the token 'zork'"):
        encoder.encode_prompts([Query(7, "a zork b")], [SeenResponse(" good")])


def test_the_vocabulary_size_follows_the_largest_id_and_excludes_end_tokens_beyond_it() -> None:
    tokens = tokenizer_with_added("<end>", "<pad>")
    tokens.eos_token, tokens.pad_token = "<end>", "<pad>"
    encoder = Chain(chain().task, tokens, vocab_size=4096, stop="<end>", stop_token_ids=[5, 4096]).encoders[0]
    assert (encoder.stop_token_ids, encoder.pad_token_id) == ((5,), 0)
    with pytest.raises(ValueError, match="No token can end a response"):
        Chain(chain().task, tokens, vocab_size=4096)
    vocabulary = {"a": 0, "b": 9, "<end>": 3}
    gaps = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "a")), eos_token="<end>")
    assert Chain(chain().task, gaps).vocab_size == 10
    assert Chain(chain().task, gaps, stop="b").encoders[0].stop_token_ids == (3, 9)


@pytest.mark.parametrize(
    "settings",
    [{name: 0} for name in ("max_prompt_tokens", "max_response_tokens", "num_agents")]
    + [{"partner_reward": float("nan")}, {"observed": "best"}],
)
def test_settings_out_of_range_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        chain(**settings)
