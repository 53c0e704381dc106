"""`refrain samples`: the right rollouts in the right order, in the terminal and in pages that carry
out nothing of what a response says."""

import http.client
import json
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from shutil import copytree
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from refrain.engines.data.tokenizer import TokenDecoder
from refrain.engines.reports.samples import likelihood_level
from refrain.engines.store import archive, samples
from refrain.engines.store.listener import Snapshot, listen
from refrain.engines.store.open_database import connect
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.samples import SORTS, SampleFilter
from refrain.engines.store.store import Store
from refrain.engines.store.tables import REWARDS
from refrain.flows.cli import main
from refrain.flows.samples import RunSamples
from refrain.flows.samples_server import MAX_REQUESTS, SamplesServer, SamplesSite
from refrain.schemas.rollout import FinishReason, Rollout, Split, Turn, VersionSpan
from refrain.tasks.run.run_dir import CONFIG_FILE, STORE_FILE
from tests.store.test_listener import all_served
from tests.store.test_store import make_rollout

NUM_STEPS = 14
ATTACK = "<script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;\x1b[2J"


def byte_tokenizer(directory: Path) -> Tokenizer:
    """Save a tokenizer whose tokens are bytes."""
    directory.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    return made


def said(tokenizer: Tokenizer, step: int, prompt: str, sample: int, text: str) -> Rollout:
    """Return a rollout with this text. Its log-probabilities and versions depend on the step."""
    ids = tokenizer.encode(text).ids
    rollout = make_rollout(step, prompt, sample, versions=[(0, 1)])
    first = len(ids) // 2
    generated = replace(
        rollout.generated,
        token_ids=ids,
        inference_logprobs=[-((step + i + sample) % 7) / 4 for i in range(len(ids))],
        spans=(VersionSpan(step, first), VersionSpan(step + 1, len(ids) - first)),
    )
    request = replace(rollout.request, prompt_token_ids=tuple(tokenizer.encode(prompt).ids))
    reason = FinishReason.LENGTH if sample else FinishReason.STOP
    return replace(rollout, request=request, generated=generated, finish_reason=reason)


