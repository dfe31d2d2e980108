"""The `cory` command as `python -m cory_rllib`; works even if local modules have the names of CORY's packages."""

from launch.main import main

if __name__ == "__main__":
    raise SystemExit(main())
