"""What an installation brings beside its code: recipes, and packages that may be missing."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PLACES = _PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes"
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


def package_version(name: str) -> str | None:
    """The installed version of a distribution; None where its metadata are not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def recipes_folder() -> Path:
    """The folder of all recipes; it may be missing where the package was taken apart."""
    return next((place for place in _PLACES if place.is_dir()), _PLACES[0])


def with_recipes(path: Path) -> Path:
    """`path`, or the recipe of that name where `recipes/NAME` is not in the current folder."""
    if len(path.parts) == 2 and path.parts[0] == "recipes" and not path.exists():
        recipe = recipes_folder() / path.name
        return recipe if recipe.is_file() else path
    return path


def install_command(extra: str) -> str:
    """`pip install ...` of what the extra names: right wherever this package came from."""
    try:
        lines = requires("tokenmill") or []
    except PackageNotFoundError:
        lines = []
    wanted = [line.partition(";")[0].strip() for line in lines if extra in _EXTRA.findall(line)]
    return "pip install " + " ".join(f"'{name}'" for name in wanted or [f"tokenmill[{extra}]"])
