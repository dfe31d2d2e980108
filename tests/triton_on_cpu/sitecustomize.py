"""For a Python process that starts with this folder in its path: Triton interprets kernels on the CPU, and vLLM, which
takes Triton for missing where no driver is active, uses it. So the model runner that GPUs have, V2, runs here.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

try:
    import triton.backends as backends
except ImportError:  # a process that does not have it in its path
    pass
else:

    class _Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class _Backend:
        driver = _Driver

    backends.backends["cpu"] = _Backend
