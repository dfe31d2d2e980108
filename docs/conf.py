"""Sphinx configuration of the site (`make docs`). `_ext/contents.md` lists the pages in order."""

import sys
from importlib.metadata import version as package_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "CORY on RLlib"
author = "the authors of CORY on RLlib"
version = release = package_version("cory-rllib")

extensions = ["myst_nb", "pages"]
exclude_patterns = ["_build", "_ext", "study", "examples"]
nitpicky = True

# Notebooks are stored with their outputs; `pytest -m slow tests/docs` runs them again.
nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": {"url": "{{path}}"}}  # source: see `pages`

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
