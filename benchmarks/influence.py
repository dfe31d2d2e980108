"""`python -m benchmarks.influence PRESET [setting=value ...]`: the pioneer's influence on the observer's reward.

Two responses of the pioneer to each query and two of the observer to each of these, by the untrained model of a preset;
prints the components of the variance of the observer's reward, and the interval of the influence.
"""

import argparse
import json

from launch.console.configuration import resolve_settings
from policies.cory import CoryConfig
from policies.influence import measure_influence, share_interval, variance_components


def main(argv: list[str] | None = None) -> None:
    """Generates rollouts and prints the influence."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.influence", description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("settings", nargs="*", help="setting=value")
    parser.add_argument("--queries", type=int, default=300)
    options = parser.parse_args(argv)
    settings = resolve_settings(options.preset, [], options.settings)
    algorithm = CoryConfig().cory(**settings.model_dump()).build_algo()
    try:
        pioneers, observers = measure_influence(algorithm, options.queries)
    finally:
        algorithm.stop()
    parts = variance_components(observers)
    low, high = share_interval(observers)
    print(
        json.dumps(
            {
                "queries": len(pioneers),
                "pioneer": float(pioneers.mean()),
                "observer": float(observers.mean()),
                **{f"variance_{name}": value for name, value in parts._asdict().items()},
                "influence": parts.share,
                "interval": [low, high],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
