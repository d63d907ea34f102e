"""Make README's links absolute and add the project's addresses to pyproject.toml, in the working folder.

    python .ci/release_links.py https://HOST/OWNER/NAME TAG

The release workflow runs it before it builds: the page of a package shows README.md, but not the files next to it.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:)(?P<path>[^)]+)\)")


def main(address: str, tag: str) -> None:
    """Rewrite both files.

    Args:
        address: URL of the repository.
        tag: Tag of the release, at which the linked files are shown.
    """

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({address}/{kind}/{tag}/{link['path']})"

    readme, project = Path("README.md"), Path("pyproject.toml")
    text = LINK.sub(absolute, readme.read_text(encoding="utf-8"))
    pages = {"Repository": "", "Documentation": f"/tree/{tag}/docs", "Changelog": f"/blob/{tag}/CHANGELOG.md"}
    pages["Issues"] = "/issues"
    urls = "".join(f'{name} = "{address}{page}"\n' for name, page in pages.items())
    readme.write_text(text, encoding="utf-8")
    project.write_text(f"{project.read_text(encoding='utf-8')}\n[project.urls]\n{urls}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
