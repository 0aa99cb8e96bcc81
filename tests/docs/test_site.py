"""The pages of docs/ build into a site without a warning, and read nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a page loads when it is opened. Links that a reader may follow are not among them.
LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]*\ssrc="(https?://[^"]+)|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?://[^"]+)'
)


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted((tmp_path / "site").glob("*.html"))
    assert {"index.html", "guide.html", "extending.html", "api.html", "stability.html"} <= {page.name for page in pages}
    for page in pages:
        assert not LOADED.findall(page.read_text()), page.name
    api = (tmp_path / "site/api.html").read_text()
    assert "Trains a model whose embedding rows" in api  # from a docstring
