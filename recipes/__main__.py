"""`python -m recipes`: rebuild the bundled assets."""

from recipes.command import main

raise SystemExit(main())
