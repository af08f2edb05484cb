"""`turbogr inspect DIR`: what a prepared store holds, with plots for the terminal; `--verify`: whether it is whole."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from turbogr.commands.prepare import account_table
from turbogr.data.feature_summary import describe_features
from turbogr.data.item_info import ItemInfo, describe_item_info
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.data.store_checksums import store_damages
from turbogr.data.store_summary import Distribution, Summary, summarise
from turbogr.data.times import iso_time
from turbogr.errors import UserError
from turbogr.files import check_writable, replace_text
from turbogr.runs import run_damages

_BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN = str.maketrans(
    {**dict(zip("▏▎▍▌▋▊▉█", "----####", strict=True)), **dict(zip("▁▂▃▄▅▆▇", "_.:-=+*", strict=True))}
    | {"→": "->", "…": "..."}
)
_LONGEST_ID = 80
_LONGEST_TITLE = 60
_SPANS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def add_parser(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser("inspect", help="show what a prepared store holds, or check a store or a run")
    parser.add_argument("store", metavar="DIR", help="a folder written by turbogr prepare; with --verify also a run")
    parser.add_argument(
        "--verify", action="store_true", help="compare all files of a store or a run with their checksums, only"
    )
    parser.add_argument("--users", type=int, default=3, metavar="N", help="how many users' sequences to show (3)")
    parser.add_argument("--events", type=int, default=10, metavar="N", help="how many events of each (10)")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description of a store."""
    if args.users < 0 or args.events < 1:
        raise UserError("--users must not be negative and --events at least 1")
    if args.json:
        check_writable(args.json, "--json")
    if args.verify:
        return verify(Path(args.store))
    store = Store.open(args.store)
    summary = summarise(store)
    print(printable(describe(store, summary, args.users, args.events), sys.stdout.encoding))
    if args.json:
        record = {"manifest": dataclasses.asdict(store.manifest), **dataclasses.asdict(summary)}
        replace_text(Path(args.json), json.dumps(record, indent=2, ensure_ascii=False) + "\n", follow_link=True)
    return 0


def verify(path: Path) -> int:
    """Compare a store or a run with its checksums and print what was found; return 1 if something is damaged.

    Raises:
        UserError: `path` is neither.
    """
    found = run_damages(path) if (path / "run.json").exists() else {str(path): store_damages(path)}
    for name, (sentences, remark) in found.items():
        print(f"{name}: {'damaged' if sentences else 'as it was written'}{f' ({remark})' if remark else ''}")
        for sentence in sentences:
            print(f"  {sentence}")
    return int(any(sentences for sentences, _ in found.values()))


