"""Build the sdist and the wheel for a public address: `make dist URL=https://host/owner/project`.

A package index shows `README.md` and the project's links away from the repository, where relative
links lead nowhere. The distribution is therefore built from a copy of the sources in which
`pyproject.toml` has `[project.urls]` and the README's links are absolute. They point to the tag of
the version (`v0.1.0`), and the address must serve files under `blob/TAG/`, folders under
`tree/TAG/` and pictures under `raw/TAG/`, as GitHub, GitLab and Gitea do.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = re.compile(r"https://[\w.-]+(/[\w.~-]+)+")
# A Markdown link or picture whose target is a path of the repository.
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s#]+)([^)\s]*)\)")
URLS = """
[project.urls]
Homepage = "{url}"
Documentation = "{url}/tree/{tag}/docs"
Changelog = "{url}/blob/{tag}/CHANGELOG.md"
Issues = "{url}/issues"
"""


def absolute_links(markdown: str, url: str, tag: str, root: Path) -> str:
    """Replace the relative links of a page by addresses at `url`."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        path = root / target
        if not path.exists():
            raise SystemExit(f"README.md links to {target}, which does not exist.")
        kind = "raw" if picture else "tree" if path.is_dir() else "blob"
        return f"{picture}[{text}]({url}/{kind}/{tag}/{target}{anchor})"

    return RELATIVE_LINK.sub(absolute, markdown)


def copy_sources(root: Path, target: Path) -> None:
    """Copy what git would commit, so that nothing built earlier gets into the distribution."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():  # a deleted file is listed until the deletion is staged
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target / name)


def build(url: str, out: Path, root: Path = ROOT) -> list[Path]:
    """Build the sdist, and the wheel from it, into `out`."""
    url = url.rstrip("/")
    if not ADDRESS.fullmatch(url):
        raise SystemExit(
            f"The public address of the project must look like https://host/owner/project, got "
            f"{url!r}. Name it: make dist URL=https://host/owner/project"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        copy_sources(root, source)
        pyproject, readme = source / "pyproject.toml", source / "README.md"
        settings = pyproject.read_text(encoding="utf-8")
        tag = "v" + tomllib.loads(settings)["project"]["version"]
        pyproject.write_text(settings + URLS.format(url=url, tag=tag), encoding="utf-8")
        page = absolute_links(readme.read_text(encoding="utf-8"), url, tag, root)
        readme.write_text(page, encoding="utf-8")
        command = ["-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The build failed:\n{done.stdout}{done.stderr}")
    return sorted(out.glob("etrace_bridge-*"))


def main() -> None:
    """Build for the address on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="the project's public address")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    options = parser.parse_args()
    for file in build(options.url, options.out):
        print(file)


if __name__ == "__main__":
    main()
