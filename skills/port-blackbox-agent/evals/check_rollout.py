"""Plays rollout.py of the working folder on scripted answers: right, wrong, and an endpoint that fails."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

from rollout import rollout

from swarmtune.rehearsal import Outage, Rehearsal

TASK = {"task_id": "t", "text": "Where is the key?", "prompt": "Where is the key?", "expected": "drawer"}


def fail(messages):
    raise Outage("rehearsed")


with Rehearsal() as stage:
    right = stage.play(rollout, TASK, lambda messages: "It is in the drawer.")
    wrong = stage.play(rollout, TASK, lambda messages: "I do not know.")
    lost = stage.play(rollout, TASK, fail)
assert right.reward == 1.0, f"the right answer earned {right.reward}, error {right.error!r}"
assert right.turns and right.turns[0].messages[-1]["content"] == TASK["text"], "the agent was not given the task's text"
assert wrong.reward == 0.0, f"the wrong answer earned {wrong.reward}, error {wrong.error!r}"
assert lost.error is not None, "an agent that failed did not raise"
print("good")
