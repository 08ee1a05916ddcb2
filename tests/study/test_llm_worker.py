"""The LLM worker: asked only where the recipe has no answer, and what it proposes is checked before it counts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from campaigns import ROOT, base_blueprint, decision_of, goal_lock
from test_campaign import journal

from a3r.campaign import create
from a3r.questions import StoreJournal
from a3r.workers.llm import LlmWorker, touched

BROKEN = """import sys
sys.path.insert(0, {root!r})
from a3r import simulate

def steps(config):
    return config["total_training_step"]

if "--print-schema" not in sys.argv:
    import json
    steps(json.load(open(sys.argv[sys.argv.index("--config") + 1])))
sys.exit(simulate.main())
"""
REPAIR = """--- a/client/train.py
+++ b/client/train.py
@@ -3,5 +3,5 @@
 from a3r import simulate
 
 def steps(config):
-    return config["total_training_step"]
+    return config["total_training_steps"]
 
"""


class ScriptedModel:
    """Answers one call after another; counts them."""

    model = "scripted"

    def __init__(self, *answers: tuple[str, dict]) -> None:
        self.answers = list(answers)
        self.requests: list[dict] = []

    def ask(self, request):
        self.requests.append(json.loads(json.dumps(request)))
        name, arguments = self.answers[min(len(self.requests), len(self.answers)) - 1]
        call = {"id": "1", "name": name, "arguments": json.dumps(arguments)}
        return {"content": None, "calls": [call], "usage": {"total_tokens": 100}}


def git(repo: Path, *argv: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *argv], cwd=repo, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository whose client raises KeyError."""
    repo = tmp_path / "repo"
    (repo / "client").mkdir(parents=True)
    (repo / "client" / "train.py").write_text(BROKEN.format(root=str(ROOT)))
    (repo / "reward.py").write_text("REWARD = 1\n")
    git(repo, "init", "-q")
    git(repo, "add", ".")
    git(repo, "commit", "-q", "-m", "broken")
    return repo


def study_with(campaign, repository: Path, model: ScriptedModel):
    argv = ["{python}", "client/train.py", "--config", "{spec}", "--seed", "{seed}", "--out", "{attempt_dir}"]
    base = base_blueprint(processes=[{"name": "client", "argv": argv, "main": True}])
    directory = campaign.base / "study"
    create(directory, "# goal\n", goal_lock(base), root=repository, leader={"name": "small"}, hosts=campaign.hosts())

    def helper(store, ledger, root):
        return LlmWorker(directory, root, StoreJournal(store, ledger), model)  # type: ignore[arg-type]

    study = campaign.open(directory, make_helper=helper)
    study.run()
    study.close()
    return directory


def test_a_repair_becomes_a_new_version_and_the_study_goes_on_with_it(campaign, repository):
    model = ScriptedModel(("propose_patch", {"reasoning": "a letter is missing", "diff": REPAIR}))
    directory = study_with(campaign, repository, model)
    assert decision_of(directory)["level"] == 1.0
    store = journal(directory)
    arm = store.table("arms")["x1.0"]
    assert arm["version"] == 2 and arm["blueprint"]["code"]["patch_sha256"]
    runs = store.table("runs")
    assert runs["x1.0/s1"]["state"] == "SUPERSEDED" and runs["x1.0/s1.v2"]["state"] == "COMPLETED"
    result = json.loads((directory / "runs/x1.0/s1.v2/attempts/1/result.json").read_text())
    assert result["provenance"]["patch_sha256"] == arm["blueprint"]["code"]["patch_sha256"]
    assert "total_training_step\n" not in (repository / "client" / "train.py").read_text(), (
        "the repository is untouched"
    )
    assert (
        store.table("spending")[next(k for k in store.table("spending") if k.startswith("llm/"))]["llm_tokens"] == 100
    )


def test_what_may_not_change_and_what_does_not_apply_goes_back_with_the_reason(campaign, repository):
    reward = REPAIR.replace("client/train.py", "reward.py")
    stale = REPAIR.replace("def steps(config)", "def stages(config)")
    model = ScriptedModel(
        ("propose_patch", {"reasoning": "raise the reward", "diff": reward}),
        ("propose_patch", {"reasoning": "old file", "diff": stale}),
        ("give_up", {"reasoning": "cannot tell"}),
    )
    directory = study_with(campaign, repository, model)
    assert "only files in client/ may change" in json.dumps(model.requests[1])
    assert "does not apply" in json.dumps(model.requests[2])
    assert journal(directory).table("runs")["x0.1/s1"]["state"] == "FAILED"


def test_the_log_is_quoted_as_data_and_no_secret_is_in_it(campaign, repository):
    model = ScriptedModel(("give_up", {"reasoning": "no"}))
    study_with(campaign, repository, model)
    said = json.loads(model.requests[0]["messages"][1]["content"])
    assert "KeyError" in said["quoted_logs"]["client"]
    assert set(said) == {"class", "config", "file", "quoted_evidence", "quoted_file", "quoted_logs"}


def test_a_diff_names_every_path_it_touches():
    assert touched("--- a/x.py\n+++ b/y.py\n") == ["x.py", "y.py"]
    assert touched("diff --git a/x b/z\nrename from x\nrename to ../z\n") == ["../z", "x"]
