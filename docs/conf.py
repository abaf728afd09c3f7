"""Settings of the documentation; `make docs` builds it into build/docs."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE / "_ext")]

from normrnn.version import __version__  # noqa: E402

project = "normrnn"
author = "the normrnn developers"
project_copyright = "the normrnn developers. MIT licence"
version = release = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb", "generated", "checks"]
exclude_patterns = ["_ext", "Thumbs.db"]
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/test_notebooks.py runs them; stored outputs are shown
nb_ipywidgets_js = {}
suppress_warnings = ["mystnb.unknown_mime_type"]

default_role = "code"
add_module_names = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
maximum_signature_line_length = 70
python_maximum_signature_line_length = 70
nitpick_ignore_regex = [("py:.*", r"(torch|nn|collections|pathlib|typing)\..*")]

html_theme = "furo"
html_title = f"normrnn {__version__}"
html_static_path = ["_static"]
html_css_files = ["normrnn.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
pygments_style = "default"
pygments_dark_style = "github-dark"
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#6cb6ff", "color-brand-content": "#6cb6ff"},
}
