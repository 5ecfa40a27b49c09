"""The site: Sphinx reads the Markdown as it is, and the docstrings of public names.

Pages link to one another and to files beside docs/, so the source folder is the repository's root:

    .venv/bin/python -m sphinx --fail-on-warning --keep-going -c docs . build/site
"""

project = "jaxoffload"
html_title = project
root_doc = "docs/index"
include_patterns = ["docs/*.md", "notebooks/README.md", "benchmarks/RESULTS.md", "CHANGELOG.md"]
exclude_patterns = ["build", "custom_calls", "tests", ".*"]  # not walked through

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
smartquotes_action = "D"  # dashes only: what is quoted is to be typed
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"  # classes that users do not make have no signature
autodoc_typehints = "none"  # Args sections tell
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "literal"  # docstrings have `names` between single backticks
suppress_warnings = ["ref.python"]  # attributes of one name in several classes

html_theme = "furo"  # light and dark
html_show_copyright = False
html_copy_source = False
templates_path = ["site"]
html_additional_pages = {"index": "to_first_page.html"}
pygments_dark_style = "monokai"
