"""Checks that Ray's workers import this project's packages, even if a user's module has the same name as one."""

from cory_env.shadowing import WORKER_SETUP, shadowing_modules
from policies.settings.error import SettingsError


def check_workers() -> None:
    """Checks that Ray's workers do not import a user's module instead of one of this project's packages."""
    import ray

    shadowing = shadowing_modules()
    if not shadowing:
        return
    environment = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    if WORKER_SETUP not in {environment.get("worker_process_setup_hook"), *environment.get("env_vars", {}).values()}:
        name, file = next(iter(shadowing.items()))
        raise SettingsError(
            f"Ray's workers would import {file} instead of CORY's package {name}. Rename that module, or start Ray "
            "with `cory_rllib.start_ray(config)`."
        )
