"""Does spy.py play by the rules?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

from spy import start, vote, winner

state = start(5, 2, ("apple", "pear"), 7)
assert sorted(state.players.values()) == ["apple"] * 5 + ["pear"] * 2, state.players
assert list(state.players) == list(start(5, 2, ("apple", "pear"), 7).players), "the same seed gives other names"
assert list(state.players) != list(start(5, 2, ("apple", "pear"), 8).players), "another seed gives the same names"
assert winner(state) is None

first, second, *_ = state.players
state = vote(state, {first: second, second: first, "nobody": first})
assert len(state.players) == 7, "a tie removed somebody, or a vote of nobody counted"
spies = [name for name, word in state.players.items() if word == "pear"]
for spy in spies:
    state = vote(state, dict.fromkeys(state.players, spy) | {spy: "nonsense"})
    assert spy not in state.players
assert winner(state) == "civilians"

state = start(2, 1, ("apple", "pear"), 1)
civilian = next(name for name, word in state.players.items() if word == "apple")
assert winner(vote(state, dict.fromkeys(state.players, civilian))) == "spies"
print("plays by the rules")
