"""The command line of `python -m recipes`."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from recipes import cards, staging
from recipes.corpus import Corpus, MissingReviewsError, load_corpus

BUNDLED = Path(__file__).resolve().parents[1] / "cory_env" / "assets"
LANGUAGE_MODEL, DOUBLE, CLASSIFIER, QUERIES, DRAFTS = (
    "imdb-gpt2-tiny",
    "imdb-gpt2-double",
    "imdb-classifier-tiny",
    "imdb-queries",
    "drafts-llama-tiny",
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser; budgets are in tokens, so results do not depend on how busy the machine is."""
    made = argparse.ArgumentParser(
        prog="python -m recipes", description="Rebuild the bundled offline assets, from film reviews and drawn sums."
    )
    made.add_argument("--out", type=Path, default=BUNDLED, help="folder of the assets (default: %(default)s)")
    made.add_argument(
        "--only",
        choices=("lm", "classifier", "queries", "drafts"),
        help="rebuild one asset; queries need --out's tokenizer, drafts no reviews",
    )
    made.add_argument("--tokens", type=int, help="training tokens of the language model")
    made.add_argument("--classifier-tokens", type=int, help="training tokens of the classifier")
    made.add_argument("--documents", type=int, help="training documents of the model of drafts")
    made.add_argument(
        "--queries", type=int, nargs=2, default=(4000, 500), metavar=("TRAIN", "TEST"), help="numbers of queries"
    )
    made.add_argument("--reviews", type=int, help="train on this many reviews only, for trial runs")
    made.add_argument("--seed", type=int, default=1, help="seed of weights and draws; the corpus split never changes")
    made.add_argument(
        "--double",
        action="store_true",
        help=f"build only {DOUBLE}, a language model of twice the parameters, into --out",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Rebuilds the assets.

    Returns:
        0, or 2 when the reviews are not installed or the options contradict each other.
    """
    arguments = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(arguments)
    if options.double and options.out.resolve() == BUNDLED:
        print("The model of twice the size is not bundled: name a folder of your own with --out.", file=sys.stderr)
        return 2
    if options.double and options.only not in (None, "lm"):
        print("--double builds a language model: leave out --only, or give --only lm.", file=sys.stderr)
        return 2
    if options.only == "drafts":
        _drafts(options)
        return 0
    try:
        corpus = load_corpus(options.reviews)
    except MissingReviewsError as error:
        print(error, file=sys.stderr)
        return 2
    if options.double:
        _language_model(options, corpus)
        return 0
    if options.only in (None, "lm"):
        _language_model(options, corpus)
    if options.only in (None, "classifier"):
        _classifier(options, corpus)
    if options.only in (None, "queries"):
        if not (options.out / LANGUAGE_MODEL / "tokenizer.json").exists():
            print(
                f"The tokenizer that cuts queries is not in {options.out}: build it first, with --only lm.",
                file=sys.stderr,
            )
            return 2
        _queries(options, corpus)
    if options.only is None:
        _drafts(options)
    return 0


def _language_model(options: argparse.Namespace, corpus: Corpus) -> None:
    from recipes import language_model

    recipe = language_model.DOUBLE if options.double else language_model.LanguageModelRecipe()
    recipe = replace(recipe, seed=options.seed, tokens=options.tokens or recipe.tokens)
    name = DOUBLE if options.double else LANGUAGE_MODEL
    extra = ["--double", "--out", "FOLDER"] if options.double else ["--only", "lm"]
    _build(
        options.out / name,
        cards.LANGUAGE_MODEL,
        asdict(recipe),
        _command(options, *extra, "--tokens", str(recipe.tokens)),
        lambda folder, log: language_model.build(folder, recipe, corpus, log),
    )


def _classifier(options: argparse.Namespace, corpus: Corpus) -> None:
    from recipes import classifier

    recipe = classifier.ClassifierRecipe(seed=options.seed)
    recipe = replace(recipe, tokens=options.classifier_tokens or recipe.tokens)
    _build(
        options.out / CLASSIFIER,
        cards.CLASSIFIER,
        asdict(recipe),
        _command(options, "--only", "classifier", "--classifier-tokens", str(recipe.tokens)),
        lambda folder, log: classifier.build(folder, recipe, corpus, log),
    )


def _queries(options: argparse.Namespace, corpus: Corpus) -> None:
    from transformers import AutoTokenizer

    from recipes import queries

    train, test = options.queries
    tokenizer = AutoTokenizer.from_pretrained(options.out / LANGUAGE_MODEL)
    _build(
        options.out / QUERIES,
        cards.QUERIES,
        {"train": train, "test": test, "shortest": queries.SHORTEST, "longest": queries.LONGEST, "seed": options.seed},
        _command(options, "--only", "queries", "--queries", str(train), str(test)),
        lambda folder, _: queries.build(folder, corpus, tokenizer, train, test, options.seed),
    )


def _drafts(options: argparse.Namespace) -> None:
    from recipes import drafts

    recipe = drafts.DraftsRecipe(seed=options.seed)
    recipe = replace(recipe, documents=options.documents or recipe.documents)
    _build(
        options.out / DRAFTS,
        cards.DRAFTS,
        asdict(recipe),
        f"python -m recipes --only drafts --documents {recipe.documents} --seed {options.seed}",
        lambda folder, log: drafts.build(folder, recipe, log),
        cards.DRAWN,
    )


def _build(
    target: Path,
    about: str,
    recipe: dict[str, object],
    command: str,
    fill: Callable[[Path, Callable[[str], None]], cards.Figures],
    licence: str = cards.LICENCE,
) -> None:
    """Lets `fill` build an asset in a fresh folder, add its card, and put the folder in the place of `target`."""
    began = time.monotonic()

    def log(line: str) -> None:
        print(f"[{target.name} {time.monotonic() - began:6.0f} s] {line}", flush=True)

    with staging.replacing(target) as folder:
        figures = fill(folder, log)
        figures["size in MB, without this card"] = staging.size_mb(folder)
        cards.write_card(folder, target.name, about, recipe, figures, command, licence)
    log(f"wrote {target}")


def _command(options: argparse.Namespace, *own: str) -> str:
    """Returns the command line that rebuilds one asset, every setting spelled out."""
    trial = ["--reviews", str(options.reviews)] if options.reviews else []
    return " ".join(["python -m recipes", *own, "--seed", str(options.seed), *trial])
