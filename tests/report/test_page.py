from __future__ import annotations

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from turbogr.cli import main
from turbogr.commands import report as report_command
from turbogr.errors import UserError
from turbogr.plot import thinned
from turbogr.report import page
from turbogr.report.data_section import Lengths, Popularity
from turbogr.report.page import SECTIONS, render, write_report
from turbogr.report.run_data import RunData
from turbogr.report.section import Section

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Tree(HTMLParser):
    """Checks that elements nest, and gathers the text, the elements and the attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data):
        if not {"style", "script", "title"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def parse(html: str) -> Tree:
    tree = Tree()
    tree.feed(html)
    tree.close()
    assert not tree.open, f"never closed: {tree.open}"
    return tree


def report(run: Path) -> Tree:
    return parse(write_report(run).read_text(encoding="utf-8"))


def change(file: Path, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_result_comes_first_in_words_and_numbers(run_folder):
    text = report(run_folder).text
    headline = "HSTU puts the next item in its top 10 for 31.4 % of the users"
    assert headline in text
    assert "6.1× the most popular items (5.1 %)" in text
    assert "1.8× a Markov chain (17.2 %)" in text
    assert text.index(headline) < text.index("Learning rate")


def test_every_number_stands_beside_its_protocol(run_folder):
    text = report(run_folder).text
    protocol = "the test item is ranked against all 700 items, without the user's earlier items; checkpoint of step 850"
    assert text.count(protocol) == 2  # under the headline and under the table


def test_users_that_were_not_measured_are_counted(run_folder):
    change(run_folder / "evaluation.json", skipped={"one event only": 12, "no history": 0})
    assert "Users not measured: 12 (one event only)." in report(run_folder).text


def test_all_parts_are_there(run_folder):
    tree = report(run_folder)
    for words in (
        "Training loss", "Validation metrics", "best NDCG@10, epoch", "0.3142", "0.5731", "Throughput",
        "Model FLOPs utilisation", "181 GFLOP/s", "Length of a user's history", "Popularity of items", "num_negatives",
        "AMD EPYC 7R13", "23.5 GiB", "jagged attention", "2.13.0+cpu", "User 1000", "12 Mar 2025", "6 more users",
    ):  # fmt: skip
        assert words in tree.text, words
    ids = [attributes["id"] for _, attributes in tree.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"] for tag, a in tree.found if tag == "a"]
    assert all(link.startswith("#") and link[1:] in ids for link in links)


def test_the_page_needs_nothing_from_outside(run_folder):
    html = write_report(run_folder).read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, never fetched
    assert not re.findall(r"@import|url\(", html)
    assert all(tag not in ("img", "iframe", "object", "embed", "base", "form") for tag, _ in parse(html).found)


def test_metrics_table_marks_the_best(run_folder):
    content = json.loads((run_folder / "evaluation.json").read_text())
    content["parts"]["test"]["markov"]["mrr"] = 0.9
    (run_folder / "evaluation.json").write_text(json.dumps(content))
    html = re.sub(r"\s+", " ", write_report(run_folder).read_text())
    assert '<td class="best">0.9000</td>' in html
    assert '<td class="best">0.1502</td>' not in html


def test_a_model_below_a_baseline_is_called_that(run_folder):
    content = json.loads((run_folder / "evaluation.json").read_text())
    content["parts"]["test"]["model"]["hr@10"] = 0.04
    (run_folder / "evaluation.json").write_text(json.dumps(content))
    text = report(run_folder).text
    assert "0.78× the most popular items" in text
    assert "does not beat a Markov chain and the most popular items by HR@10" in text


def test_a_baseline_of_zero_has_no_factor(run_folder):
    content = json.loads((run_folder / "evaluation.json").read_text())
    content["parts"]["test"]["popularity"] = dict.fromkeys(content["parts"]["test"]["popularity"], 0.0)
    (run_folder / "evaluation.json").write_text(json.dumps(content))
    assert "∞ the most popular items (0.0 %)" in report(run_folder).text


def test_other_cut_offs_work(run_folder):
    (run_folder / "evaluation.json").write_text(
        json.dumps({"step": 1, "epoch": 1, "parts": {"test": {"model": {"hr@5": 0.2, "ndcg@5": 0.1}}}, "num_users": 9})
    )
    text = report(run_folder).text
    assert "top 5 for 20.0 % of the users" in text
    assert "does not state its protocol" in text


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></style></script><script>alert(1)</script>",
    "{{ 7*7 }}{% raw %}",
    "javascript:alert(1)",
    "a\x00b\u202e\u2028\ud800",
    "x" * 5000,
    "&lt;b&gt;",
]


def test_hostile_ids_stay_text(run_folder):
    users = [
        {
            "user": evil,
            "history": [{"item": evil, "time": 1_700_000_000}],
            "target": evil,
            "target_time": 1_700_000_100,
            "target_rank": 1,
            "recommendations": [{"item": evil, "score": 1.0}],
        }
        for evil in HOSTILE
    ]
    (run_folder / "samples.json").write_text(json.dumps({"users": users}))
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    evil = HOSTILE[2]
    config["model"]["name"] = config[evil] = {evil: evil}
    (run_folder / "config.yaml").write_text(yaml.safe_dump(config))
    change(
        run_folder / "run.json", command=evil, status=evil, model={"name": evil}, versions={evil: evil}, created=evil
    )
    change(run_folder / "evaluation.json", protocol=evil, selected_on=evil, epoch=evil)
    hostile_run = run_folder.rename(run_folder.with_name("<script>alert(1)<"))

    tree = report(hostile_run)
    assert [tag for tag, _ in tree.found].count("script") == 1
    assert all(tag != "img" for tag, _ in tree.found)
    assert not [name for _, attributes in tree.found for name in attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in tree.text
    assert "{{ 7*7 }}" in tree.text
    assert "&lt;b&gt;" in tree.text


def test_an_item_that_the_user_had_before_has_no_position(run_folder):
    samples = json.loads((run_folder / "samples.json").read_text())
    for user in samples["users"]:
        user["target_rank"] = None
    (run_folder / "samples.json").write_text(json.dumps(samples))
    text = report(run_folder).text
    assert text.count("had it before") == len(samples["users"])
    assert "not in the list" not in text


def test_the_policy_allows_exactly_our_script(run_folder):
    import base64
    import hashlib

    html = write_report(run_folder).read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", html, re.S).group(1)
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for tag, a in parse(html).found if a.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{expected}'" in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("metrics.jsonl", "neither training steps nor evaluations"),
        ("evaluation.json", "HSTU, not evaluated yet"),
        ("evaluation.json samples.json", "There are no sample users yet"),
    ],
)
def test_what_is_missing_is_said_and_the_rest_is_shown(run_folder, missing, words):
    for name in missing.split():
        (run_folder / name).unlink()
    text = report(run_folder).text
    assert words in text
    assert "Length of a user's history" in text


def test_a_task_without_samples_has_no_such_section(run_folder):
    (run_folder / "samples.json").unlink()
    text = report(run_folder).text
    assert "Recommendations" not in text
    assert "sample users" not in text


def test_a_run_that_has_just_begun(run_folder):
    for name in ("metrics.jsonl", "evaluation.json", "samples.json"):
        (run_folder / name).unlink()
    change(run_folder / "run.json", status="running", finished=None)
    text = report(run_folder).text
    assert "running" in text
    assert "12 Mar 2025, 13:58 UTC" in text
    assert "turbogr evaluate" in text


def test_a_run_without_final_evaluation_shows_the_latest(run_folder):
    (run_folder / "evaluation.json").unlink()
    assert re.search(r"HR@10 on the validation items was \d+\.\d % at step 1,200\.", report(run_folder).text)


def write_best(run, step):
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "best.json").write_text(json.dumps({"step": step, "epoch": 1, "value": 0.2}))


def write_summary(run, step, *, old=False):
    metrics = {"hr@10": 0.4231, "ndcg@10": 0.25}
    baselines = {"popularity": {"hr@10": 0.05, "ndcg@10": 0.02}, "markov": {"hr@10": 0.2, "ndcg@10": 0.1}}
    content = {"status": "finished", "part": "test", "metrics": metrics, "baselines": baselines, "num_users": 777}
    protocol = f"the test item is ranked against all 700 items; best checkpoint, of step {step}"
    content["protocol"] = protocol if old else {"seen": "excluded", "text": protocol}  # 0.1.0 wrote the text alone
    (run / "summary.json").write_text(json.dumps({**content, "step": step, "steps": 2000}))


@pytest.mark.parametrize("old", [False, True])
def test_a_run_that_was_only_trained_shows_its_summary(run_folder, old):
    (run_folder / "evaluation.json").unlink()
    write_best(run_folder, 1150)
    write_summary(run_folder, 1150, old=old)
    text = report(run_folder).text
    assert "top 10 for 42.3 % of the users" in text
    assert "8.5× the most popular items (5.0 %)" in text
    assert "of 777 users" in text
    assert text.count("best checkpoint, of step 1150") == 2
    assert "turbogr evaluate" not in text


def test_the_evaluation_of_the_best_checkpoint_goes_before_the_summary(run_folder):
    write_best(run_folder, 850)
    write_summary(run_folder, 850)
    text = report(run_folder).text
    assert "top 10 for 31.4 % of the users" in text
    assert "turbogr evaluate" not in text


def test_an_evaluation_of_another_checkpoint_gives_way_to_the_summary(run_folder):
    write_best(run_folder, 1150)
    write_summary(run_folder, 1150)
    text = report(run_folder).text
    assert "top 10 for 42.3 % of the users" in text
    assert "31.4 %" not in text
    assert "evaluation.json is of the checkpoint of step 850, and so are the recommendations" in text
    assert "of summary.json, of the best checkpoint (step 1,150). Renew it with: turbogr evaluate" in text


@pytest.mark.parametrize(("summary", "value"), [(None, "31.4 %"), (700, "31.4 %"), (900, "42.3 %")])
def test_a_result_of_another_checkpoint_than_the_best_says_so(run_folder, summary, value):
    write_best(run_folder, 1150)
    if summary:
        write_summary(run_folder, summary)
    text = report(run_folder).text
    assert f"top 10 for {value} of the users" in text
    of = "step 900 (summary.json)" if summary == 900 else "step 850 (evaluation.json)"
    assert f"The result is of the checkpoint of {of}, not of the best checkpoint (step 1,150)" in text


def test_a_damaged_summary_or_best_is_named_and_not_fatal(run_folder):
    write_best(run_folder, 1150)
    (run_folder / "summary.json").write_text('{"metrics": 3, "baselines": [], "step": "x", "part": null}')
    assert "The result is of the checkpoint of step 850" in report(run_folder).text
    (run_folder / "checkpoints" / "best.json").write_text("{")
    (run_folder / "summary.json").write_text("[")
    text = report(run_folder).text
    assert "best.json cannot be read" in text
    assert "summary.json cannot be read" in text
    assert "top 10 for 31.4 % of the users" in text


def test_a_bare_run_record_is_enough(run_folder):
    (run_folder / "run.json").write_text("{}")
    (run_folder / "config.yaml").write_text("{}")
    text = report(run_folder).text
    assert "run.json does not say where the store is" in text


def test_a_store_that_is_gone_or_changed_is_said(run_folder, tmp_path):
    record = json.loads((run_folder / "run.json").read_text())
    record["data"]["path"] = str(shutil.copytree(record["data"]["path"], tmp_path / "copy"))
    change(run_folder / "run.json", data={**record["data"], "content_hash": "0" * 64})
    assert "does not hold the data that" in report(run_folder).text
    shutil.rmtree(record["data"]["path"])
    assert "does not exist" in report(run_folder).text


def test_damaged_files_are_named_and_not_fatal(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 12')
    (run_folder / "evaluation.json").write_text("{")
    (run_folder / "samples.json").write_text("[]")
    text = report(run_folder).text
    assert "metrics.jsonl: 1 unreadable line left out (1225)." in text
    assert "evaluation.json cannot be read" in text
    assert "samples.json does not hold a JSON object" in text
    assert "Training loss" in text


def test_values_of_the_wrong_kind_do_not_break_the_page(run_folder):
    (run_folder / "evaluation.json").write_text(
        json.dumps({"parts": {"test": {"model": {"hr@10": "high", "mrr": None}, "markov": 3}, "valid": []}})
    )
    (run_folder / "samples.json").write_text(json.dumps({"users": [{}, 3, {"history": 4, "recommendations": [None]}]}))
    (run_folder / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 1, "loss": NaN}\n{"kind": "train", "step": 2, "loss": "x"}\n[]\n'
        '{"kind": "eval", "step": 2}\n{"kind": "eval", "part": "valid", "step": 3, "epoch": null, "hr@10": null}\n'
    )
    change(run_folder / "run.json", machine=[], versions="new", data=None)
    assert "not evaluated yet" in report(run_folder).text


def test_the_profile_of_a_step_is_drawn(run_folder):
    profile = {"steps": 5, "milliseconds": {"hstu_attention": 30.0, "between <operators>": 10.0, "odd": "text"}}
    (run_folder / "profile.json").write_text(json.dumps(profile))
    text = render(RunData.read(run_folder))
    assert "Time of a step by operator" in text
    assert "hstu attention" in text and "hstu attention 75.0 %" in text
    assert "steps of 40 ms" in text
    assert "<operators>" not in text
    (run_folder / "profile.json").write_text('{"milliseconds": [1]}')
    assert "Time of a step by operator" not in render(RunData.read(run_folder))


def test_losses_that_are_not_finite_are_counted(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 1300, "loss": NaN}\n')
    assert "1 recorded losses were not finite and are left out." in report(run_folder).text


def test_steps_that_were_left_out_are_named(run_folder):
    assert "Left out because" not in report(run_folder).text
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "bad_step", "step": 6, "action": "skipped", "what": "the loss"}\n')
        file.write('{"kind": "bad_step", "step": 1007, "action": "skipped", "what": "the gradient of <b>"}\n')
    assert "not finite: steps 6 (the loss), 1,007 (the gradient of &lt;b&gt;)." in render(RunData.read(run_folder))


def test_a_resumed_run_counts_its_later_records(tmp_path, run_folder):
    lines = [{"kind": "train", "step": step, "loss": 9.0} for step in (1, 2, 3)]
    lines += [{"kind": "train", "step": step, "loss": 1.0} for step in (2, 3, 4)]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(r["step"], r["loss"]) for r in RunData.read(run_folder).training] == [
        (1, 9.0),
        (2, 1.0),
        (3, 1.0),
        (4, 1.0),
    ]


def test_times_that_are_no_dates_are_not_shown_as_dates(run_folder):
    content = json.loads((run_folder / "samples.json").read_text())
    for user in content["users"]:
        user["target_time"] = 17
        for event in user["history"]:
            event["time"] = 3
    (run_folder / "samples.json").write_text(json.dumps(content))
    text = report(run_folder).text
    assert "1970" not in text
    assert "Times are before" not in text


def test_the_report_is_written_aside(run_folder, monkeypatch):
    path = write_report(run_folder)
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(run_folder)
    assert path.read_text() == "old"
    assert not list(run_folder.glob(".*"))


def test_sections_can_be_added(run_folder, tmp_path, monkeypatch):
    def timeline(run: RunData) -> Section:
        return Section("timeline", "Timeline", "figures.html", {"figures": [], "missing": f"none in {run.name}"})

    tree = parse(render(RunData.read(run_folder), [*SECTIONS, timeline]))
    assert "none in quickstart-run" in tree.text
    assert any(a.get("href") == "#timeline" for _, a in tree.found)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is not a run folder (it has no run.json and no config.yaml)"),
        (lambda path: path.write_text(""), "is a file"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys, prepare, message):
    target = tmp_path / "thing"
    prepare(target)
    assert main(["report", str(target)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"), [("run.json", "{"), ("run.json", "[]"), ("config.yaml", "a: ["), ("config.yaml", "3")]
)
def test_a_damaged_record_is_refused(run_folder, name, text):
    (run_folder / name).write_text(text)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        write_report(run_folder)


def test_the_command_prints_the_path(run_folder, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(report_command.webbrowser, "open", lambda address: opened.append(address) or True)
    out = tmp_path / "page.html"
    assert main(["report", str(run_folder), "--out", str(out), "--open"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert opened == [out.as_uri()]
    assert main(["report", str(run_folder)]) == 0
    assert capsys.readouterr().out == f"{run_folder / 'report.html'}\n"


def test_a_target_that_cannot_be_a_file_is_refused(run_folder, tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        write_report(run_folder, tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        write_report(run_folder, tmp_path / "nowhere" / "report.html")


def test_long_curves_are_thinned_without_losing_their_extremes():
    values = [0.0] * 100_000
    values[77_777] = 50.0
    curve = thinned("loss", list(range(100_000)), values)
    assert len(curve.x) <= 240
    assert max(curve.high) == 50.0
    assert min(curve.low) == 0.0


def test_lengths_and_popularity_are_summarised_exactly():
    lengths = np.array([1, 1, 2, 3, 10, 500], np.int64)
    summary = Lengths.of(lengths)
    assert sum(summary.counts) == len(lengths)
    assert (summary.median, summary.longest) == (2.5, 500)
    assert summary.edges == sorted(set(summary.edges))
    counts = np.array([0, 5, 90, 5], np.int64)
    popularity = Popularity.of(counts)
    assert popularity.positions == [1, 2, 3]
    assert popularity.counts == [90, 5, 5]
    assert popularity.head_share == 0.9
    assert popularity.unused == 1


def test_own_files_can_stand_inside_the_page():
    folder = Path(page.__file__).parent
    assert "</script" not in (folder / "script.js").read_text()
    assert "</style" not in (folder / "style.css").read_text()
