"""What transformers and vLLM would import without need, and do not if it is hidden."""

import subprocess
import sys

import pytest

from policies.generation.installed import vllm_installed
from tests.launch.conftest import ENVIRONMENT

IMPORTS = """
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as for a vLLM engine on a CPU
from policies.compat.imports import COMPILER, UNUSED_BY_TRANSFORMERS, UNUSED_BY_VLLM, packages_hidden

with packages_hidden(*UNUSED_BY_TRANSFORMERS):
    import transformers.modeling_utils
with packages_hidden(*UNUSED_BY_VLLM, COMPILER):
    from vllm import LLM
print({"scipy.optimize", "scipy.signal", "torch._inductor.lowering"} & sys.modules.keys())
"""


@pytest.mark.skipif(not vllm_installed(), reason="requires vLLM")
def test_transformers_and_vllm_load_neither_scipy_nor_the_compiler_if_these_are_hidden() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stdout) == (0, "set()\n"), result.stderr
