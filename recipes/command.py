"""The command line of `python -m recipes`."""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from recipes import cards, staging
from recipes.corpus import Corpus, MissingReviewsError, load_corpus

ASSETS = Path(__file__).resolve().parents[1] / "cory_env" / "assets"
LANGUAGE_MODEL, DOUBLE, CLASSIFIER, QUERIES, DRAFTS, SUDOKU = (
    "imdb-gpt2-tiny",
    "imdb-gpt2-double",
    "imdb-classifier-tiny",
    "imdb-queries",
    "drafts-llama-tiny",
    "sudoku-llama-tiny",
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser. Budgets are in tokens, so results do not depend on the speed of the machine."""
    argument_parser = argparse.ArgumentParser(
        prog="python -m recipes",
        description="Rebuild the bundled offline assets from film reviews, random sums and puzzles.",
    )
    argument_parser.add_argument("--out", type=Path, default=ASSETS, help="folder of the assets (default: %(default)s)")
    argument_parser.add_argument(
        "--only",
        choices=("lm", "classifier", "queries", "drafts", "sudoku"),
        help="rebuild one asset; 'queries' requires the tokenizer in --out, 'drafts' and 'sudoku' require no reviews",
    )
    argument_parser.add_argument("--tokens", type=int, help="training tokens for the language model")
    argument_parser.add_argument("--classifier-tokens", type=int, help="training tokens for the classifier")
    argument_parser.add_argument("--documents", type=int, help="training documents for the drafts model")
    argument_parser.add_argument(
        "--sudoku-documents",
        type=int,
        nargs=2,
        metavar=("READ", "REVISE"),
        help="training documents for the two stages of the Sudoku model",
    )
    argument_parser.add_argument(
        "--queries",
        type=int,
        nargs=2,
        default=(4000, 500),
        metavar=("TRAIN", "TEST"),
        help="number of queries per split",
    )
    argument_parser.add_argument(
        "--reviews", type=int, help="number of training reviews, for trial runs (default: all)"
    )
    argument_parser.add_argument("--seed", type=int, default=1, help="random seed; does not affect the corpus split")
    argument_parser.add_argument(
        "--double",
        action="store_true",
        help=f"build only {DOUBLE}, a language model with twice the parameters, in --out",
    )
    return argument_parser


def main(argv: list[str] | None = None) -> int:
    """Rebuilds the assets.

    Returns:
        0, or 2 if the reviews are not installed or options conflict.
    """
    arguments = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(arguments)
    if options.double and options.out.resolve() == ASSETS:
        print("--double requires --out, because this model is not bundled.", file=sys.stderr)
        return 2
    if options.double and options.only not in (None, "lm"):
        print(f"--double conflicts with --only {options.only}. Use --only lm, or leave it out.", file=sys.stderr)
        return 2
    if options.only in ("drafts", "sudoku"):
        (_drafts if options.only == "drafts" else _sudoku)(options)
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
                f"--only queries requires the tokenizer in {options.out}. Build it first with --only lm.",
                file=sys.stderr,
            )
            return 2
        _queries(options, corpus)
    if options.only is None:
        _drafts(options)
        _sudoku(options)
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
        {
            "train": train,
            "test": test,
            "min_tokens": queries.MIN_TOKENS,
            "max_tokens": queries.MAX_TOKENS,
            "seed": options.seed,
        },
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
        cards.GENERATED_LICENCE,
    )


def _sudoku(options: argparse.Namespace) -> None:
    from recipes import sudoku

    recipe = sudoku.SudokuRecipe(seed=options.seed)
    if options.sudoku_documents:
        read, revise = options.sudoku_documents
        recipe = replace(recipe, read_documents=read, revise_documents=revise)
    sizes = f"{recipe.read_documents} {recipe.revise_documents}"
    _build(
        options.out / SUDOKU,
        cards.SUDOKU,
        asdict(recipe),
        f"python -m recipes --only sudoku --sudoku-documents {sizes} --seed {options.seed}",
        lambda folder, log: sudoku.build(folder, recipe, log),
        cards.GENERATED_LICENCE,
    )


def _build(
    target: Path,
    description: str,
    recipe: dict[str, object],
    command: str,
    fill: Callable[[Path, Callable[[str], None]], cards.Figures],
    licence: str = cards.LICENCE,
) -> None:
    """Builds an asset with `fill` in a new folder, adds its card, and atomically replaces `target`."""
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"[{target.name} {time.monotonic() - started:6.0f} s] {line}", flush=True)

    with staging.replace_folder(target) as folder:
        figures = fill(folder, log)
        figures["size in MB, without this card"] = staging.size_mb(folder)
        cards.write_card(folder, target.name, description, recipe, figures, command, licence)
    log(f"wrote {target}")


def _command(options: argparse.Namespace, *arguments: str) -> str:
    """Returns the command line that rebuilds one asset, with all settings."""
    trial = ["--reviews", str(options.reviews)] if options.reviews else []
    return " ".join(["python -m recipes", *arguments, "--seed", str(options.seed), *trial])
