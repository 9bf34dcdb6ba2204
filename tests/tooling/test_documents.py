"""The documents: length, links that lead somewhere, README's shape, the API page up to date."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
API_PAGE = ROOT / "docs" / "api.md"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAX_WORDS = 9000  # of all documents but the API page, which is made from the docstrings


def anchors(path: Path) -> set[str]:
    """GitHub's, of the headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for link in LINK.findall(path.read_text()):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_documents_are_short():
    words = {path: len(path.read_text().split()) for path in DOCUMENTS if path != API_PAGE}
    assert sum(words.values()) <= MAX_WORDS, words


def test_readme_shows_code_early_and_one_short_table():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert any(line.startswith("```") for line in lines[:24])
    rules = [line for line in lines if re.fullmatch(r"[|\-: ]*---[|\-: ]*", line)]
    rows = [line for line in lines if line.startswith("|")]
    assert len(rules) == 1
    assert len(rows) <= 2 + 10  # the header and its rule


def test_api_page_is_up_to_date():
    page = runpy.run_path(str(ROOT / "tools" / "api_page.py"))["page"]
    assert API_PAGE.read_text() == page(), "run `make docs`"
