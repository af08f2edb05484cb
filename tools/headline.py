"""Write the README's table of measured figures, and its picture, from the records in docs/results.

`python tools/headline.py` writes both (as `make format` does); a test compares them with the records. No figure is
typed by hand: speeds and memory come from the benchmarks' records, HR@10 from the sweeps' records, and the published
HR@10 from the first line of the recipe that repeats it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turbogr.bench.record import Record
from turbogr.plot import Axis, bar_chart
from turbogr.plot.svg import LIGHT_TONES, STYLE, clean, element

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "headline.svg"
RESULTS = ROOT / "docs" / "results"
RECIPE = ROOT / "recipes" / "ml-1m" / "hstu.yaml"

_START = "<!-- headline: written by tools/headline.py from docs/results; `make format` writes it again -->"
_END = "<!-- end of headline -->"

_OURS, _OTHERS = 0, 5  # palette slots: blue and grey
_NO_BREAK = "\u00a0"
_GAP = 8.0  # pixels around the panels of the picture


@dataclass(frozen=True)
class Headline:
    """The README's figures: records of benchmarks by name, HR@10 of HSTU on MovieLens-1M by sweep, and published."""

    records: Mapping[str, Record]
    hit_rates: Mapping[str, Sequence[float]]
    published: float

    @classmethod
    def read(cls, results: Path = RESULTS, recipe: Path = RECIPE) -> Headline:
        """Read the records of `results` and the published figure of `recipe`."""
        benchmarks = ("train", "prepare")
        sweeps = ("quality", "quality-random-ties")
        return cls(
            {name: Record.read(results / f"{name}.json") for name in benchmarks},
            {name: _hit_rates(results / f"{name}.json", recipe.stem) for name in sweeps},
            _published(recipe),
        )

    def table(self) -> str:
        """Return the table in Markdown: every row names what it is compared with, and what differs."""
        rows = [*self._training(), self._memory(), *self._quality(), self._preparing()]
        head = ["| measured | TurboGR | compared with | |", "|---|---|---|---|"]
        return "\n".join([*head, *(_row(row) for row in rows), "", self._sources()])

    def picture(self) -> str:
        """Return speed, memory and HR@10 as three bar charts side by side."""
        train = self.records["train"].figures
        speed = {
            "TurboGR": train["ml1m_tokens_per_second"],
            "plain PyTorch": train["ml1m_reference_tokens_per_second"],
            "RecTools": train["ml1m_rectools_tokens_per_second"],
        }
        memory = {
            "TurboGR": train["ml1m_peak_memory_bytes"] / 2**20,
            "plain PyTorch": train["ml1m_reference_peak_memory_bytes"] / 2**20,
            "RecTools": float("nan"),
        }
        quality = {
            "TurboGR, file's order": statistics.fmean(self.hit_rates["quality"]),
            "TurboGR, random ties": statistics.fmean(self.hit_rates["quality-random-ties"]),
            "published": self.published,
        }
        panels = [
            _panel("Training speed", speed, Axis("tokens/s, more is better", zero=True, format=_whole), 270),
            _panel("Peak memory", memory, Axis("MiB, less is better", zero=True, format=_whole), 270),
            _panel("Quality", quality, Axis("HR@10, more is better", zero=True, format=_rate), 320),
        ]
        return _side_by_side(panels, "HSTU on two CPU cores, at MovieLens-1M's size")

    def _sources(self) -> str:
        """Links to the records, each benchmark with its machine."""
        machines = {name: (record.machine["cores"], record.machine["cpu"]) for name, record in self.records.items()}
        named = [f"{_record_link(name)} ({cores} cores, {_short(cpu)})" for name, (cores, cpu) in machines.items()]
        return f"Records: {', '.join([*named, *map(_record_link, self.hit_rates)])}."

    def _training(self) -> list[list[str]]:
        train = self.records["train"].figures
        ours, plain, wide, wide_plain, rectools = (
            train[f"{case}_tokens_per_second"]
            for case in ("ml1m", "ml1m_reference", "d256", "d256_reference", "ml1m_rectools")
        )
        speed = "[Training](docs/results/README.md#training-steps), tokens/s"
        against_plain = f"{_times(ours, plain, 'faster')}; {_times(wide, wide_plain, 'at width 256')}"
        loading = f"RecTools: {rectools:,.0f}, with its data loading"
        return [
            [speed, f"{ours:,.0f}", loading, _times(ours, rectools, "faster")],
            ["the same", f"{ours:,.0f}", f"plain PyTorch: {plain:,.0f}", against_plain],
        ]

    def _memory(self) -> list[str]:
        train = self.records["train"].figures
        ours, plain, wide, wide_plain = (
            train[f"{case}_peak_memory_bytes"] / 2**20 for case in ("ml1m", "ml1m_reference", "d256", "d256_reference")
        )
        less = f"{_times(plain, ours, 'less')}; {_times(wide_plain, wide, 'at width 256')}"
        compared = f"plain PyTorch: {plain:,.0f}; RecTools not measured"
        return ["Peak memory of training, MiB", f"{ours:,.0f}", compared, less]

    def _quality(self) -> list[list[str]]:
        differs = {
            "quality": ("[HR@10](docs/results/quality.md), ties in the file's order", ", another order of ties"),
            "quality-random-ties": ("the same, ties in random order", ", filters 200 items at most"),
        }
        rows = []
        for name, (what, note) in differs.items():
            rate = statistics.fmean(self.hit_rates[name])
            change = f"{(rate / self.published - 1) * 100:+.1f} %".replace("-", "−")
            seeds = f"{len(self.hit_rates[name])} seed{'s' * (len(self.hit_rates[name]) > 1)}"
            rows.append([what, f"{_rate(rate)} ({seeds})", f"published: {_rate(self.published)}{note}", change])
        return rows

    def _preparing(self) -> list[str]:
        figures = self.records["prepare"].figures
        ours, theirs = (figures[f"{way}events_per_second_1m"] for way in ("", "pandas_"))
        larger = _compared(*(figures[f"{way}events_per_second_10m"] for way in ("", "pandas_")))
        what = "[Preparing](docs/guide/data.md) 1 million events, events/s"
        compared = f"pandas: {theirs / 1e6:.2f} million"
        return [what, f"{ours / 1e6:.2f} million", compared, f"{_compared(ours, theirs)}; 10 million: {larger}"]


