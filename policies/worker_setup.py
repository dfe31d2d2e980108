"""Whether the workers of the Ray that runs would import our packages, where a user's module has the name of one."""

from cory_env.shadowing import WORKER_SETUP, shadowing_modules
from policies.settings.error import SettingsError


def check_workers() -> None:
    """Refuses workers that would import a user's module in the place of one of our packages.

    Raises:
        SettingsError: they would; the message names the module, and what starts Ray such that they do not.
    """
    import ray

    shadowing = shadowing_modules()
    if not shadowing:
        return
    environment = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    if WORKER_SETUP not in {environment.get("worker_process_setup_hook"), *environment.get("env_vars", {}).values()}:
        name, file = next(iter(shadowing.items()))
        raise SettingsError(
            f"Ray's workers would import {file} in the place of our package {name}. Rename that module, or let "
            "`cory_rllib.start_ray(config)` start Ray."
        )
