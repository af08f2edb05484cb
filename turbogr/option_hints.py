"""What an unknown option or command was probably meant to be: a sentence for the error message, or nothing.

In order: an option that is spelt alike or that other programs call so, a setting of the recipe (`--epochs 3` is
`--set train.epochs=3`), an option of another command. No suggestion is better than a misleading one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from turbogr.errors import did_you_mean, nearest_names

_OPTIONS = {
    "--column-names": "--header --fields --names",
    "--data": "-d --input --store --dataset",
    "--delimiter": "--sep --separator",
    "--duplicates": "--dedup --dedupe --drop-duplicates --unique",
    "--encoding": "--charset",
    "--init-from": "--warm-start --pretrained --finetune --load",
    "--item-column": "--item-id --product --item-field",
    "--jobs": "--workers --num-workers --parallel -j",
    "--k": "-k -n --n --top-k --topk --top-n --num-items --num-recommendations --limit",
    "--out": "-o --save --dest --destination --to --target",
    "--overwrite": "-f --force --replace --yes",
    "--ranks": "--nproc --gpus --num-gpus --processes --num-processes --world-size --workers --num-workers",
    "--resume": "--continue --restart",
    "--set": "--override --config-override",
    "--time-column": "--timestamp --time-field",
    "--user-column": "--user-id --customer --user-field",
    "--version": "-V -v",
    "--where": "--filter --condition --query",
    "--which": "--checkpoint --ckpt",
}
"""What other programs call an option."""

_COMMANDS = {
    "bench": "benchmark perf",
    "doctor": "env environment diagnose check info",
    "evaluate": "test measure validate score",
    "inspect": "show describe stats summary view",
    "prepare": "import ingest convert load preprocess process",
    "recipes": "list ls configs models",
    "recommend": "predict infer inference serve generate topk",
    "report": "plot html visualize dashboard",
    "train": "fit run learn start",
}
"""What other programs call a command."""

_MOST_COMMANDS = 2
_LONG = 7

_Find = Callable[[str], Iterable[str]]


def command_hint(name: str, commands: Iterable[str]) -> str:
    """Return which of the commands was probably meant, as " Did you mean ...?", or ""."""
    commands = list(commands)
    meant = [command for command, names in _COMMANDS.items() if name.lower() in names.split()]
    return did_you_mean(name, commands) or did_you_mean("".join(meant[:1]), [c for c in commands if c in meant])


def option_hint(option: str, value: str, options: Sequence[str], settings: _Find | None, elsewhere: _Find) -> str:
    """Return a sentence about what `option` was probably meant to be, or "".

    `options` are those of the command, `settings` finds settings of a recipe where the command takes `--set`, and
    `elsewhere` finds the commands that have this option.
    """
    near = nearest_names(option, options)
    if near and _is_typo(option, near[0]):
        return did_you_mean(option, near)
    alias = [known for known, names in _OPTIONS.items() if option in names.split() and known in options]
    if alias:
        return f" Did you mean {' or '.join(map(repr, alias))}?"
    misspelt = [known for known, names in _OPTIONS.items() if known in options and _is_misspelt(option, names.split())]
    if misspelt and not near:
        return f" Did you mean {' or '.join(map(repr, misspelt))}?"
    meant = list(settings(option)) if settings is not None else []
    if meant:
        shown = " or ".join(f"--set {key}={_shown_value(option, key, value)}" for key in meant)
        return f" A setting of the recipe is changed with {shown}."
    if near:
        return did_you_mean(option, near)
    commands = list(elsewhere(option))
    if not 0 < len(commands) <= _MOST_COMMANDS:
        return ""
    return f" It is an option of {' and '.join(f'turbogr {command}' for command in commands)}."


def _shown_value(option: str, key: str, value: str) -> str:
    """Return the value as it was given if the setting has the option's name: another one may take other values."""
    same = option.strip("-").replace("-", "_") == key.rpartition(".")[2]
    return value if same and value else "VALUE"


def positional_hint(option: str, positionals: Iterable[str]) -> str:
    """Return a sentence if `option` names what the command takes without an option, such as RECIPE, else ""."""
    word = option.strip("-").lower()
    word = {"config": "recipe"}.get(word, word)
    found = [name for name in positionals if name.lower() == word]
    return f" {found[0].upper()} is given without an option." if found else ""


def _is_misspelt(option: str, names: Sequence[str]) -> bool:
    """Whether an option is one of the long names but for a letter or two."""
    return any(nearest_names(option, [name])[:1] and _is_typo(option, name) for name in names if len(name) > _LONG)


def _is_typo(option: str, known: str) -> bool:
    """Whether two options have the same letters but for a few, in contrast to a common word."""
    return abs(len(re.sub(r"\W|_", "", option)) - len(re.sub(r"\W|_", "", known))) <= 2
