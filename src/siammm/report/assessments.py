"""Evaluations and audits of a run, where there are any."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from siammm.core.errors import InputError, StoredFileError
from siammm.core.text import one_line, printable, shown
from siammm.report.clusters import Rows
from siammm.report.json_numbers import number
from siammm.report.schema import Figure, Suspect
from siammm.runs import evaluation as record
from siammm.runs import files
from siammm.runs.run import Run

MOST_SUSPECTS = 1000
"""What ``siammm audit`` writes."""

_COLUMNS = frozenset(
    {"rank", "id", "label", "suggested", "probability", "score", "cluster", "planted", "label_before"}
    | {"group", "group_label", "group_disagrees"}
)
"""Those that are no witness's."""
_DEFAULT_THRESHOLD = 0.5


# -- figures -----------------------------------------------------------------------------------------------------------


def read_figures(run: Run, given: Path | None, notes: list[str]) -> list[Figure]:
    """The figures of an evaluation: of the one that was given, or of that of this run, here, if there is one."""
    where = given
    if where is None:
        where = record.default_output(str(run.path))
        if not (where / record.FILE).is_file():
            if run.label_names is not None and run.data is not None:
                notes.append(f"The encoder was not evaluated; do so with `siammm evaluate {_command_text(run)}`.")
            return []
    evaluation = record.read_evaluation(where)
    subject = evaluation.subject.get("path")
    if subject is not None and Path(str(subject)) != run.path.resolve():
        sentence = f"The evaluation in {shown(printable(where))} is of another run ({printable(subject)})"
        notes.append(f"{sentence}; its figures are {'shown all the same' if given is not None else 'not shown'}.")
        if given is None:
            return []
    elif given is None and _is_of_earlier_run(evaluation.subject, run):
        notes.append(
            f"The evaluation in {shown(printable(where))} is of an earlier run of this name, so its figures are not "
            f"shown; make it again with `siammm evaluate {_command_text(run)} --overwrite`."
        )
        return []
    if evaluation.test_images.get("seen") and evaluation.test_images.get("why"):
        notes.append(f"About the figures: {printable(evaluation.test_images['why'])}")
    return [
        Figure(
            protocol=printable(result.protocol),
            name=printable(name),
            value=number(figure.mean),
            deviation=None if figure.deviation is None else number(figure.deviation),
            note=printable(result.recipe),
        )
        for result in evaluation.results
        for name, figure in result.figures.items()
    ]


def _is_of_earlier_run(subject: dict[str, Any], run: Run) -> bool:
    """Whether the evaluation is of an earlier run in the same folder, one that was trained again since."""
    now = {
        "n_clusters": run.n_clusters,
        "epochs": run.epochs,
        "random_state": run.random_state,
        "images": run.facts.get("fingerprint"),
    }
    images = subject.get(run.images_key)
    then = subject | {"images": images.get("fingerprint") if isinstance(images, dict) else None}
    return any(then.get(name) not in (None, value) for name, value in now.items())


# -- suspects ----------------------------------------------------------------------------------------------------------


class Labels:
    """The names of labels, to which those of an audit are added."""

    def __init__(self, names: list[str] | None) -> None:
        self.names = names
        self._codes = {name: code for code, name in enumerate(names or [])}

    def code(self, label: Any) -> int:
        """The number of a label; -1 for none."""
        if label is None:
            return -1
        name = printable(label)
        if name not in self._codes:
            self.names = [*(self.names or []), name]
            self._codes[name] = len(self.names) - 1
        return self._codes[name]


def read_suspects(run: Run, given: Path | None, labels: Labels, rows: Rows, notes: list[str]) -> list[Suspect] | None:
    """The worst labels of an audit: of the one that was given, or of that of this run, here, if there is one."""
    where = given
    if where is None:
        where = Path(f"{run.path.resolve().name}-audit")
        if not (where / files.SUSPECTS).is_file():
            if run.label_names is not None and run.data is not None:
                notes.append(f"Labels were not audited; find suspects with `siammm audit {_command_text(run)}`.")
            return None
    where = where.expanduser()
    file = where if where.is_file() else where / files.SUSPECTS
    if not file.is_file():
        raise InputError(
            f"There is no audit in {shown(where)}: it has no {files.SUSPECTS}; make one with siammm audit."
        )
    threshold = _threshold(file.with_name(files.SUMMARY))
    try:
        table = pq.read_table(file)
        table = table.filter(pc.less(table.column("probability"), threshold)).sort_by("rank")  # pyright: ignore[reportAttributeAccessIssue]
        listed: list[dict[str, Any]] = table.slice(0, MOST_SUSPECTS).to_pylist()
        position = {name: at for at, name in enumerate(run.ids)}
        floating = [field.name for field in table.schema if pa.types.is_floating(field.type)]
        witnesses = [name for name in floating if name not in _COLUMNS]
        suspects: list[Suspect] = []
        for row in listed:
            image = position.get(printable(row["id"]))
            if image is None:
                continue
            said = [(name, row[name]) for name in witnesses if row[name] is not None]
            suspects.append(
                Suspect(
                    image=rows.add(image),
                    rank=int(row["rank"]),
                    given=labels.code(row["label"]),
                    proposed=labels.code(row["suggested"]),
                    group_label=labels.code(row.get("group_label") if row.get("group_disagrees") else None),
                    score=min(1.0, max(0.0, number(1.0 - row["probability"]))),
                    evidence=[(printable(name), min(1.0, max(0.0, number(value, 4)))) for name, value in said],
                )
            )
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise StoredFileError(f"{file} is not an audit, or it is damaged ({one_line(error)}); audit again.") from error
    if len(suspects) < len(listed):
        notes.append(
            f"{len(listed) - len(suspects):,} of {len(listed):,} suspects in {shown(printable(where))} are not images "
            "of this run, and are left out."
        )
    if "planted" in table.column_names and pc.any(table.column("planted")).as_py():  # pyright: ignore[reportAttributeAccessIssue]
        notes.append(
            f"The audit in {shown(printable(where))} made some labels wrong on purpose (--plant), to see whether it "
            "finds them: these are among the suspects."
        )
    if table.num_rows > MOST_SUSPECTS:
        notes.append(f"Of {table.num_rows:,} suspect labels the {MOST_SUSPECTS:,} worst are shown.")
    return suspects


def _threshold(path: Path) -> float:
    """The probability below which the audit called a label suspect."""
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["threshold"])
    except (OSError, ValueError, KeyError, TypeError):
        return _DEFAULT_THRESHOLD


def _command_text(run: Run) -> str:
    """The run as it is given to a command."""
    name = printable(run.path)
    return shlex.quote(name) if name.isprintable() else shown(name)
