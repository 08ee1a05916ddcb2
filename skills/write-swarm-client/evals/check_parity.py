"""Are the tasks and the reward of the parity project what was asked for?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd() / "parity"))

from reward import reward_of
from train import SCRIPT

tasks = SCRIPT.tasks(SCRIPT.parameters(), 0)
assert len(tasks) >= 50, f"{len(tasks)} tasks"
values = {(reward_of("even", task), reward_of("odd", task)) for task in tasks}
assert values == {(1.0, 0.0), (0.0, 1.0)}, f"'even' and 'odd' earn {values}"
for said in ("", "even odd", "yes"):
    assert not any(reward_of(said, task) for task in tasks), f"{said!r} earns something"
print("tasks and reward are right")
