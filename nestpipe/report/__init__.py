"""`nestpipe report`: runs and benches as one HTML page that needs nothing but itself.

`sources` reads run folders and the JSON of a bench. Of a run, `shares` says what its time goes to, `advice` what to change
(with `replay`, the run in the simulator), `timeline` what ran when, `comparison` what tells several apart; `run` puts it
together. `charts` turns sections into values for the templates, blocks.html and page.html; `page` renders them with page.css and
the scripts.
"""

from nestpipe.report.page import default_path, render, write

__all__ = ["default_path", "render", "write"]
