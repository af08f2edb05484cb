"""Which columns are the user, the item and the time: usual names, and one message for all that is unclear."""

from __future__ import annotations

import warnings

import pytest

from turbogr.data.prepare.columns import choose_columns
from turbogr.data.prepare.source import ReadOptions
from turbogr.errors import Note, UserError


def chosen(header, **options):
    columns = choose_columns(header.split(","), ReadOptions(**options), "log.csv")
    return [columns.user, columns.item, columns.time]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("userid,poi,checkin_time,lat,lon", ["userid", "poi", "checkin_time"]),
        ("uid,poi_id,ts", ["uid", "poi_id", "ts"]),
        ("user,venue,venue_id,local_date", ["user", "venue_id", "local_date"]),
        ("customer,sku,price,event_time", ["customer", "sku", "event_time"]),
        (
            "InvoiceNo,StockCode,Description,InvoiceDate,UnitPrice,CustomerID",
            ["CustomerID", "StockCode", "InvoiceDate"],
        ),
        ("visitorid,event,itemid,transactionid,timestamp", ["visitorid", "itemid", "timestamp"]),
        ("reviewerID,asin,overall,unixReviewTime", ["reviewerID", "asin", "unixReviewTime"]),
        ("household_key,basket_id,day,product_id", ["household_key", "product_id", "day"]),
        ("student,problem_id,skill_id,start_time,end_time", ["student", "problem_id", "start_time"]),
        ("user_id,business_id,stars,date", ["user_id", "business_id", "date"]),
        ("user_id,track,song_name,created_at,updated_at", ["user_id", "track", "created_at"]),
        ("user_id,location,timestamp", ["user_id", "location", "timestamp"]),
        ("user_id,item_id,location,timestamp", ["user_id", "item_id", "timestamp"]),
        ("user_id,session_id,article,ts", ["user_id", "article", "ts"]),
    ],
)
def test_usual_names(header, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(header) == expected


def test_a_session_takes_the_place_of_the_user_with_a_note():
    with pytest.warns(Note, match="'session_id' takes its place.*--user-column"):
        assert chosen("session_id,item,ts") == ["session_id", "item", "ts"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen("session_id,item,ts", user_column="session_id")[0] == "session_id"


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            "a,b,c",
            "no column looks like the user, the item or the time among 'a', 'b', 'c'; name them with --user-column, "
            "--item-column and --time-column, or --time-column none",
        ),
        ("usr_id,itm_id,ts", "the user or the item among .*Did you mean --user-column usr_id --item-column itm_id?"),
        ("user_id,movie_id,video_id", "both look like the item; .*Also, no column looks like the time among"),
        ("user_id;item_id;ts", "say what separates them with --delimiter"),
        ("196,242,881250949", "--column-names"),
    ],
)
def test_all_that_is_unclear_is_one_message(header, words):
    with pytest.raises(UserError) as refused:
        chosen(header)
    start, _, end = words.partition(".*")
    assert start in str(refused.value)
    assert end in str(refused.value)


def test_no_column_is_suggested_that_only_has_a_common_name():
    with pytest.raises(UserError) as refused:
        chosen("id,name,price")
    assert "Did you mean" not in str(refused.value)


def test_all_columns_that_were_named_and_do_not_exist_are_one_message():
    named = {"user_column": "usr", "item_column": "itm_id", "keep_columns": ("rating",), "where": ("score > 3",)}
    with pytest.raises(UserError) as refused:
        chosen("user_id,item_id,ts", **named)
    for part in ("'usr' (--user-column)", "'itm_id' (--item-column)", "'rating' (--keep-columns)", "'score' (--where)"):
        assert part in str(refused.value)
    assert "Did you mean 'item_id'?" in str(refused.value)
