"""The `cory` command: `python -m cory_rllib X ...` is `cory X ...`, in a folder with modules named as ours, too."""

from launch.main import main

if __name__ == "__main__":
    raise SystemExit(main())
