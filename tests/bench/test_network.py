from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from turbogr.bench import _network, _ranks
from turbogr.bench._children import last_words
from turbogr.bench._network import LOOPBACK, Network, Node, emulated_network, remove_leftovers
from turbogr.bench._ranks import RankFailed, run_as_ranks
from turbogr.errors import Note, UserError

RANK = "tests.bench.rank_under_test"

HOLDING = """
import subprocess, sys, time
from turbogr.bench._network import emulated_network
from turbogr.cli import _Stopping
with _Stopping(), emulated_network(2, 100) as network:
    sleeping = subprocess.Popen(network.nodes[1].command(["sleep", "1000"]), start_new_session=True)
    print(sleeping.pid, flush=True)
    time.sleep(1000)
"""


def namespaces(pid: int) -> list[str]:
    return _network._namespaces(f"turbogr-{pid}-")


@pytest.fixture(scope="module")
def allowed() -> None:
    with emulated_network(1, 100) as network:
        if not network.is_emulated:
            pytest.skip(network.note)


def test_ranks_of_a_node_share_a_network_and_the_link_has_the_rate(allowed: None) -> None:
    with emulated_network(2, 80) as network:
        assert network.is_emulated and "2 nodes" in network.note and "80 Mbit/s" in network.note
        found = run_as_ranks(RANK, 4, {"num_bytes": 2_000_000}, network)
    networks = [rank["network"] for rank in found["ranks"]]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert os.readlink("/proc/self/ns/net") not in networks
    assert [rank["numbers"] for rank in found["ranks"]] == [[0, 0, 2], [1, 1, 2], [2, 0, 2], [3, 1, 2]]
    # Two messages of 2 MB at 10 MB/s: not faster, whatever the load of the machine.
    assert found["seconds"] > 0.39
    assert not namespaces(os.getpid())


def test_nothing_is_left_after_an_error(allowed: None) -> None:
    with pytest.raises(RuntimeError, match="2 nodes"), emulated_network(2, 100) as network:
        raise RuntimeError(network.note)
    assert not namespaces(os.getpid())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: signal.Signals, allowed: None) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    sleeping = int(process.stdout.readline())
    assert len(namespaces(process.pid)) == 3
    process.send_signal(number)
    process.wait(30)
    if number == signal.SIGKILL:
        assert len(namespaces(process.pid)) == 3
        remove_leftovers()
    assert not namespaces(process.pid)
    # Its parent has ended, so it may remain as a zombie for a while.
    state = Path(f"/proc/{sleeping}/stat")
    assert not state.exists() or " Z " in state.read_text()


def test_namespaces_in_use_are_not_removed(allowed: None) -> None:
    with emulated_network(1, 100):
        remove_leftovers()
        assert len(namespaces(os.getpid())) == 2


@pytest.mark.parametrize(
    ("command", "message"), [("no-such-command", "No such file"), ("false", "no network namespaces")]
)
def test_without_namespaces_it_is_loopback_and_says_so(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _network._run
    monkeypatch.setattr(_network, "_run", lambda *_: run(command))
    with emulated_network(3, 100) as network:
        assert not network.is_emulated and network.nodes == (Node(),) * 3
        assert "loopback" in network.note and message in network.note


def test_loopback_runs_the_command_itself() -> None:
    assert LOOPBACK.nodes[0].command(["true"]) == ["true"] and LOOPBACK.nodes[0].environment() == {}
    assert Node("10.0.0.1", "n").command(["true"]) == ["ip", "netns", "exec", "n", "true"]


def test_nodes_that_are_only_names_still_have_ranks_each() -> None:
    found = run_as_ranks(RANK, 2, {}, Network((Node(),) * 2, ""), threads=2)
    assert [rank["numbers"] for rank in found["ranks"]] == [[0, 0, 1], [1, 0, 1]]
    assert [rank["threads"] for rank in found["ranks"]] == [2, 2]


def test_a_rank_that_fails_ends_the_job_and_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 ended with 1: .*this rank fails"):
        run_as_ranks(RANK, 2, {"fails": 1})


def test_what_a_failed_process_said() -> None:
    traceback = 'Traceback (most recent call last):\n  File "x.py", line 1\nturbogr.errors.RankLost: rank 1 is gone\n'
    assert last_words(traceback) == "turbogr.errors.RankLost: rank 1 is gone"
    assert last_words("x\nterminate called without an active exception\n  frame #1\n").startswith("terminate called")
    assert last_words("this fails\n\n") == "this fails" and last_words("") == "no output"


def test_a_rank_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ranks, "_LEAVING_SECONDS", 0.2)
    with pytest.warns(Note, match=r"rank 1 of 2 did not end within 0\.2 s"):
        assert run_as_ranks(RANK, 2, {"hangs_at_exit": 1})["seconds"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_result_is_kept_if_a_rank_fails_when_all_have_done_their_work(rank: int) -> None:
    with pytest.warns(Note, match=rf"rank {rank} of 2 ended with -6: .*so their result is kept"):
        found = run_as_ranks(RANK, 2, {"fails_at_exit": rank})
    assert [entry["numbers"] for entry in found["ranks"]] == [[0, 0, 2], [1, 1, 2]]


def test_a_rank_that_is_killed_says_what_to_do() -> None:
    with pytest.raises(UserError, match="a rank of 2 was killed, as the system does when memory runs out; smaller"):
        run_as_ranks(RANK, 2, {"killed": 0})
