"""The list of modules in docs/architecture.md: a line for each, from its docstring.

Run: python docs/make/module_list.py   (rewrites the list; `make docs` runs it first)
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "architecture.md"
SOURCE = PAGE.parents[1] / "src" / "softgap"
BEGIN, END = "<!-- modules: written by docs/make/module_list.py -->", "<!-- end of modules -->"


def module_list(source: Path, layers: list[str]) -> str:
    """Every package and module below ``source`` with the first line of its docstring, in the order of the layers."""
    paths = [path for path in source.rglob("*.py") if path.parent != source or path.stem in layers]

    def place(path: Path) -> tuple[int, str]:
        parts = path.relative_to(source).with_suffix("").parts
        return layers.index(parts[0]), "/".join(parts).removesuffix("__init__")

    return "\n".join(f"{_name(path, source):<40}{_first_line(path)}" for path in sorted(paths, key=place))


def _name(path: Path, source: Path) -> str:
    return path.relative_to(source).as_posix().removesuffix("__init__.py")


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0].replace("`", "")


def main() -> None:
    """Rewrite the list."""
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("| layer |")[2].partition("\n\n")[0]
    listed = module_list(SOURCE, re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))
    before, behind = page.split(BEGIN)
    after = behind.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n```text\n{listed}\n```\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