def replace_block(text: str, table: str) -> str:
    """Return the README's `text` with `table` between the two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not (start and end):
        raise ValueError(f"README.md has no block between '{_START}' and '{_END}'")
    return f"{before}{_START}\n\n{table}\n\n{_END}{after}"


def _hit_rates(sweep: Path, recipe: str) -> list[float]:
    """HR@10 of every run of `recipe`, a seed each."""
    runs = json.loads(sweep.read_text(encoding="utf-8"))["runs"]
    return [run["metrics"]["hr@10"] for run in runs if run["recipe"] == recipe]


def _published(recipe: Path) -> float:
    """HR@10 in the recipe's first line."""
    found = re.match(r"# .* as published: HR@10 (\.\d+)", recipe.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{recipe}: the first line names no published HR@10")
    return float(found[1])


def _record_link(name: str) -> str:
    return f"[{name}](docs/results/{name}.json)"


def _short(cpu: str) -> str:
    return cpu.replace("(R)", "").removesuffix(" Processor")


def _rate(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def _row(cells: Sequence[str]) -> str:
    """Return a line of the table whose figures, in the second and the last column, are not broken over lines."""
    what, ours, compared, ratio = cells
    ratio = "; ".join(part.replace(" ", _NO_BREAK) for part in ratio.split("; "))
    return f"| {what} | {ours.replace(' ', _NO_BREAK)} | {compared} | {ratio} |"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _compared(ours: float, theirs: float) -> str:
    return _times(ours, theirs, "faster") if ours > theirs else _times(theirs, ours, "slower")


def _times(more: float, fewer: float, word: str) -> str:
    return f"{more / fewer:.1f}× {word}"


@dataclass(frozen=True)
class _Panel:
    svg: str
    width: float
    height: float


def _panel(title: str, values: Mapping[str, float], axis: Axis, width: float) -> _Panel:
    slots = [_OURS if name.startswith("TurboGR") else _OTHERS for name in values]
    svg = bar_chart(values, title=title, axis=axis, slots=slots, width=width)
    found = re.search(r' height="([\d.]+)"', svg)
    assert found is not None
    return _Panel(svg, width, float(found[1]))


def _side_by_side(panels: Sequence[_Panel], title: str) -> str:
    """Return one SVG with `panels` in a row under a title."""
    top = 34.0
    width = sum(panel.width + _GAP for panel in panels) + _GAP
    height = top + max(panel.height for panel in panels) + _GAP
    paper = element("rect", class_="paper", fill=LIGHT_TONES["paper"], width=width, height=height)
    style = "font-size:15px;font-weight:600"
    heading = element("text", clean(title), class_="ink", fill=LIGHT_TONES["ink"], style=style, x=_GAP + 4, y=23.0)
    placed, left = [], _GAP
    for panel in panels:
        placed.append(panel.svg.replace("<svg ", f'<svg x="{left:g}" y="{top:g}" ', 1))
        left += panel.width + _GAP
    return element(
        "svg",
        f"<title>{clean(title)}</title><style>{STYLE}</style>{paper}{heading}{''.join(placed)}",
        xmlns="http://www.w3.org/2000/svg",
        class_="chart",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_label=title,
    )


def main() -> None:
    """Write the README's block and the picture."""
    headline = Headline.read()
    README.write_text(replace_block(README.read_text(encoding="utf-8"), headline.table()), encoding="utf-8")
    PICTURE.write_text(headline.picture() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
