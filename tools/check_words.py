"""Check the repository's text, names in code included, for words that we replace by plainer ones.

`make lint` runs it. A reader who knows PyTorch and recommender systems should not have to guess a word, so the field's
own term is used: heartbeat, rendezvous, partition, fix. A line that needs one of these words, e.g. to quote someone,
carries the comment `words: allow`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PLAINER = {
    r"mend(s|ed|ing|able)?": "fix",
    r"dies|died|dying": "fails, ends, crashes, is killed",
    r"pulses?": "heartbeat",
    r"meetings?": "rendezvous",
    r"deal(s|t|ing)?": "partition, assign, handle",
    r"told|telling": "prints, reports, says",
    r"lack(s|ed|ing)?": "has no, is missing",
    r"wish(es|ed)?": "setting, request",
    r"(?<!in[ _])flights?": "pending batch",
    r"travel(s|led|ling)?": "is sent, is copied",
    r"twins?": "replica, counterpart",
    r"anew": "again",
    r"lest": "so that ... not",
    r"whence|whither|thereby|hitherto|henceforth|beforehand|herein|astray": "a plain sentence",
    r"whoever": "name it: the rank, the process, the reader",
    r"without a word|in vain|signs? of life|last words?": "without a message, no heartbeat, error",
}
"""Regular expressions of whole words, and what to write instead."""

CHECKED = (".py", ".md", ".cpp", ".h", ".yaml", ".yml", ".toml", ".js", ".css", ".html", "Makefile")
LEFT_OUT = ("tools/check_words.py", "tests/tools/test_check_words.py")
ALLOWED = "words: allow"

# Names in code consist of words too, e.g. `is_told` or `ToldElsewhere`.
_WORDS = {
    re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])", re.IGNORECASE): plainer for pattern, plainer in PLAINER.items()
}


def find_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, word, what to write instead) for every word of the list in a text."""
    for number, line in enumerate(text.splitlines(), 1):
        if ALLOWED not in line:
            for pattern, plainer in _WORDS.items():
                for match in pattern.finditer(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", line)):
                    yield number, match.group(), plainer


def tracked_files(root: Path) -> list[str]:
    """Return the files under version control whose text is checked."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if name.endswith(CHECKED) and name not in LEFT_OUT]
    return [name for name in names if (root / name).is_file()]


def find_problems(root: Path) -> list[str]:
    """Return a line for every word of the list in the repository."""
    return [
        f"{name}:{number}: '{word}'; plainer: {plainer}"
        for name in tracked_files(root)
        for number, word, plainer in find_words((root / name).read_text(encoding="utf-8"))
    ]


def main(root: Path) -> int:
    """Print the problems and return 1 if there are any."""
    problems = find_problems(root)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))
