"""The journal: both or neither, a chain that shows edits, and a copy that mends damage."""

from __future__ import annotations

import json
import sqlite3

import pytest

from a3r.store import Conflict, DiskFull, Drop, JournalDamaged, Put, Store


def filled(directory, events: int = 20) -> Store:
    directory.mkdir(exist_ok=True)
    store = Store.open(directory)
    for n in range(events):
        store.commit("SAID", [Put("arms", f"a{n % 5}", {"n": n, "text": "x" * 300})], data={"n": n})
    return store


def events(store: Store) -> list[str]:
    return [e.kind for e in store.events()]


def test_an_event_and_its_rows_are_one(tmp_path):
    store = filled(tmp_path, 1)
    store.commit("LEASED", [Put("leases", "h/cpu/0", {"run": "a"}, new=True)])
    with pytest.raises(Conflict):
        store.commit("LEASED", [Put("arms", "a9", {}), Put("leases", "h/cpu/0", {"run": "b"}, new=True)])
    assert "a9" not in store.table("arms")
    assert events(store) == ["SAID", "LEASED"]
    store.commit("RELEASED", [Drop("leases", "h/cpu/0")])
    assert not store.table("leases")
    store.close()
    again = Store.open(tmp_path)
    assert again.problem() is None and not again.table("leases")


def test_one_run_per_blueprint_seed_and_replicate(tmp_path):
    store = filled(tmp_path, 0)
    run = {"blueprint": "sha256:1", "seed": 1, "replicate": 0}
    store.commit("DECLARED", [Put("runs", "a/s1", run, new=True)])
    with pytest.raises(Conflict):
        store.commit("DECLARED", [Put("runs", "b/s1", run, new=True)])
    store.commit("DECLARED", [Put("runs", "a/s1.r1", run | {"replicate": 1}, new=True)])


def test_a_corrupted_page_is_set_aside_and_the_journal_rebuilt(tmp_path):
    store = filled(tmp_path, 200)
    before = store.table("arms").copy()
    store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    with open(tmp_path / "journal.db", "r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xa5" * 4096 * 2)
    again = Store.open(tmp_path)
    assert again.table("arms") == before
    assert events(again)[-1] == "JOURNAL_REBUILT" and len(events(again)) == 201
    assert (tmp_path / "journal.damaged-1.db").exists()
    assert again.problem() is None


def test_a_file_that_is_no_database_any_more_is_rebuilt_too(tmp_path):
    filled(tmp_path).close()
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"journal.db{suffix}").unlink(missing_ok=True)
    (tmp_path / "journal.db").write_bytes(b"not a database at all" * 400)
    assert len(events(Store.open(tmp_path))) == 21


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE events SET body = replace(body, 'SAID', 'SAJD') WHERE seq = 7",
        "DELETE FROM events WHERE seq = 7",
        "UPDATE arms SET data = '{\"n\": 99}' WHERE key = 'a1'",
        "DELETE FROM arms WHERE key = 'a1'",
    ],
)
def test_an_edit_by_hand_shows_and_is_undone(tmp_path, edit):
    store = filled(tmp_path)
    before = store.table("arms").copy()
    store.close()
    with sqlite3.connect(tmp_path / "journal.db") as db:
        db.execute(edit)
    db.close()
    again = Store.open(tmp_path)
    assert again.table("arms") == before
    rebuilt = list(again.events())[-1]
    assert rebuilt.kind == "JOURNAL_REBUILT" and rebuilt.data["problem"]


@pytest.mark.parametrize("damage", ["torn", "missing", "edited", "short"])
def test_the_copy_is_brought_up_to_the_journal(tmp_path, damage):
    filled(tmp_path).close()
    path = tmp_path / "events.jsonl"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(
            {"torn": text + '{"body": "{', "edited": text.replace("SAID", "SAJD", 1), "short": "".join(lines[:5])}[
                damage
            ]
        )
    store = Store.open(tmp_path)
    expected = ["SAID"] * 20 + (["MIRROR_REWRITTEN"] if damage == "edited" else [])
    assert events(store) == expected
    store.close()
    kept = [json.loads(json.loads(line)["body"])["kind"] for line in path.read_text().splitlines()]
    assert kept == expected


def test_when_both_are_gone_it_says_so_instead_of_starting_anew(tmp_path):
    filled(tmp_path).close()
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"journal.db{suffix}").unlink(missing_ok=True)
    (tmp_path / "journal.db").write_bytes(b"garbage" * 2000)
    (tmp_path / "events.jsonl").unlink()
    with pytest.raises(JournalDamaged, match=r"events\.jsonl"):
        Store.open(tmp_path)


def test_a_full_disk_changes_nothing_and_is_told_apart(tmp_path):
    store = filled(tmp_path)
    pages = store.db.execute("PRAGMA page_count").fetchone()[0]
    store.db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull):
        for n in range(100):
            store.commit("SAID", [Put("arms", f"b{n}", {"text": "y" * 4000})])
    count = len(events(store))
    assert len(store.table("arms")) == 5 + count - 20
    store.db.execute("PRAGMA max_page_count = 1000000")
    store.commit("SAID", [Put("arms", "after", {})])
    assert store.problem() is None


def test_a_reader_beside_the_writer_sees_what_is_committed(tmp_path):
    store = filled(tmp_path)
    reader = Store.open_read_only(tmp_path)
    store.commit("SAID", [Put("arms", "new", {})])
    assert "new" in reader.table("arms")
    with pytest.raises(sqlite3.OperationalError):
        reader.commit("SAID")
