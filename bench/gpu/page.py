"""Write README.md of a folder of results that ``bench/gpu/run.sh`` has left: ``python bench/gpu/page.py FOLDER``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

Row = dict  # as bench/step or bench_all.py writes it, with the facts of its file and the file's name
FACTS = ("machine", "driver", "cuda", "torch", "transformers", "commit")
_TAIL = 60  # lines of a text that the page shows


def by_time(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern, oldest first: their names end in the time they were begun."""
    return sorted(folder.glob(pattern), key=lambda path: path.stem.rsplit("-", 2)[1:])


def read_rows(folder: Path, pattern: str, key: Callable[[Row], tuple]) -> list[Row]:
    """Return the rows of JSON files, of those with the same key only the newest."""
    found: dict[tuple, Row] = {}
    for path in by_time(folder, pattern):
        facts = json.loads(path.read_text())
        for row in facts.pop("rows"):
            row = facts | row | {"file": path.name}
            found[key(row)] = row
    return [found[name] for name in sorted(found)]


def table(head: str, rows: Iterable[str]) -> list[str]:
    """Return a table in Markdown, or a line that says that there is nothing yet."""
    rows = list(rows)
    count = head.count("|") - 1
    return [head, "|" + " --- |" * count, *rows, ""] if rows else ["Nothing yet.", ""]


def main(folder: Path) -> None:
    lines = ["# What a GPU machine showed", "", "Written by `bench/gpu/page.py`; do not edit.", ""]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", *section(folder)]
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n")


# ---------------------------------------------------------------------------------------------- sections


def machine(folder: Path) -> list[str]:
    """Say where the rows come from."""
    seen: dict[tuple, list[str]] = {}
    for path in by_time(folder, "*.json"):
        facts = json.loads(path.read_text())
        seen.setdefault(tuple(str(facts.get(name) or "-") for name in FACTS), []).append(path.name)
    rows = (f"| {' | '.join(facts)} | {len(files)} |" for facts, files in seen.items())
    return table(f"| {' | '.join(FACTS)} | files |", rows)


def stages(folder: Path) -> list[str]:
    """Say what became of each stage."""
    found: dict[str, list[str]] = {}
    for path in by_time(folder, "stages-*.tsv"):
        for line in path.read_text().splitlines():
            stage, *rest = line.split("\t")
            if rest[-1] != "not begun" or stage not in found:  # that does not undo an earlier run
                found[stage] = rest
    return table("| stage | UTC | commit | outcome |", (f"| {n} | {' | '.join(rest)} |" for n, rest in found.items()))


def tests(folder: Path) -> list[str]:
    """Count the tests; name those that failed, in the order they did, and count by file those that did not run."""
    paths = by_time(folder, "tests-*.jsonl")
    rows = [json.loads(line) for line in paths[-1].read_text().split("\n")[:-1]] if paths else []  # whole lines only
    if not rows:
        return ["Nothing yet.", ""]
    names, outcomes, whys = rows[0]["tests"], {}, {}
    for row in rows[1:]:
        if row["outcome"] == "failed":
            whys.setdefault(row["test"], row["why"])
        if outcomes.get(row["test"]) != "failed":
            outcomes[row["test"]] = row["outcome"]
    missing = Counter(name.split("::")[0] for name in names if name not in outcomes)
    counts = Counter(outcomes.values())
    lines = [
        f"{paths[-1].name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, "
        f"{missing.total()} did not run.",
        "",
        *(f"- `{name}`: {_reason(why)}" for name, why in whys.items()),
        *(f"- `{file}`: {count} did not run" for file, count in missing.items()),
    ]
    return lines + [""] * (lines[-1] != "")


def _reason(text: str) -> str:
    """Return the line of pytest's text that has the error."""
    lines = text.strip().splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1] if lines else "")


def steps(folder: Path) -> list[str]:
    """Set steps against the floor."""
    return _steps(folder, "step-*.json")


def peers(folder: Path) -> list[str]:
    """Set peers against our step of the same run."""
    return _steps(folder, "peer-*.json")


def _steps(folder: Path, pattern: str) -> list[str]:
    rows = read_rows(folder, pattern, lambda r: (r["context"], r["batch"], r["accepted"], r["runner"], r["model"]))
    columns = (
        "context | batch | accepted | runner | step, ms | of floor | at 4.3 TB/s | host, us | kernels | rounds | commit"
    )
    measured = {(row["runner"], row["context"], row["batch"]) for row in rows}
    left_out = {
        f"- {out['runner']} at context {out['context']}, batch {out['batch']}: {out['why']}"
        for path in by_time(folder, pattern)
        for out in json.loads(path.read_text())["left_out"]
        if (out["runner"], out["context"], out["batch"]) not in measured
    }
    return table(f"| {columns} |", map(_step_line, rows)) + sorted(left_out) + [""] * bool(left_out)


