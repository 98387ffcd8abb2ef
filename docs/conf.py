"""Settings of the site (`make docs`): Sphinx with MyST's Markdown and the theme Furo."""

project = "vlaunch"
html_title = "vlaunch"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["vlaunch.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
nitpicky = True
highlight_language = "text"
smartquotes = False
