"""Client projects: `a3r client new` writes one, `a3r client check` plays one and says what is wrong with it.

A client project is a folder whose `train.py` has a module-level `swarmtune.script.Script`. `checks.py` beside it may
say how a task is answered at random (`random_answer`) and well (`good_answer`). See docs/clients.md.
"""
