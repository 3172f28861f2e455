"""What mkdocs does with these pages: README.md is the first of them, and links lead to pages.

On GitHub the same files are read where they lie: README.md links to `docs/start.md`, and a page to
`../CHANGELOG.md` or to a source file. On the site the first two are pages, and a file is named.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in _PAGES.items():
        text = (_ROOT / name).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # Where a page lies in the repository: those of the root are one folder above the others.
    folder = "" if page.file.src_uri in _PAGES.values() else "docs"

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/") or target in _PAGES:
            target = _PAGES.get(target, target.removeprefix("docs/"))
            return f"[{link[1]}]({target}{link[3]})"
        if (_ROOT / target).exists():
            return f"{link[1]} (`{target}`)"
        return link[0]  # leads nowhere: mkdocs complains

    return _LINK.sub(on_site, markdown)
