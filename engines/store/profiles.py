"""The store of a profile: each point as soon as it is measured, and the fit.

Each profile is one DuckDB file. The flow that measures holds it.

    header     one row per TP degree: the machine's facts as JSON
    points     one row per point and pass, with the fields of `schemas.latency.ProfilePoint`
    fits       the knots of the fitted curves
    accuracy   the fit's errors on points that it was not fitted to
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refrain.engines.store.open_database import Format, connect
from refrain.schemas.base import Frozen
from refrain.schemas.latency import Accuracy, FitKnot, ProfilePoint
from refrain.schemas.profile import MachineFacts, Measurement

PROFILE = Format(
    name="refrain profile",
    version=1,
    fix="Bring it back from a copy, or measure anew by refrain profile --overwrite",
    create="""
CREATE TABLE header (name VARCHAR PRIMARY KEY, value JSON NOT NULL);
CREATE TABLE points (
    pass INTEGER NOT NULL,
    measured_by VARCHAR NOT NULL,     -- kind of the measurement: decode gives prefill too
    prompt_tokens INTEGER NOT NULL,   -- of each sequence when the measurement began
    kind VARCHAR NOT NULL,
    tp_degree INTEGER NOT NULL,
    batch INTEGER NOT NULL,
    context_tokens BIGINT NOT NULL,
    rms_tokens DOUBLE NOT NULL,
    "window" INTEGER NOT NULL,
    drafter VARCHAR,
    seconds DOUBLE NOT NULL,
    num_repeats INTEGER NOT NULL
);
CREATE TABLE fits (
    kind VARCHAR NOT NULL,
    tp_degree INTEGER,                -- null: drafting
    drafter VARCHAR,
    batch INTEGER NOT NULL,
    "window" INTEGER NOT NULL,
    x DOUBLE NOT NULL,                -- decode: context tokens; prefill: RMS length; else batch
    seconds DOUBLE NOT NULL           -- verify: beyond a decoding step
);
CREATE TABLE accuracy (
    withheld VARCHAR NOT NULL,        -- points: within curves; batches: whole batch sizes
    kind VARCHAR NOT NULL,
    num_points INTEGER NOT NULL,
    num_extrapolated INTEGER NOT NULL,
    median_error DOUBLE NOT NULL,
    p90_error DOUBLE NOT NULL
);
""",
)


class ProfileStore:
    """A profile's database. A stored measurement is never taken again."""

    def __init__(self, path: Path) -> None:
        """Raise ValueError when the file is not a profile or another process holds it."""
        self._con = connect(path, read_only=False, lock_timeout_s=10.0, format=PROFILE)

    def close(self) -> None:
        self._con.close()

    def facts(self, tp_degree: int) -> MachineFacts | None:
        """Return the measured machine's facts with the limits of this TP degree.

        Return None if no engine of this TP degree has started yet.
        """
        return self._facts().get(_machine_at(tp_degree))

    def check_facts(
        self, facts: MachineFacts, tp_degree: int, *, anew: bool = False
    ) -> MachineFacts:
        """Return the facts under which all points of a TP degree are measured.

        These are the facts of the first engine that started at this TP degree. With `anew`, all
        that another machine or other software measured is deleted, and so is its fit. Otherwise
        raise ValueError.
        """
        known = self._facts()
        others = [before for before in known.values() if _machine(before) != _machine(facts)]
        if others and anew:
            with self._transaction():
                for table in ("header", "points", "fits", "accuracy"):
                    self._con.execute(f"DELETE FROM {table}")
            known = {}
        elif others:
            raise ValueError(
                "this profile was begun on another machine or with other software: "
                f"{others[0]} then, {facts} now. Measure again with --overwrite, or choose another "
                "name for the profile"
            )
        name = _machine_at(tp_degree)
        if name not in known:
            values = [name, facts.model_dump_json()]
            self._con.execute("INSERT INTO header VALUES (?, ?)", values)
        return known.get(name, facts)

    def _facts(self) -> dict[str, MachineFacts]:
        """Return the machine's facts by their name in the header."""
        # Fetch all rows: an unread result blocks the connection for other queries.
        rows = self._con.execute("SELECT name, value FROM header").fetchall()
        return {name: MachineFacts.model_validate_json(value) for name, value in rows}

    def add(
        self, pass_index: int, measurement: Measurement, points: Iterable[ProfilePoint]
    ) -> None:
        """Add a measurement with all its points in one transaction."""
        measured_by = (pass_index, measurement.kind, measurement.prompt_tokens)
        with self._transaction():
            self._insert("points", ((*measured_by, *_values(point)) for point in points))

    def measured(self) -> set[tuple[int, Measurement]]:
        """Return the (pass, measurement) pairs that the store has."""
        rows = self._rows(
            'pass, measured_by AS kind, tp_degree, batch, prompt_tokens, "window", drafter '
            "FROM points WHERE kind = measured_by"
        )
        return {(row.pop("pass"), Measurement.model_validate(row)) for row in rows}

    def points(self) -> tuple[ProfilePoint, ...]:
        """Return all points, sorted, whatever the order of measuring."""
        columns = ", ".join(f'"{field}"' for field in ProfilePoint.model_fields)
        rows = self._rows(f"{columns} FROM points ORDER BY ALL")
        return tuple(map(ProfilePoint.model_validate, rows))

    def replace_fit(
        self, knots: Iterable[FitKnot], accuracies: Iterable[tuple[str, Accuracy]]
    ) -> None:
        """Replace the fit and its accuracies. `accuracies`: pairs of (withheld, figures), where
        `withheld` names the points that the fit did not see."""
        with self._transaction():
            self._con.execute("DELETE FROM fits; DELETE FROM accuracy")
            self._insert("fits", map(_values, knots))
            self._insert("accuracy", ((withheld, *_values(one)) for withheld, one in accuracies))

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._con.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._con.execute("ROLLBACK")
            raise
        self._con.execute("COMMIT")

    def _rows(self, query: str) -> list[dict[str, Any]]:
        return self._con.sql(f"SELECT {query}").to_arrow_table().to_pylist()

    def _insert(self, table: str, rows: Iterable[tuple]) -> None:
        rows = list(rows)
        places = ", ".join("?" * len(rows[0]))
        self._con.executemany(f"INSERT INTO {table} VALUES ({places})", rows)


def _machine_at(tp_degree: int) -> str:
    return f"machine at TP {tp_degree}"


def _machine(facts: MachineFacts) -> tuple[str, dict[str, str]]:
    return facts.hardware, facts.versions


def _values(model: Frozen) -> tuple:
    """Return the model's fields, whose order is that of the columns."""
    return tuple(value for _, value in model)
