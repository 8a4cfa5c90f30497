"""The files of a project that a page of docs/ shows, each below a mark such as `<!-- file: shop.py -->`."""

import re
from pathlib import Path

from tests.commands import PROJECT

FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def write_files(page: str, directory: Path) -> list[str]:
    """Make the files of docs/<page>.md below `directory`; their names."""
    found = FILE.findall((PROJECT / "docs" / f"{page}.md").read_text())
    for name, text in found:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [name for name, _ in found]
