"""Skills that no assistant could load, or that would mislead it, are refused in sentences that say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from a3r.skill_checks import check, similarity
from a3r.skills import read_skill, shipped
from a3r.strictyaml import FormatError

GOOD = """\
---
name: {name}
description: Paints a wall in one colour. Use when a wall is bare. Do not use when it rains.
---
# Paint

Paint it.

## Checker

```bash run
test -f wall
```
"""

NAMES = (
    "cocktail-training debug-training design-reward diagnose-run install-swarm monitor-training nightly-benchmark "
    "port-blackbox-agent run-swarm-server train-several-models write-blueprint write-goal write-report "
    "write-swarm-client"
).split()


def make(folder: Path, text: str | bytes = GOOD, name: str = "paint") -> Path:
    place = folder / name
    place.mkdir()
    raw = text if isinstance(text, bytes) else text.replace("{name}", name).encode()
    (place / "SKILL.md").write_bytes(raw)
    return place


def problems(*places: Path) -> str:
    return "\n".join(map(str, check(places)[1]))


def test_the_skills_that_ship_are_the_set_and_good() -> None:
    assert [skill.name for skill in shipped()] == NAMES
    assert problems(shipped()[0].folder.parent) == ""


def test_a_small_skill_is_good(tmp_path: Path) -> None:
    place = make(tmp_path)
    assert problems(place) == "" and problems(tmp_path) == ""
    assert read_skill(place).description.startswith("Paints a wall")


FRONT = GOOD.replace("{name}", "paint")
BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "no front matter": ("# Paint\n", "does not begin with front matter; make `---` its first line"),
    "empty": ("", "does not begin with front matter"),
    "never ends": ("---\nname: paint\n", "the front matter has no end; put a line `---`"),
    "byte order mark": (b"\xef\xbb\xbf" + FRONT.encode(), "a byte order mark stands before"),
    "Windows line ends": (FRONT.replace("\n", "\r\n"), "has Windows line ends (CRLF)"),
    "a tab": (FRONT.replace("name: paint", "metadata:\n\tx: y\nname: paint"), "SKILL.md:3: a tab in the front matter"),
    "no UTF-8": (FRONT.encode() + b"\xff", "is not UTF-8"),
    "zero bytes": (FRONT.encode() + b"\0", "holds zero bytes"),
    "broken YAML": (FRONT.replace("name: paint", "name: [paint"), "not valid YAML"),
    "an unquoted colon": (FRONT.replace("Paints a wall", "Paints: a wall"), "not valid YAML"),
    "a list": ("---\n- name\n---\n", "the front matter holds no keys"),
    "nothing in it": ("---\n---\n", "the front matter holds no keys"),
    "a key twice": (FRONT.replace("name: paint", "name: paint\nname: paint"), "given twice"),
    "an unknown key": (FRONT.replace("name: paint", "name: paint\nmodel: x"), "model: unknown key; known: name,"),
    "no name": (FRONT.replace("name: paint\n", ""), "name: is missing; add `name: paint`"),
    "another name": (FRONT.replace("name: paint", "name: plaster"), "'plaster' is not the folder's name"),
    "a bad name": (FRONT.replace("name: paint", "name: Paint_It"), "is no skill name"),
    "two hyphens": (FRONT.replace("name: paint", "name: pa--int"), "is no skill name"),
    "a long name": (FRONT.replace("name: paint", "name: " + "a" * 65), "at most 64"),
    "a number for a name": (FRONT.replace("name: paint", "name: 7"), "7 is no skill name"),
    "no description": ("---\nname: paint\n---\nx\n", "description: is missing"),
    "an empty description": ("---\nname: paint\ndescription: ''\n---\nx\n", "description: must be text"),
    "a long description": (FRONT.replace("Paints", "P" * 1024), "characters; at most 1024"),
    "metadata of numbers": (FRONT.replace("name: paint", "name: paint\nmetadata: {v: 1}"), "a map of text to text"),
    "a long compatibility": (FRONT.replace("name: paint", f"name: paint\ncompatibility: {'x' * 501}"), "at most 500"),
    "no use": (FRONT.replace("Use when", "Good if"), "does not say 'Use when'"),
    "no limits": (FRONT.replace(" Do not use when it rains.", ""), "does not say 'Do not use when'"),
    "no checker": (FRONT.replace("## Checker", "## The end"), "does not end in a checker"),
    "something after the checker": (FRONT + "\n## More\n", "does not end in a checker"),
    "a checker without a command": (FRONT[: FRONT.index("```bash")], "Checker has no command"),
    "a long body": (FRONT.replace("Paint it.", "Paint it.\n" * 300), "lines; keep it under 300"),
    "a block that does not say": (FRONT.replace("bash run", "bash"), "does not say whether it runs"),
    "an unknown mark": (FRONT.replace("bash run", "bash now"), "'now' says nothing here"),
    "a block that cannot run": (FRONT.replace("Paint it.", "```yaml run\na: 1\n```"), "'yaml' cannot be run"),
    "an open block": (FRONT.rstrip().removesuffix("```"), "a code block is never closed"),
    "a file outside": (FRONT.replace("Paint it.", "```text file=../x\n```"), "../x is outside the folder"),
    "a dead link": (FRONT.replace("Paint it.", "[how](references/how.md)"), "references/how.md does not exist"),
    "a link out": (FRONT.replace("Paint it.", "[how](../other/SKILL.md)"), "leads out of the skill"),
    "a private path": (FRONT.replace("Paint it.", "Look in /home/ann/walls."), "/home/ann is a path of one machine"),
    "an unknown command": (FRONT.replace("Paint it.", "Run `a3r paint wall`."), "`a3r` has no command 'paint'"),
    "an unknown subcommand": (FRONT.replace("Paint it.", "`a3r skills chekc`"), "no command 'chekc'; known: check"),
    "an unknown option": (FRONT.replace("Paint it.", "`swarmtune serve --porz 1`"), "no option --porz"),
    "an unknown option in a block": (
        FRONT.replace("test -f wall", "a3r goal check \\\n  goal.md --sett x"),
        "`a3r goal check` has no option --sett",
    ),
    "an unknown key of the configuration": (
        FRONT.replace("Paint it.", "Set `optim.lrr`."),
        "optim.lrr is no configuration key; known: optim.lr",
    ),
    "an unknown key behind --set": (
        FRONT.replace("test -f wall", "python x.py --set engine.thread=2"),
        "engine.thread is",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_with_what_to_change(case: str, tmp_path: Path) -> None:
    text, sentence = BAD_FILES[case]
    found = problems(make(tmp_path, text))
    assert sentence in found, found
    assert all(line.startswith(str(tmp_path)) for line in found.splitlines())


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "paint").mkdir()
    assert "there is no such file; a skill is a folder with a SKILL.md" in problems(tmp_path)
    assert "holds no skill; give a skill or a folder of skills" in problems(tmp_path / "paint")
    (tmp_path / "paint" / "skill.md").write_text("x")
    assert "rename skill.md to SKILL.md" in problems(tmp_path / "paint")
    assert "no such file" in problems(tmp_path / "nowhere")


def test_what_does_not_belong_into_the_folder_is_refused(tmp_path: Path) -> None:
    place = make(tmp_path)
    (place / "references").mkdir()
    (place / "references" / "deep").mkdir()
    (place / "references" / "deep" / "x.md").write_text("x")
    (place / "scripts").mkdir()
    (place / "scripts" / "tool.py").write_bytes(b"\x7fELF\0")
    (place / "docs").mkdir()
    said = problems(place)
    assert "docs: is no part of a skill" in said
    assert "tool.py: is a binary file" in said
    (place / "docs").rmdir()
    (place / "scripts" / "tool.py").write_text("print(1)\n")
    said = problems(place)
    assert "x.md: lies too deep" in said
    assert "tool.py: is never mentioned" in said


def test_links_are_refused_also_those_in_a_circle(tmp_path: Path) -> None:
    place = make(tmp_path)
    (place / "references").mkdir()
    (place / "references" / "a.md").symlink_to("b.md")
    (place / "references" / "b.md").symlink_to("a.md")
    assert "a.md: is a link, which would not survive a copy" in problems(place)
    (place / "SKILL.md").unlink()
    (place / "SKILL.md").symlink_to("SKILL.md")
    assert "remove the link that leads back to itself" in problems(place)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    place = make(tmp_path)
    (place / "assets").mkdir()
    (place / "assets" / "big.txt").write_text("x" * 200_001)
    assert "has more than 200 kB" in problems(place)


def test_a_reference_is_named_and_links_no_further(tmp_path: Path) -> None:
    place = make(tmp_path, GOOD.replace("Paint it.", "See [how](references/how.md)."))
    (place / "references").mkdir()
    (place / "references" / "how.md").write_text("# How\n\n[more](more.md)\n")
    (place / "references" / "more.md").write_text("# More\n")
    assert "more.md is a link from a reference" in problems(place)


def test_two_skills_that_read_alike_are_told_apart_or_refused(tmp_path: Path) -> None:
    one, other = make(tmp_path), make(tmp_path, name="colour")
    said = problems(one, other)
    assert "reads like colour (1.00 of 1)" in said
    assert similarity("Bakes bread. Do not use when painting walls.", "Paints walls. Do not use when baking.") == 0.0


def test_prose_that_stands_in_two_skills_is_refused(tmp_path: Path) -> None:
    prose = "Stir the paint with a dry stick until no streak is left and let it rest for a while before you begin."
    one = make(tmp_path, GOOD.replace("Paint it.", prose))
    text = GOOD.replace("Paint it.", prose).replace("Paints a wall in one colour", "Mixes what others brush on")
    other = make(tmp_path, text, name="mix")
    assert "of it stands in mix too; keep it in one of them" in problems(one, other)


def test_descriptions_that_no_assistant_would_show_together_are_refused(tmp_path: Path) -> None:
    for at in range(8):
        words = " ".join(f"w{at}x{n}" for n in range(150))
        make(tmp_path, GOOD.replace("a wall in one colour", words), name=f"paint-{at}")
    assert "names and descriptions have" in problems(tmp_path) and problems(tmp_path / "paint-1") == ""


def test_every_problem_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as error:
        read_skill(make(tmp_path, "---\nname: Bad\nmodel: x\n---\nx\n"))
    assert len(error.value.problems) == 3


def test_every_shipped_skill_has_evals_and_says_what_does_not_work() -> None:
    for skill in shipped():
        assert (skill.folder / "evals" / "evals.yaml").is_file()
        assert "## What does not work" in skill.body or "## 3. Symptom" in skill.body or "## The hacks" in skill.body
