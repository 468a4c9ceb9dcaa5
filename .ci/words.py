"""Counts the words of the pages and their sentences that are too long to read in one go.

    python .ci/words.py [--check]

The pages are README.md, CONTRIBUTING.md and docs/ without docs/config.md and docs/equality.md, which are generated.
``--check`` fails where a number is above its limit; the limits only ever go down.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS, WORDS_OF_THE_SERVER = 54_800, 5000
"""Of all pages, and of docs/reliability.md and docs/protocol.md together."""
LONGEST_SENTENCE, LONG_SENTENCES = 35, 0


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page: without code blocks, a link as its text, inline code as one word."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?:^|(?<=\n\n))(?: {4}.*\n)+", "\n", text)  # a paragraph of indented lines is code
    text = re.sub(r"``[^`]+``|`[^`]+`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-|#]|\d+\. ))", text):
        for cell in re.split(r"\s\||\|\s", block):
            plain = re.sub(r"\b(e\.g|i\.e|etc|al|vs)\.", r"\1", cell)
            yield from re.split(r"(?<=[.!?])[)\"*_]*\s+", " ".join(plain.split()))


def main(arguments: list[str]) -> int:
    """See the module's text."""
    pages = {page.name: page.read_text() for page in PAGES if page.name not in ("config.md", "equality.md")}
    words = {name: len(re.findall(r"\S*\w\S*", text)) for name, text in pages.items()}
    long = [
        f"{name}: {count} words: {sentence[:100]}"
        for name, text in pages.items()
        for sentence in sentences(text)
        if (count := len(re.findall(r"\S*\w\S*", sentence))) > LONGEST_SENTENCE
    ]
    counted = (
        ("words of all pages", sum(words.values()), WORDS),
        ("words of reliability and protocol", words["reliability.md"] + words["protocol.md"], WORDS_OF_THE_SERVER),
        (f"sentences of more than {LONGEST_SENTENCE} words", len(long), LONG_SENTENCES),
    )
    for what, number, most in counted:
        print(f"{what:40} {number:6}  at most {most}" + ("  TOO MANY" if number > most else ""))
    print("".join(f"    {sentence}\n" for sentence in long), end="")
    return int("--check" in arguments and any(number > most for _, number, most in counted))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
