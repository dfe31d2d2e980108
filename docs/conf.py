"""Sphinx configuration of the site (`make docs`). `index.md` lists the pages in order."""

import sys
from importlib.metadata import version as package_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

project = "CORY on RLlib"
author = "the authors of CORY on RLlib"
version = release = package_version("cory-rllib")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "pages"]
exclude_patterns = ["_build", "study/*/results"]
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!cory_rllib\.).*")]  # types of other packages, whose inventories need network
suppress_warnings = ["toc.empty_glob"]  # index.md lists pages that some versions lack as patterns

# Notebooks are stored with their outputs; `pytest -m slow tests/docs` runs them again.
nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": {"url": "{{path}}"}}  # source: see `pages`

default_role = "literal"  # `code` in docstrings, as in Markdown
autodoc_mock_imports = ["ray", "transformers"]  # importing them takes half a minute
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
