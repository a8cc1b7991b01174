"""What mkdocs does otherwise than GitHub with the pages of docs/.

The menu is docs/index.md: a heading is an entry, its list the pages below. So a page is listed in
one place.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INDEX = "docs/index.md"
ENTRY = re.compile(
    r"^(?P<level>##+) (?P<heading>.+)$|^- \[(?P<title>.+)\]\((?P<path>.+)\)$", re.MULTILINE
)
CODE = re.compile(r"(?<!`)`[^`\n]+`(?!`)")
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


def on_config(config: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the configuration with the menu."""
    config["nav"] = menu((ROOT / INDEX).read_text())
    return config


def menu(index: str) -> list[dict[str, Any]]:
    """Return mkdocs' menu: what stands under each heading of the index, two levels deep."""
    top: list[dict[str, Any]] = [{"Home": ["README.md", {"All pages": INDEX}]}]
    here: list[dict[str, Any]] = top
    for found in ENTRY.finditer(index):
        if found["heading"]:
            parent = top if found["level"] == "##" else next(iter(top[-1].values()))
            here = []
            parent.append({found["heading"]: here})
        else:
            here.append({found["title"]: os.path.normpath(f"docs/{found['path']}")})
    return top


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page as Python-Markdown wants it: a bar in code of a table stands for itself."""
    return COMMENT.sub("", CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown))
