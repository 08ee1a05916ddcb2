"""What the results look like: one self-contained HTML page, a Markdown summary, JSON, and a badge.

    report.html  report.md  report.json  badge.svg  badge.json

Everything is computed from the result files; the same results give the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from a3r import supervisor as sv
from a3r.bench.session import Exit, Series, Session, Summary, effect_words, exit_of, noted_bisection, short
from a3r.bench.store import machine_facts
from a3r.bench.suites import LoadedSuite
from a3r.bench.verdicts import Balance, Change, Finding, Outcome, balance

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
WIDTH, HEIGHT, LEFT, BOTTOM = 340.0, 150.0, 46.0, 18.0
SELF_CHECK_DAYS = 90
SENTENCES = {
    Exit.FINE: "No regression at the newest commit.",
    Exit.REGRESSION: "A regression is confirmed.",
    Exit.NOT_MEASURED: "The newest commit could not be measured as planned.",
    Exit.UNDECIDED: "Not decided.",
}
COLOURS = {Exit.FINE: "#2f8f57", Exit.REGRESSION: "#c0392b", Exit.NOT_MEASURED: "#7a828c", Exit.UNDECIDED: "#b8860b"}
WORDS = {Exit.FINE: "ok", Exit.REGRESSION: "regression", Exit.NOT_MEASURED: "not measured", Exit.UNDECIDED: "undecided"}


@dataclass(frozen=True)
class Incident:
    """A confirmed change and where it came from."""

    series: Series
    finding: Finding
    commit: str
    how: str


def build(session: Session, history: Sequence[str], command: str) -> dict[str, Any]:
    """Everything the report shows, as plain data (report.json)."""
    suites, incidents, every, unmeasured = [], [], [], []
    codes: set[Exit] = set()
    shas: set[str] = set()
    for loaded in session.suites:
        all_series = session.series(loaded, history, _dirty(session, loaded, history))
        incidents += [i for s in all_series for i in incidents_of(session, s)]
        every += all_series
        unmeasured += _unmeasured(session, loaded, history)
        codes |= _newest_codes(session, loaded, history, all_series)
        data = _suite(session, loaded, all_series)
        shas |= {c["sha"] for c in data["commits"]}
        suites.append(data)
    code = next((c for c in (Exit.REGRESSION, Exit.NOT_MEASURED, Exit.UNDECIDED) if c in codes), Exit.FINE)
    facts = machine_facts()
    found = _recent_balance(session, every)
    return {
        "schema": "a3r/bench-report/v1",
        "title": f"Benchmarks of {session.history.root.name}",
        "exit": int(code) if shas else int(Exit.NOT_MEASURED),
        "sentence": SENTENCES[code] if shas else "Nothing is measured yet.",
        "machine": session.results.machine,
        "machine_words": f"{facts['cores']} cores, {facts['cpu'] or facts['arch']}, {facts['memory_gib']} GiB",
        "commit_count": len(shas),
        "incidents": [incident_facts(session, i) for i in incidents],
        "balance": _balance_words(found),
        "warnings": [found.warning] if found.warning else [],
        "unmeasured": unmeasured,
        "suites": suites,
        "command": command,
    }


def incidents_of(session: Session, series: Series) -> list[Incident]:
    found = []
    for finding in series.findings:
        if finding.outcome is not Outcome.CONFIRMED:
            continue
        noted = noted_bisection(session.results, series, finding)
        if noted and noted["sure"]:
            commit, how = str(noted["commit"]), f"by bisection, probability {noted['probability']:.3f}"
        else:
            commit, chance = session.suspect(series, finding)
            how = f"likeliest of what is measured ({chance:.2f}); settle it with `a3r bench bisect`"
            if chance == 1.0:
                how = "the only commit in question"
        found.append(Incident(series, finding, commit, how))
    return found


def incident_facts(session: Session, incident: Incident) -> dict[str, Any]:
    series, finding = incident.series, incident.finding
    return {
        "suite": series.suite.name, "task": series.task.name, "metric": series.name,
        "change": str(finding.change), "commit": incident.commit, "subject": _subject(session, incident.commit),
        "how": incident.how, "effect": effect_words(series, finding), "head": finding.commit, "base": finding.base,
        "by": finding.by,
    }  # fmt: skip


def _subject(session: Session, commit: str) -> str:
    sha, plus, _ = commit.partition("+")
    return session.history.info(sha).subject + (" + uncommitted changes" if plus else "")


def _dirty(session: Session, loaded: LoadedSuite, history: Sequence[str]) -> list[str]:
    """Measured dirty trees on top of the newest commit."""
    return [c for c in session.results.commits(loaded.id) if "+" in c and c.partition("+")[0] == history[-1]]


def _newest_codes(
    session: Session, loaded: LoadedSuite, history: Sequence[str], all_series: Sequence[Series]
) -> set[Exit]:
    """The newest measured commit's state, and confirmed regressions no later improvement has undone."""
    if not all_series or not all_series[0].points:
        return {Exit.NOT_MEASURED} if session.results.commits(loaded.id) else set()
    codes: set[Exit] = set()
    for series in all_series:
        codes.add(exit_of(series.finding(series.points[-1].commit)))
        confirmed = [f for f in series.findings if f.outcome is Outcome.CONFIRMED]
        if confirmed and confirmed[-1].change is Change.REGRESSION:
            codes.add(Exit.REGRESSION)
    return codes


