"""`python -m launch.report`: write a report."""

from launch.report.command import main

raise SystemExit(main())
