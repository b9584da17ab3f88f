"""The documentation site: `make docs` builds it into docs/_build/html, with warnings as errors and nothing fetched."""

import os
import sys
from functools import cache
from pathlib import Path

# The libraries read these when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = (
    "1"  # what an example prints is on its page
)
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # threads that wait for each other take more than they give

from sphinx_gallery.sorting import FileNameSortKey

import hf_calib.data
from hf_calib import __version__

# Figures are drawn by the functions that reproduce the papers, which are recipes and no part of the library.
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from gallery_figures import scrape

# Six examples read the same rows, which takes seconds; none of them changes any.
hf_calib.data.docstring_dataset = cache(hf_calib.data.docstring_dataset)

project = "hf_calib"
author = "the hf_calib developers"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    # Ours.
    "docstrings",
    "reference",
    "losses",
    "bibtex",
    "commands",
    "figures",
    "gallery_figures",
    "math_in_browser",
    "plain_text",
    "typography",
]

source_suffix = {
    ".md": "markdown",
    ".rst": "restructuredtext",
}  # the gallery is written in the latter
exclude_patterns = ["_build", "gallery", "_ext"]
suppress_warnings = [
    "config.cache",  # the gallery's sorting key cannot be written to the cache
    "sphinx_gallery.space_in_filename",  # it means the folder of the clone, which is in no link
]
nitpick_ignore: list[tuple[str, str]] = []

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_mock_imports = ["trl"]  # an extra that is not needed to build the site
autodoc_typehints = "signature"
autodoc_type_aliases = {name: name for name in ("ArrayLike", "FloatArray", "IntArray")}
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "py:obj"
smartquotes_action = "qe"  # "--data" keeps its dashes

copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": FileNameSortKey,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 20,
    "remove_config_comments": True,
    "plot_gallery": True,
    "capture_repr": (),
    "show_signature": False,
    "write_computation_times": False,
    "image_scrapers": (scrape,),
}

html_theme = "furo"
html_title = f"hf_calib {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_copy_source = True
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