def _step_line(row: Row) -> str:
    return (
        f"| {row['context']} | {row['batch']} | {row['accepted']} | {row['runner']} | {row['step_ms']:.3f} | "
        f"{_percent(row['floor_share'])} | {_percent(row['floor_4300_share'])} | {_number(row['host_us'])} | "
        f"{_number(row['kernels'])} | {row['rounds']} | {row['commit']} |"
    )


def overlap(folder: Path) -> list[str]:
    """Compare overlap and prefetch, on and off."""

    def key(row: Row) -> tuple:
        return row["context"], row["batch"], row["runner"], *_switches(row)

    rows = read_rows(folder, "overlap*.json", key)
    head = "| context | batch | runner | overlap | prefetch | step, ms | of floor |"
    return table(
        head,
        (
            f"| {row['context']} | {row['batch']} | {row['runner']} | {' | '.join(_switches(row))} | "
            f"{row['step_ms']:.3f} | {_percent(row['floor_share'])} |"
            for row in rows
        ),
    )


def _switches(row: Row) -> tuple[str, str]:
    """Return how the switches were set, from the name of the file, and what became of it."""
    asked = row["file"].startswith("overlap1")
    shown = "on" if row["overlap"] else "asked for, not active" if asked else "off"
    return shown, "on" if row["prefetch"] else "off"


def kernels(folder: Path) -> list[str]:
    """List each op at its shape, with its share of the ceiling."""
    rows = read_rows(folder, "ops-*.json", lambda r: (r["op"], r["shape"], r["dtype"]))
    head = "| op | shape | dtype | us | of copy | next to plain torch |"
    return table(
        head,
        (
            f"| {r['op']} | {r['shape']} | {r['dtype']} | {r['us']:.1f} | {_percent(r['share_of_copy'])} | "
            f"{r['ratio']:.2f}x {r['peer']} |"
            for r in rows
        ),
    )


def where_it_goes(folder: Path) -> list[str]:
    """Show the kernels of one step, with overlap off."""
    paths = by_time(folder, "table-*.json")
    if not paths:
        return ["Nothing yet.", ""]
    facts = json.loads(paths[-1].read_text())
    lines = ["Overlap off, so that a kernel's time is its own.", ""]
    for runner, found in facts.get("tables", {}).items():
        step = next((row["step_ms"] for row in facts["rows"] if row["runner"] == runner), None)
        total = sum(row["us"] for row in found["kernels"])
        if step:
            lines += [f"`{runner}`: {total:.0f} us in kernels, {_percent(total / (1000 * step))} of the step.", ""]
        rows = (f"| {r['us']:.1f} | {r['count']:.1f} | `{r['kernel'][:100]}` |" for r in found["kernels"][:25])
        lines += table("| us per step | calls | kernel |", rows)
        lines += [f"`{runner}`: the ops of the same step, kernel by kernel, with the bytes that each must move.", ""]
        lines += table("| us per step | calls | op | shapes | MB | of copy |", map(_op_line, found["ops"][:25]))
    return lines


def _op_line(row: Row) -> str:
    moved = "- | -" if row["mb"] is None else f"{row['mb']:.1f} | {_percent(row['share_of_copy'])}"
    return f"| {row['us']:.1f} | {row['count']:.1f} | {row['op']} | {row['shapes']} | {moved} |"


def texts(folder: Path) -> list[str]:
    """Show what the doctor, the answers, the probe and the memory checker said, and what Nsight Compute left."""
    lines = []
    for name in ("doctor", "answers", "probe", "memory", "registers"):
        for path in by_time(folder, f"{name}-*.txt")[-1:]:
            text = path.read_text().strip().splitlines()
            lines += [f"The end of {path.name}:", "", "```", *text[-_TAIL:], "```", ""]
    for path in by_time(folder, "ncu-*.csv")[-1:]:
        lines += [f"[What bounds each kernel]({path.name})", ""]
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


SECTIONS: dict[str, Callable[[Path], list[str]]] = {
    "Stages": stages,
    "Machine": machine,
    "Tests": tests,
    "Steps": steps,
    "Overlap and prefetch": overlap,
    "Where a step goes": where_it_goes,
    "Ops": kernels,
    "Peers": peers,
    "Details": texts,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
