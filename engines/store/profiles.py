"""A profile's store: every measured point, once it is measured, and the fit.

One DuckDB file per profile, held by the flow that measures. `header` has one row per item as JSON;
`points` a row per point and pass, with the fields of `schemas.latency.ProfilePoint`; `fits` the
knots of the fitted curves; `accuracy` how well the fit predicts what it did not see.
"""

from collections.abc import Iterable
from pathlib import Path

from engines.store.opening import Format, connect
from schemas.latency import Accuracy, FitKnot, ProfilePoint
from schemas.profile import MachineFacts, Measurement

PROFILE = Format(
    name="refrain profile",
    version=1,
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
    """Open it, write as points come in, close it. What is in it is never measured again."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file is not a profile's or another process holds it."""
        self._con = connect(path, read_only=False, lock_timeout_s=10.0, format=PROFILE)

    def close(self) -> None:
        self._con.close()

    def facts(self) -> MachineFacts | None:
        """Facts of the machine that was measured; None before the first engine came up."""
        query = "SELECT value FROM header WHERE name = 'machine'"
        row = self._con.execute(query).fetchone()
        return MachineFacts.model_validate_json(row[0]) if row else None

    def check_facts(self, facts: MachineFacts) -> MachineFacts:
        """Facts that all points are measured by: those of the first engine that came up.

        Raises ValueError when the points here were measured on another machine.
        """
        before = self.facts()
        if before is None:
            values = ["machine", facts.model_dump_json()]
            self._con.execute("INSERT INTO header VALUES (?, ?)", values)
            return facts
        if (before.hardware, before.versions) != (facts.hardware, facts.versions):
            raise ValueError(
                f"this profile was begun on another machine or with other software: {before} then, "
                f"{facts} now; measure anew with --overwrite, or give this one another name"
            )
        return before

    def add(
        self, pass_index: int, measurement: Measurement, points: Iterable[ProfilePoint]
    ) -> None:
        """One measurement with all its points, or nothing of it."""
        rows = [
            [
                *(pass_index, measurement.kind, measurement.prompt_tokens),
                *(point.kind, point.tp_degree, point.batch, point.context_tokens),
                *(point.rms_tokens, point.window, point.drafter, point.seconds, point.num_repeats),
            ]
            for point in points
        ]
        self._con.execute("BEGIN")
        self._con.executemany(f"INSERT INTO points VALUES ({', '.join('?' * 12)})", rows)
        self._con.execute("COMMIT")

    def measured(self) -> set[tuple[int, Measurement]]:
        """(pass, measurement) of everything that is here."""
        rows = self._con.execute(
            'SELECT pass, measured_by, tp_degree, batch, prompt_tokens, "window", drafter '
            "FROM points WHERE kind = measured_by"
        ).fetchall()
        fields = ("kind", "tp_degree", "batch", "prompt_tokens", "window", "drafter")
        return {
            (row[0], Measurement.model_validate(dict(zip(fields, row[1:], strict=True))))
            for row in rows
        }

    def points(self) -> tuple[ProfilePoint, ...]:
        """All points, in an order that does not depend on the order of measuring."""
        fields = tuple(ProfilePoint.model_fields)
        columns = ", ".join(f'"{field}"' for field in fields)
        rows = self._con.execute(f"SELECT {columns} FROM points ORDER BY ALL").fetchall()
        return tuple(
            ProfilePoint.model_validate(dict(zip(fields, row, strict=True))) for row in rows
        )

    def replace_fit(
        self, knots: Iterable[FitKnot], accuracies: Iterable[tuple[str, Accuracy]]
    ) -> None:
        """Keep a fit and its accuracies in place of the earlier ones; `accuracies`: (what was
        withheld, the figures)."""
        self._con.execute("BEGIN; DELETE FROM fits; DELETE FROM accuracy")
        self._con.executemany(
            "INSERT INTO fits VALUES (?, ?, ?, ?, ?, ?, ?)",
            [[k.kind, k.tp_degree, k.drafter, k.batch, k.window, k.x, k.seconds] for k in knots],
        )
        self._con.executemany(
            "INSERT INTO accuracy VALUES (?, ?, ?, ?, ?, ?)",
            [
                [withheld, a.kind, a.num_points, a.num_extrapolated, a.median_error, a.p90_error]
                for withheld, a in accuracies
            ],
        )
        self._con.execute("COMMIT")