def _recent_balance(session: Session, series: Sequence[Series]) -> Balance:
    """Both kinds of change over the last three months."""
    since = time.time() - SELF_CHECK_DAYS * 86400
    times = {f.commit: session.history.info(f.commit.partition("+")[0]).time for s in series for f in s.findings}
    return balance([f for s in series for f in s.findings if times[f.commit] >= since])


def _balance_words(found: Balance) -> str:
    return (
        f"In the last {SELF_CHECK_DAYS} days {found.regressions} regressions and {found.improvements} improvements "
        f"were confirmed; {found.marks_worse} marks for worse and {found.marks_better} for better were not."
    )


def _unmeasured(session: Session, loaded: LoadedSuite, history: Sequence[str]) -> list[dict[str, str]]:
    known = set(session.results.commits(loaded.id))
    rows = []
    for commit in [c for c in history if c in known]:
        if failures := session.failures(loaded, commit):
            detail = f"{failures[0].status}: {failures[0].detail.splitlines()[0][:300]}"
            rows.append({"commit": commit, "suite": loaded.name, "detail": detail})
    return rows


def _suite(session: Session, loaded: LoadedSuite, all_series: Sequence[Series]) -> dict[str, Any]:
    commits = [p.commit for p in all_series[0].points] if all_series else []
    return {
        "name": loaded.name,
        "id": loaded.id,
        "about": loaded.suite.about,
        "commits": [{"sha": c, "subject": _subject(session, c)} for c in commits],
        "rows": [_row(s) for s in all_series],
        "curves": [c for s in all_series if (c := _curves(session, s)) is not None],
    }