def printable(text: str, encoding: str | None) -> str:
    """Return `text` as an output of this encoding can show it: plain bars and escaped ids where it is not Unicode."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text


def describe(store: Store, summary: Summary, num_users: int, num_events: int) -> str:
    """Return everything that `turbogr inspect` prints."""
    manifest = store.manifest
    width = min(shutil.get_terminal_size().columns, 120)
    parts = [
        f"{store.path}: source {_shown(manifest.source)}{_plugin(manifest.settings)}, "
        f"store version {manifest.schema_version}, content {manifest.content_hash[:12]}",
        f"{store.num_users:,} users ({store.user_ids.kind} ids), {store.num_items:,} items "
        f"({store.item_ids.kind} ids), {store.num_events:,} events",
        f"split: {Split.of(store).describe()}",
    ]
    few = Split.of(store).few_users()
    if few is not None:
        parts.append(few)
    if summary.repeats is not None:
        parts.append(f"repeats: {summary.repeats.advise()}")
    if manifest.extends is not None:
        parts.append(
            f"extends {manifest.extends[:12]}: its {manifest.known_users:,} users and {manifest.known_items:,} items "
            "keep their rows"
        )
    parts.append(_actions(store))
    parts += describe_features(store)
    if manifest.ties is not None:
        order, events = manifest.ties
        named = {"file": "the order of the input", "random": "a random order"}[order]
        parts.append(f"ties: {events:,} events have the time of the user's event before them and are in {named}")
    parts += ["", _distribution("events per user", "users", summary.lengths)]
    parts += ["", _distribution("events per item", "items", summary.popularity)]
    shares = ", ".join(f"{share} hold {events:.0%}" for share, events in summary.top_shares.items())
    info = ItemInfo.of(store)
    parts += [f"  of all events, the most popular items' {shares}"]
    parts += ["most popular items", *_top_items(summary, info)]
    parts += ["", _times(summary)]
    if info is not None:
        parts += ["", *describe_item_info(info)]
    if num_users:
        parts += ["", "sequences", *_sequences(store, info, num_users, num_events, width)]
    return "\n".join([*parts, "", account_table(store)])


def _plugin(settings: dict[str, Any]) -> str:
    """Name the plug-in that registered the source; nothing for a built-in source."""
    plugin = settings.get("plugin")
    return f" of the plug-in {_shown(plugin['origin'])}" if plugin else ""


def _actions(store: Store) -> str:
    if not store.actions:
        return "actions: none"
    return "actions: " + ", ".join(f"{_shown(name)} ({values.dtype})" for name, values in store.actions.items())


def _distribution(title: str, what: str, distribution: Distribution) -> str:
    d = distribution
    lines = [f"{title}: mean {d.mean:,.1f}, median {d.median:,}, 90% {d.p90:,}, 99% {d.p99:,}, most {d.largest:,}"]
    labels = [f"{low:,}" if low == high else f"{low:,}-{high:,}" for low, high, _ in d.bins]
    pad = max(map(len, labels))
    largest = max(number for *_, number in d.bins)
    lines += [
        f"  {label:>{pad}}  {_bar(number / largest)} {number:,} {what}"
        for label, (_, _, number) in zip(labels, d.bins, strict=True)
    ]
    return "\n".join(lines)


def _bar(share: float) -> str:
    """Draw a bar in eighths of a character, at least one of them for anything above 0."""
    eighths = max(round(share * _BAR_WIDTH * 8), 1 if share > 0 else 0)
    whole, part = divmod(eighths, 8)
    return (_EIGHTHS[8] * whole + (_EIGHTHS[part] if part else "")).ljust(_BAR_WIDTH)


def _times(summary: Summary) -> str:
    if summary.first_time is None or summary.last_time is None:
        return "times: none; positions in the sequence take their place"
    largest = max(summary.over_time)
    line = "".join(
        _LEVELS[min(int(count / largest * len(_LEVELS)), len(_LEVELS) - 1)] if count else " "
        for count in summary.over_time
    )
    return f"events over time, {iso_time(summary.first_time)} to {iso_time(summary.last_time)}\n  {line}"


def _named(items: list[int | str], info: ItemInfo | None) -> list[str]:
    """Return raw ids for printing, with their titles where the store has them."""
    titles = [None] * len(items) if info is None else info.titles_of(items)
    return [
        _shown(item) if title is None else f'{_shown(item)} "{_shown(title, _LONGEST_TITLE)}"'
        for item, title in zip(items, titles, strict=True)
    ]


def _top_items(summary: Summary, info: ItemInfo | None) -> list[str]:
    items = [item for item, _ in summary.top_items]
    named = _named(items, info)
    if info is not None:
        described = info.descriptions_of(items)
        named = [
            f"{name} ({_shown(text, _LONGEST_TITLE)})" if text else name
            for name, text in zip(named, described, strict=True)
        ]
    return [f"  {text}: {events:,} events" for text, (_, events) in zip(named, summary.top_items, strict=True)]


def _sequences(store: Store, info: ItemInfo | None, num_users: int, num_events: int, width: int) -> list[str]:
    """Show users spread over the lengths, from the shortest to the longest, each with its last events."""
    by_length = np.argsort(store.lengths, kind="stable")
    by_length = by_length[store.lengths[by_length] > 0]
    chosen = by_length[np.linspace(0, len(by_length) - 1, min(num_users, len(by_length))).astype(np.int64)]
    lines = []
    for user in chosen.tolist():
        start, end = int(store.offsets[user]), int(store.offsets[user + 1])
        first = max(start, end - num_events)
        items = _named(store.item_ids.decode(store.items[first:end]).tolist(), info)
        times = np.asarray(store.times[first:end])
        text = f"user {_shown(store.user_ids.decode([user])[0])}, {end - start:,} events: " + (
            "… " if first > start else ""
        )
        real = store.manifest.times == "real"
        text += items[0] + (f" ({iso_time(int(times[0]))})" if real else "")
        for item, gap in zip(items[1:], np.diff(times).tolist(), strict=True):
            text += f" →{_span(gap) if real else ''} {item}"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    return lines


def _shown(raw: object, longest: int = _LONGEST_ID) -> str:
    """Return a raw id for printing: characters that could control the terminal are escaped, and a long id is cut."""
    text = str(raw)
    text = text if len(text) <= longest else f"{text[:longest]}…"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _span(seconds: int) -> str:
    """Write a pause in its largest unit, such as 3h."""
    unit, name = next(((unit, name) for unit, name in _SPANS if seconds >= unit), (1, "s"))
    return f"{round(seconds / unit)}{name}"
