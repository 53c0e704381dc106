"""SQL of people on a run's store: read-only, in bounded time and size, over all of its steps.

rollouts, rewards, plans, outcomes      as engines.store.tables, old steps included
steps, step_metrics, acceptance, lengths
"""

import threading
from contextlib import suppress

import duckdb
import pyarrow as pa

from engines.store.archive import Archive

MAX_BYTES = 256 * 2**20
"""Largest answer: it is held in the memory of the process that has the store."""
_ROWS_AT_A_TIME = 1024

VIEWS = {
    "step_metrics": """
        SELECT step, epoch, metric.key AS name, metric.value AS value
        FROM (
            SELECT step, epoch, unnest(map_entries(
                from_json(report -> 'metrics', '"MAP(VARCHAR, DOUBLE)"')
            )) AS metric
            FROM steps
        )
    """,
    "acceptance": """
        SELECT
            split, step, epoch, engine, drafter,
            sum(num_draft_tokens) AS num_draft_tokens,
            sum(num_accepted_tokens) AS num_accepted_tokens,
            sum(num_verifications) AS num_verifications,
            sum(num_accepted_tokens) / nullif(sum(num_draft_tokens), 0) AS acceptance_rate
        FROM rollouts GROUP BY ALL
    """,
    "lengths": """
        SELECT
            split, step, epoch, prompt_key,
            count(*) AS num_samples,
            min(response_tokens) AS min_tokens,
            median(response_tokens) AS median_tokens,
            max(response_tokens) AS max_tokens,
            avg(reward) AS reward_mean
        FROM rollouts LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
        GROUP BY ALL
    """,
}
"""Views for people: a row a metric of a step; a row an engine and drafter of a step; a row a prompt
of a step."""


def answer(
    con: duckdb.DuckDBPyConnection, archive: Archive, query: str, timeout_s: float
) -> pa.Table:
    """Answer to one query. Raises ValueError when it does more than read, when DuckDB refuses it,
    and when it takes longer than `timeout_s` seconds or gives more than `MAX_BYTES`."""
    _check(query)
    with con.cursor() as cursor:
        # DuckDB itself refuses whatever would write.
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        archive.show_all(cursor)
        for name, view in VIEWS.items():
            cursor.execute(f"CREATE TEMP VIEW {name} AS {view}")
        timer = threading.Timer(timeout_s, cursor.interrupt)
        timer.start()
        try:
            return _collect(cursor.sql(query))
        except duckdb.InterruptException as error:
            raise ValueError(
                f"no answer within {timeout_s:g} s: ask for less, or give it a longer --timeout"
            ) from error
        except duckdb.Error as error:
            raise ValueError(str(error)) from error
        finally:
            timer.cancel()
            with suppress(duckdb.Error):
                cursor.rollback()


def _check(query: str) -> None:
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise ValueError(str(error)) from error
    reading = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in reading:
        raise ValueError("give one query that reads, as in SELECT .. or DESCRIBE rollouts")


def _collect(answer: duckdb.DuckDBPyRelation) -> pa.Table:
    reader = answer.to_arrow_reader(_ROWS_AT_A_TIME)
    batches, num_bytes = [], 0
    for batch in reader:
        batches.append(batch)
        num_bytes += batch.nbytes
        if num_bytes > MAX_BYTES:
            raise ValueError(
                f"the answer is larger than {MAX_BYTES // 2**20} MiB: leave out the token columns, "
                "or add a LIMIT"
            )
    return pa.Table.from_batches(batches, reader.schema)
