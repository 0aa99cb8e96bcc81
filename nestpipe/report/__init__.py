"""`nestpipe report`: runs and benches as one HTML page that needs nothing but itself.

`sources` reads run folders and the JSON of a bench; `run`, `comparison` and `timeline` say what is worth showing of a run,
mostly as the sections of a bench; `charts` turns sections into HTML, `page` puts all together with page.html, page.css
and the scripts.
"""

from nestpipe.report.page import default_path, render, write

__all__ = ["default_path", "render", "write"]
