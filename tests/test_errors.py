"""Suggestions: the name that was meant, and none rather than a misleading one."""

from __future__ import annotations

import pytest

from turbogr.errors import did_you_mean, nearest_names

TEXT = """
    --out --overwrite --user-column --item-column --time-column --keep-columns --time-unit --delimiter --column-names
    --min-user-events --min-item-events --drop-bad-rows --seed --k
"""
OPTIONS = TEXT.split()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--otu", ["--out"]),
        ("--output", ["--out"]),
        ("--user_column", ["--user-column"]),
        ("--Out", ["--out"]),
        ("--user-col", ["--user-column"]),
        ("--user", ["--user-column", "--min-user-events"]),
        ("--min-events", ["--min-user-events", "--min-item-events"]),
        ("--bad-rows", ["--drop-bad-rows"]),
        ("--delimeter", ["--delimiter"]),
        ("--sed", ["--seed"]),
    ],
)
def test_the_name_that_was_meant(name, meant):
    assert nearest_names(name, OPTIONS) == meant


@pytest.mark.parametrize("name", ["--l", "--x", "--force", "--epochs", "--sep", "--lr", "--format", "--data", "", "--"])
def test_no_name_rather_than_a_misleading_one(name):
    assert nearest_names(name, OPTIONS) == []
    assert did_you_mean(name, OPTIONS) == ""


def test_swapped_letters_count_once():
    assert did_you_mean("trian", ["train", "report"]) == " Did you mean 'train'?"
    assert did_you_mean("export", ["train", "report"]) == ""
    assert did_you_mean("tein", ["train", "tin", "ten"]) == " Did you mean 'tin' or 'ten'?"
