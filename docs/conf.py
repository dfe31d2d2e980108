"""The site of these pages: `make docs`. What the pages are, and in which order they stand, is in `index.md`."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

project = "CORY on RLlib"
author = "the authors of CORY on RLlib"
version = release = version_of("cory-rllib")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "pages"]
exclude_patterns = ["_build", "study/*/results"]
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!cory_rllib\.).*")]  # types of others, whose pages cannot be asked offline
suppress_warnings = ["toc.empty_glob"]  # a page that an earlier or later version has is named as a pattern in index.md

# Notebooks hold what they printed when they were run; `pytest -m slow tests/docs` runs them again.
nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": {"url": "{{path}}"}}  # the last: `pages`

default_role = "literal"  # docstrings write `code` as Markdown does
autodoc_mock_imports = ["ray", "transformers"]  # they take half a minute to import
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
