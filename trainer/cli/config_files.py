"""Finds the user's config file that Hydra misreads, and how to mend it: encoding, BOM, missing ``@package``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from trainer.cli.vocabulary import Vocabulary
from trainer.errors import UserError
from trainer.wording import quoted

BOM = b"\xef\xbb\xbf"
HEADER = "# @package _global_"


def not_utf8(vocabulary: Vocabulary, chain: Iterable[BaseException]) -> UserError | None:
    """The refusal of a config file that is not UTF-8; None: that is not the error."""
    error = next((e for e in chain if isinstance(e, UnicodeDecodeError)), None)
    if error is None:
        return None
    for file in (file for folder in _folders(vocabulary) for file in sorted(folder.rglob("*.yaml"))):
        content = file.read_bytes()
        if error.object not in content:
            continue
        encoding = _encoding(content)
        line = content[: content.find(error.object) + error.start].count(b"\n") + 1
        where = str(file) if encoding == "UTF-16" else f"{file}, line {line}"
        name = quoted(str(file))
        mended = f"iconv -f {encoding} -t UTF-8 {name} > {quoted(f'{file}.new')} && mv {quoted(f'{file}.new')} {name}"
        return UserError(where, "a config file is UTF-8, and this one is not", mended)
    return None


def not_global(vocabulary: Vocabulary) -> UserError | None:
    """The refusal of the chosen recipe, or of one that it extends, without ``@package _global_``."""
    for name in vocabulary.recipe.strip("[]").split(","):
        for recipe in _with_extended(vocabulary, name.strip(), frozenset()):
            file = _file(vocabulary, f"recipe/{recipe}.yaml")
            if file is None or vocabulary.package(f"recipe/{recipe}") == "_global_":
                continue
            what = f"+recipe={vocabulary.recipe} (in {file})"
            content = file.read_bytes()
            if content.startswith(BOM) and content[len(BOM) :].lstrip().startswith(HEADER.encode()):
                why = "its file begins with a byte order mark, so that its first line is not read"
                return UserError(what, why, f"sed -i '1s/^\\xEF\\xBB\\xBF//' {quoted(str(file))}")
            return UserError(
                what, "its file does not say that its keys belong to the whole config", f'"{HEADER}" as its first line'
            )
    return None


def _with_extended(vocabulary: Vocabulary, recipe: str, seen: frozenset[str]) -> Iterator[str]:
    """The recipe, and the recipes in its defaults list."""
    loaded = vocabulary.loader.repository.load_config(f"recipe/{recipe}")
    if loaded is None or recipe in seen:
        return
    yield recipe
    for default in loaded.defaults_list or ():
        path = str(getattr(default, "path", "") or "")
        other = path.removeprefix("/recipe/")
        if path != "_self_" and not other.startswith("/"):
            yield from _with_extended(vocabulary, other, seen | {recipe})


def _folders(vocabulary: Vocabulary) -> list[Path]:
    """The folders of Hydra's search path, in its order."""
    found = [element.path for element in vocabulary.loader.get_search_path().get_path()]
    return [Path(path.removeprefix("file://")) for path in found if path and path.startswith("file://")]


def _file(vocabulary: Vocabulary, name: str) -> Path | None:
    return next((folder / name for folder in _folders(vocabulary) if (folder / name).is_file()), None)


def _encoding(content: bytes) -> str:
    """The likely encoding of a file that is not UTF-8, as iconv calls it."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    return "CP1252" if any(0x80 <= byte < 0xA0 for byte in content) else "LATIN1"
