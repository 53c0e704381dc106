"""Hook of mkdocs.yml: pages keep their places in the repository, so links work here and there.

docs/, README.md, CHANGELOG.md, CONTRIBUTING.md and the pages of examples/ become pages of the site.
Files that they link to, such as sources and pictures, are copied beside them. A list may begin
without a blank line before it, as on GitHub.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
LIST = re.compile(r"^((?![-*|#] |\d+\. )\S.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)
"""A line of text before the first item of a list."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site. The theme's own stay."""
    root = Path(config.config_file_path).parent
    pages = list(pages_of(root))
    names = {str(path.relative_to(root)) for path in (*pages, *linked(pages, root))}
    shape = (str(root), config.site_dir, config.use_directory_urls)
    own = [File(name, *shape) for name in sorted(names)]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *own])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with a blank line before each list; code stays as it is."""
    parts = FENCED.split(markdown)
    parts[::2] = [LIST.sub(r"\1\n\n", part) for part in parts[::2]]
    return "".join(parts)


def pages_of(root: Path) -> Iterator[Path]:
    """Yield the Markdown files of the site."""
    yield from (root / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))
    for folder in ("docs", "examples"):
        yield from sorted((root / folder).rglob("*.md"))


def linked(pages: list[Path], root: Path) -> Iterator[Path]:
    """Yield the files inside the repository to which pages link, other pages aside."""
    for page in pages:
        for link in LINK.findall(page.read_text()):
            target = (page.parent / link).resolve()
            if target.is_file() and target.suffix != ".md" and target.is_relative_to(root):
                yield target