def _row(series: Series) -> dict[str, Any]:
    return {
        "task": series.task.name,
        "metric": series.name,
        "unit": series.metric.unit,
        "direction": series.metric.direction,
        "points": [{"commit": p.commit, "values": list(p.values)} for p in series.points],
        "findings": [_finding(f) for f in series.findings],
        "cells": [_cell(series, i) for i in range(len(series.points))],
        "svg": commits_svg(series),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    facts = {k: v for k, v in vars(finding).items() if v not in (None, "", 0)}
    return facts | {"outcome": str(finding.outcome)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _cell(series: Series, index: int) -> dict[str, str]:
    """A cell of the heat map: how far from the expected middle, in widths of the noise band."""
    point = series.points[index]
    value = _mean(point.values)
    finding = series.finding(point.commit)
    title = f"{short(point.commit)}: {value:.4g} {series.metric.unit}"
    cell = {"value": f"{value:.4g}", "title": title, "sign": "", "style": ""}
    if finding is None:
        return cell
    cell["title"] += f", {finding.outcome}" + (f" {finding.change}" if finding.change else "")
    cell["sign"] = {Outcome.CONFIRMED: "▲", Outcome.UNDECIDED: "?", Outcome.PENDING: "…", Outcome.UNCONFIRMED: "?"}.get(
        finding.outcome, ""
    )
    if finding.band:
        low, high = finding.band
        half = max((high - low) / 2, 1e-12)
        away = series.rules.worse(value - (low + high) / 2) / half
        hue = "179,55,47" if away > 0 else "27,127,77"
        cell["style"] = f"background: rgba({hue},{min(abs(away) / 2, 1) * 0.85:.2f})"
    return cell


# ---- drawings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Values to places in a drawing."""

    low: float
    high: float
    count: int

    def x(self, index: float) -> float:
        return LEFT + 8 + (WIDTH - LEFT - 18) * (index / max(1, self.count - 1) if self.count > 1 else 0.5)

    def y(self, value: float) -> float:
        return 8 + (HEIGHT - BOTTOM - 12) * (1 - (value - self.low) / (self.high - self.low))


def _scale(values: Sequence[float], count: int) -> Scale:
    low, high = min(values), max(values)
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    return Scale(low - room, high + room, count)


def _frame(scale: Scale, first: str, last: str) -> str:
    bottom = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{WIDTH}" y2="{bottom}"/>']
    for value in (scale.low + (scale.high - scale.low) * share for share in (0.1, 0.5, 0.9)):
        y = scale.y(value)
        parts.append(f'<line class="axis" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">{escape(first)}</text>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{escape(last)}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def commits_svg(series: Series) -> str:
    """One metric over commits: band, runs, means, and marks of what was found."""
    if not series.points:
        return ""
    bands = [f.band for f in series.findings if f.band]
    scale = _scale([v for p in series.points for v in p.values] + [e for b in bands for e in b], len(series.points))
    parts = [_frame(scale, short(series.points[0].commit)[:7], short(series.points[-1].commit)[:7])]
    step = scale.x(1) - scale.x(0) if len(series.points) > 1 else 20
    for index, finding in enumerate(series.findings):
        if finding.band:
            top, bottom = scale.y(finding.band[1]), scale.y(finding.band[0])
            left = scale.x(index) - step / 2
            parts.append(
                f'<rect class="band" x="{left:.1f}" y="{top:.1f}" width="{step:.1f}" height="{bottom - top:.1f}"/>'
            )
    middle = [(scale.x(i), scale.y(_mean(p.values))) for i, p in enumerate(series.points)]
    parts.append(f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in middle)}"/>')
    for index, point in enumerate(series.points):
        x, y = middle[index]
        parts += [f'<circle class="run" cx="{x:.1f}" cy="{scale.y(v):.1f}" r="2"/>' for v in point.values]
        finding = series.finding(point.commit)
        confirmed = finding is not None and finding.outcome is Outcome.CONFIRMED
        kind = str(finding.change if confirmed else finding.outcome) if finding else "pending"
        title = escape(f"{short(point.commit)}: {_mean(point.values):.4g}, {kind}")
        radius = 6 if confirmed else 3.5
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{title}</title></circle>')
    return f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">{"".join(parts)}</svg>'


def _curves(session: Session, series: Series) -> dict[str, str] | None:
    """The training curves of a metric, one line per commit, the mean over its runs; older commits are paler."""
    lines: list[tuple[str, list[tuple[int, float]]]] = []
    for point in series.points:
        results = [
            r for r in session.results.of(series.suite.id, point.commit)
            if r.task == series.task.name and r.purpose == "screen" and series.name in r.curves
        ]  # fmt: skip
        if not results:
            continue
        by_step: dict[int, list[float]] = {}
        for result in results:
            for step, value in result.curves[series.name]:
                by_step.setdefault(step, []).append(value)
        lines.append((point.commit, [(s, _mean(v)) for s, v in sorted(by_step.items())]))
    if not lines:
        return None
    steps = sorted({s for _, line in lines for s, _ in line})
    scale = _scale([v for _, line in lines for _, v in line], len(steps))
    parts = [_frame(scale, f"step {steps[0]}", f"step {steps[-1]}")]
    for number, (commit, line) in enumerate(lines):
        shade = 0.25 + 0.75 * (number + 1) / len(lines)
        places = " ".join(f"{scale.x(steps.index(s)):.1f},{scale.y(v):.1f}" for s, v in line)
        parts.append(
            f'<polyline class="line" style="opacity:{shade:.2f}" points="{places}">'
            f"<title>{escape(short(commit))}</title></polyline>"
        )
    svg = f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">{"".join(parts)}</svg>'
    return {"task": series.task.name, "metric": series.name, "svg": svg}


def badge_svg(word: str, colour: str, label: str = "benchmarks") -> str:
    left, right = 8 + 6.2 * len(label), 10 + 6.4 * len(word)
    total = left + right
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="20" role="img" '
        f'aria-label="{label}: {word}"><rect width="{left:.1f}" height="20" fill="#4a525c"/>'
        f'<rect x="{left:.1f}" width="{right:.1f}" height="20" fill="{colour}"/>'
        f'<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2:.1f}" y="14">{label}</text>'
        f'<text x="{left + right / 2:.1f}" y="14">{word}</text></g></svg>\n'
    )


# ---- files -----------------------------------------------------------------------------------------------------------


def markdown(session: Session, summary: Summary, history: Sequence[str], incidents: Sequence[Mapping[str, Any]]) -> str:
    """A summary for a pull request or a night."""
    lines = [f"**Benchmarks: {WORDS[summary.exit]}**", ""]
    if summary.verdicts:
        lines += ["| commit | | what was found |", "|---|---|---|"]
    for verdict in summary.verdicts:
        words = "; ".join(verdict.reasons) or "no change"
        cell = words.replace("|", "\\|").replace("\n", " ")
        subject = _subject(session, verdict.commit)[:60].replace("|", "\\|")
        lines.append(f"| `{short(verdict.commit)}` {subject} | {WORDS[verdict.exit]} | {cell} |")
    if incidents:
        lines += ["", "Confirmed changes:", ""]
        lines += [
            f"- {i['change']} of {i['suite']}/{i['task']} {i['metric']}: `{i['commit'][:9]}` {i['subject']} "
            f"({i['how']}); {i['effect']}"
            for i in incidents
        ]
    return "\n".join(lines) + "\n"


def write(session: Session, history: Sequence[str], out: Path, command: str) -> dict[str, Any]:
    """Write all files of a report; returns report.json's data."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    data = build(session, history, command)
    out.mkdir(parents=True, exist_ok=True)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    code = Exit(data["exit"])
    page = environment.get_template("bench.html.j2").render(r=data)
    plain = data | {"suites": [_without_drawings(s) for s in data["suites"]]}
    sv.replace_file(out / "report.html", page)
    sv.replace_file(out / "report.json", json.dumps(plain, indent=1) + "\n")
    sv.replace_file(out / "report.md", _report_markdown(data))
    sv.replace_file(out / "badge.svg", badge_svg(WORDS[code], COLOURS[code]))
    shield = {"schemaVersion": 1, "label": "benchmarks", "message": WORDS[code], "color": COLOURS[code]}
    sv.replace_file(out / "badge.json", json.dumps(shield) + "\n")
    return data


def _without_drawings(suite: Mapping[str, Any]) -> dict[str, Any]:
    rows = [{k: v for k, v in row.items() if k not in ("svg", "cells")} for row in suite["rows"]]
    return {k: v for k, v in suite.items() if k != "curves"} | {"rows": rows}


def _report_markdown(data: Mapping[str, Any]) -> str:
    lines = [
        f"# {data['title']}",
        "",
        f"{data['sentence']} {data['commit_count']} commits, machine {data['machine']}.",
        "",
    ]
    for suite in data["suites"]:
        lines += [f"## {suite['name']}", "", "| task | metric | first | last | runs |", "|---|---|---|---|---|"]
        for row in suite["rows"]:
            if row["points"]:
                first, last = (_mean(row["points"][i]["values"]) for i in (0, -1))
                runs = sum(len(p["values"]) for p in row["points"])
                lines.append(f"| {row['task']} | {row['metric']} {row['unit']} | {first:.4g} | {last:.4g} | {runs} |")
        lines.append("")
    for incident in data["incidents"]:
        lines.append(
            f"- {incident['change']} of {incident['task']} {incident['metric']}: `{incident['commit'][:9]}` "
            f"{incident['subject']}; {incident['effect']}"
        )
    return "\n".join(lines).rstrip() + "\n"