def add_step(store: Store, tokenizer: Tokenizer, step: int) -> None:
    texts = {
        (prompt, sample): f"{prompt} step {step} " + "word " * ((step * 5 + sample) % 9)
        for prompt in (("ab", "cd", "ef") if step % 2 else ("ab", "ef"))
        for sample in range(2)
    }
    if step == NUM_STEPS:
        texts[ATTACK, 0] = ATTACK
    rollouts = [said(tokenizer, step, *key, text) for key, text in texts.items()]
    store.add_rollouts(rollout_rows(rollouts), epoch=step // 3)
    scored = [key for key in texts if key != ("ef", 1)]
    columns = [
        [prompt for prompt, _ in scored],
        [sample for _, sample in scored],
        [(step * 7 + i) % 11 / 10 for i in range(len(scored))],
        [json.dumps({"format": 0.5, ATTACK: ATTACK})] * len(scored),
    ]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, REWARDS, strict=True)]
    store.add_rewards(Split.TRAIN, step, pa.table(arrays, schema=REWARDS))


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Return the directories of a run, ended and live. Most steps are in the archive."""
    directory = tmp_path_factory.mktemp("runs")
    tokenizer = byte_tokenizer(directory / "model")
    ended, live = directory / "ended", directory / "live"
    ended.mkdir()
    (ended / CONFIG_FILE).write_text(json.dumps({"model": {"path": str(directory / "model")}}))
    with pytest.MonkeyPatch.context() as patch, Store(ended / STORE_FILE) as store:
        patch.setattr(archive, "CHUNK_STEPS", 2)
        for step in range(1, NUM_STEPS + 1):
            add_step(store, tokenizer, step)
            store.archive_before(step)
    copytree(ended, live)
    with Store(live / STORE_FILE) as store:
        listen(live, store.snapshot)
        yield {"ended": ended, "live": live}
        all_served()


@pytest.fixture
def run_dir(run_dirs: dict[str, Path]) -> Path:
    return run_dirs["ended"]


def refrain(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(main, ["samples", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def every_sample(run_dirs: dict[str, Path]) -> list[samples.Sample]:
    return RunSamples(run_dirs["ended"], 60.0).page(SampleFilter(), "", 1000).samples


VALUES = {
    "step": lambda sample: sample.step,
    "epoch": lambda sample: sample.step,
    "reward": lambda sample: sample.reward,
    "length": lambda sample: sample.response_tokens,
    "entropy": lambda sample: sample.entropy,
}


@pytest.mark.parametrize("sort", SORTS)
def test_pages_have_the_samples_in_order(
    run_dir: Path, every_sample: list[samples.Sample], sort: str
) -> None:
    found, value = RunSamples(run_dir, 60.0), VALUES[sort]
    assert len(every_sample) == NUM_STEPS * 5 + 1
    known = [value(sample) for sample in every_sample if value(sample) is not None]
    reverse = sort in ("length", "reward")
    wanted = SampleFilter(sort=sort, reverse=reverse)
    pages = [found.page(wanted, "", 40, offset) for offset in (0, 40)]
    assert {page.num_matching for page in pages} == {len(every_sample)}
    shown = [sample for page in pages for sample in page.samples]
    assert {sample.key for sample in shown} == {sample.key for sample in every_sample}
    values = [value(sample) for sample in shown]
    expected = pytest.approx(sorted(known, reverse=not reverse))
    assert values[: len(known)] == expected, "unscored samples come last"


def test_samples_of_an_older_refrain_are_sorted_by_entropy(
    run_dir: Path, every_sample: list[samples.Sample], tmp_path: Path
) -> None:
    """They lack the column."""
    older = copytree(run_dir, tmp_path / "older")
    with connect(older / STORE_FILE, read_only=False, lock_timeout_s=0.0) as con:
        con.execute(f"UPDATE rollouts SET entropy = NULL WHERE step > {NUM_STEPS // 2}")
    shown = RunSamples(older, 60.0).page(SampleFilter(sort="entropy"), "", 1000).samples
    values = [sample.entropy for sample in shown]
    assert values == sorted((sample.entropy for sample in every_sample), reverse=True)


def test_a_live_run_shows_what_an_ended_one_shows(run_dirs: dict[str, Path]) -> None:
    wanted = SampleFilter(sort="reward", most_reward=0.9)
    for grep in ("", "step 1"):
        ended, live = (RunSamples(run_dirs[kind], 60.0).page(wanted, grep, 9) for kind in run_dirs)
        assert ended == live
        assert len(ended.samples) == 9


@pytest.mark.parametrize(
    ("conditions", "holds"),
    [
        ({"step": 3}, lambda s: s.step == 3),
        ({"prompt": "a"}, lambda s: s.prompt_key == "ab"),
        ({"step": 3, "prompt": "ab", "sample": 1}, lambda s: s.key[1:] == (3, "ab", 1)),
        ({"finish_reason": "length"}, lambda s: s.finish_reason == "length"),
        ({"least_reward": 0.5}, lambda s: s.reward is not None and s.reward >= 0.5),
        ({"most_reward": 0.2}, lambda s: s.reward is not None and s.reward <= 0.2),
        ({"prompt": "'); DROP TABLE rollouts; --"}, lambda _: False),
        ({"split": "validation"}, lambda _: False),
    ],
)
def test_a_filter_keeps_what_it_names(
    run_dir: Path, every_sample: list[samples.Sample], conditions: dict, holds: Any
) -> None:
    page = RunSamples(run_dir, 60.0).page(SampleFilter(**conditions), "", 1000)
    expected = {sample.key for sample in every_sample if holds(sample)}
    assert {sample.key for sample in page.samples} == expected
    assert page.num_matching == len(expected)


def test_a_search_reads_text_and_stops_in_time(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "CHUNK", 24)
    found = RunSamples(run_dir, 60.0)
    page = found.page(SampleFilter(), "step 13 word word", 1000)
    steps = {(sample.step, sample.response_tokens > 20) for sample in page.samples}
    assert (steps, page.num_searched, page.ended_early) == ({(13, True)}, page.num_matching, False)
    first = found.page(SampleFilter(), "step", 3)
    rest = found.page(SampleFilter(), "step", 3, offset=3)
    assert (first.num_searched, rest.num_searched) == (24, 24), "it reads no more than it needs"
    assert not {s.key for s in first.samples} & {s.key for s in rest.samples}
    found.timeout_s = -1.0
    late = found.page(SampleFilter(), "step", 3)
    assert (late.samples, late.num_searched, late.ended_early) == ([], 0, True)


def test_a_live_run_sends_only_the_steps_of_a_page(
    run_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    read = Snapshot.read

    def spy(self: Snapshot, needed: Any) -> Any:
        asked.append(needed.get("rollouts"))
        return read(self, needed)

    monkeypatch.setattr(Snapshot, "read", spy)
    RunSamples(run_dirs["live"], 60.0).page(SampleFilter(reverse=False), "", 9)
    keys, rows = [needed for needed in asked if needed]
    assert "response_token_ids" not in keys.columns
    assert "response_token_ids" in rows.columns
    assert {("step", ">=", 13), ("step", "<=", 14)} <= set(rows.where[0])


def test_tokens_know_who_sampled_them() -> None:
    rollout = make_rollout(tokens=6, versions=[(4, 1), (5, 3)])
    turns = (Turn(2, num_observed=2), Turn(2))
    generated = replace(rollout.generated, inference_logprobs=[-0.1, -0.2, -0.3, -0.4], turns=turns)
    (row,) = rollout_rows([replace(rollout, generated=generated)]).to_pylist()
    names = [name for name in samples._COLUMNS if name in row]
    sample = samples.Sample(**{name: row[name] for name in names}, epoch=0, reward=None, extra=None)
    marks = [(token.logprob, token.policy_version) for token in sample.tokens()]
    expected = [(-0.1, 4), (-0.2, 5), (None, None), (None, None), (-0.3, 5), (-0.4, 5)]
    assert [(lp and round(lp, 6), version) for lp, version in marks] == expected


def test_a_token_is_coloured_by_its_probability() -> None:
    levels = [likelihood_level(math.log(p)) for p in (1.0, 0.91, 0.6, 0.3, 0.02, 0.001)]
    assert levels == [0, 0, 1, 2, 3, 4]
    assert likelihood_level(-math.inf) == 4


@pytest.mark.parametrize("text", ["é€😀 done", "\ufffd", " a  b\n"])
def test_characters_of_several_tokens_are_whole(tmp_path: Path, text: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "model")
    ids = tokenizer.encode(text).ids
    pieces = TokenDecoder(tmp_path / "model").pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    cut = TokenDecoder(tmp_path / "model").pieces(tokenizer.encode("a é").ids[:-1])
    assert "".join(cut) == "a \ufffd", "a response may be cut within a character"


def test_the_command_loads_only_what_it_needs(run_dir: Path) -> None:
    """Each of these takes longer to load than the answer."""
    heavy = ("numpy", "pyarrow", "pandas", "pydantic", "asyncio", "torch", "ray", "prefect")
    code = (
        "import sys; from refrain.flows.cli import main; main(['samples', sys.argv[1]], "
        f"standalone_mode=False); print([name for name in {heavy} if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, run_dir],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_terminal_shows_prompt_response_and_reward(run_dir: Path) -> None:
    shown = refrain(run_dir, "--step", 3, "--sort", "length", "--limit", 2)
    first, second = (part for part in shown.split("\n\n") if part.startswith("step 3"))
    assert "sample 1" in first
    assert "word word" in first
    assert first.splitlines()[1] == "ab"
    assert "cd step 3 word" in second
    assert "2 of 6 samples" in shown
    assert "1 found in 6 of 6 samples" in refrain(
        run_dir, "--step", 3, "--grep", "cd step 3 word word word word word word word"
    )


def test_the_terminal_shows_one_sample_in_detail(run_dir: Path) -> None:
    one = (run_dir, "--step", NUM_STEPS, "--prompt", "<script>", "--sample", 0)
    for colour, legend in (("logprob", "from 90%"), ("version", f"version {NUM_STEPS + 1}")):
        shown = refrain(*one, "--colour", colour)
        for word in ("reward: format", "0.5", "entropy", "2 of 4 accepted, by ", legend):
            assert word in shown
        assert "\x1b[2J" not in shown
        assert "\\x1b[2J" in shown


def test_without_a_tokenizer_ids_are_shown(run_dirs: dict[str, Path], tmp_path: Path) -> None:
    copytree(run_dirs["ended"], tmp_path / "run")
    (tmp_path / "run" / CONFIG_FILE).write_text("{}")
    shown = refrain(tmp_path / "run", "--step", 1, "--limit", 1)
    assert "tokenizer.json cannot be read" in shown
    assert "<65>" in shown


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--sort", "beauty"], "'beauty' is not one of"),
        (["--limit", "0"], "0 is not in the range"),
        (["--step", "3", "--prompt", "ab", "--sample", "9"], "no such sample"),
    ],
)
def test_bad_arguments_are_refused(
    run_dirs: dict[str, Path], arguments: list[str], why: str
) -> None:
    result = CliRunner().invoke(main, ["samples", str(run_dirs["ended"]), *arguments])
    assert result.exit_code == 2
    assert why in result.output


# Pages


class Client:
    """Opens pages, and reads which elements they have."""

    def __init__(self, server: SamplesServer) -> None:
        self.server, self.base = server, f"/{server.site.secret}/"

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        return self.ask("GET", self.base + path, **headers)

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30.0)
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        self.headers = dict(reply.getheaders())
        return reply.status, reply.read().decode()


@pytest.fixture
def client(run_dir: Path) -> Iterator[Client]:
    with SamplesServer(SamplesSite(RunSamples(run_dir, 60.0)), 0) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        serving.start()
        yield Client(server)
        server.shutdown()
        serving.join(10.0)


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name == "href"]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_no_page_carries_out_a_response(client: Client) -> None:
    status, listed = client.get(f"?step={NUM_STEPS}&prompt=%3Cscript%3E")
    links = Elements(listed).links
    pages = [listed, *(client.get(link)[1] for link in links[:2]), client.get("?step=<script>")[1]]
    assert status == 200
    assert "default-src 'none'" in client.headers["Content-Security-Policy"]
    for page in pages:
        found = Elements(page)
        assert not {"script", "img"} & {*found.tags}
        assert "<script>" in found.text
    for page in pages[:3]:
        assert "onerror=alert(1)>&amp;\\x1b[2J" in Elements(page).text


def test_pages_lead_to_each_other(client: Client) -> None:
    assert len(Elements(client.get("")[1]).links) == 2 * 50 + 1
    second = Elements(client.get("?page=2")[1])
    assert second.text.count(" nats a token") == NUM_STEPS * 5 + 1 - 50
    assert [link for link in second.links if "page=" in link] == ["?page=1"]
    over_epochs = Elements(client.get("prompt?prompt=ab")[1]).text
    epochs = [over_epochs.index(f"epoch {epoch}") for epoch in range(4, -1, -1)]
    assert epochs == sorted(epochs)
    status, page = client.get("response?split=train&step=3&prompt=ab&sample=1&colour=version")
    assert status == 200
    assert 'class="version1"' in page
    assert "version 3 version 4" in Elements(page).text
    searched = Elements(client.get("?grep=cd+step+3&least=0")[1]).text
    assert "2 found in" in searched


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("?page=0", "page is 0: give a number from 1"),
        ("?step=x", "step is 'x': give a whole number"),
        ("?least=nan", "a bound of rewards is nan"),
        ("?sort=beauty", "sort is 'beauty': give one of step, "),
        ("?split=test", "split is 'test'"),
        ("?colour=red", "colour is 'red'"),
        ("response?step=3", "samples are at this address"),
    ],
)
def test_bad_addresses_are_explained(client: Client, path: str, why: str) -> None:
    status, page = client.get(path)
    assert (status, why in Elements(page).text) == (400, True)


def test_only_who_knows_the_address_reads(client: Client) -> None:
    name = client.server.url.partition("//")[2].partition("/")[0]
    assert client.get("", Host="evil.example")[0] == 403
    assert client.get("", Host=name)[0] == 200
    assert client.ask("GET", "/")[0] == 404
    assert client.ask("GET", f"/{client.server.site.secret[:-1]}x/")[0] == 404
    assert client.ask("GET", f"{client.base}../etc/passwd")[0] == 404
    assert client.ask("POST", client.base)[0] == 501
    assert client.server.server_address[0] == "127.0.0.1"


def test_requests_are_bounded(client: Client) -> None:
    waiting = [
        http.client.HTTPConnection("127.0.0.1", client.server.port, timeout=30.0)
        for _ in range(MAX_REQUESTS)
    ]
    for one in waiting:
        one.connect()
    with pytest.raises(ConnectionError):
        client.get("")
    for one in waiting:
        one.close()


def test_a_port_in_use_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="give another --serve"):
        SamplesServer(client.server.site, client.server.port)
