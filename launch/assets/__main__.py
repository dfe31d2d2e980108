"""`python -m launch.assets`: rebuild the bundled assets."""

from launch.assets.command import main

raise SystemExit(main())
