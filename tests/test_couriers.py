"""Weights go from node to node along a tree, and reach all nodes when some die or are slow."""

import asyncio
from collections.abc import Iterator

import pytest

from refrain.benchmarks.nodes import ORIGIN, PART_BYTES, LocalNodes, count_copies, random_version
from refrain.engines import couriers
from refrain.engines.couriers import FAN_OUT
from refrain.engines.weights_file import VersionFiles

NUM_NODES = 16


@pytest.fixture
def nodes() -> Iterator[LocalNodes]:
    made = LocalNodes(NUM_NODES)
    with made.in_place():
        yield made


@pytest.fixture
def files() -> Iterator[VersionFiles]:
    made = VersionFiles(num_kept=2)
    yield made
    made.delete()


def assert_whole(paths, file) -> None:
    content = file.path.read_bytes()
    assert [path.read_bytes() == content for path in paths] == [True] * len(paths)


def parent_of(nodes: LocalNodes, file) -> str:
    """Return the first node below the origin."""
    return nodes.couriers[ORIGIN]._readers[file.path][0]


async def until_sent(nodes: LocalNodes, node: str) -> None:
    before = nodes.num_bytes_sent[node]
    while nodes.num_bytes_sent[node] == before:
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_nodes", [2, 8, 64])
async def test_the_trainers_node_sends_to_few_nodes(num_nodes):
    counts = await count_copies(num_nodes)
    copies = counts[f"origin_copies_{num_nodes}_nodes"]
    assert copies == pytest.approx(min(FAN_OUT, num_nodes - 1), abs=0.01)
    assert counts[f"hops_{num_nodes}_nodes"] == {2: 1, 8: 3, 64: 6}[num_nodes]


async def test_no_node_sends_to_more_than_its_children(nodes, files):
    for version in range(4):
        file, before = random_version(files, version), nodes.num_bytes_sent
        assert_whole(await nodes.send(version, file), file)
        sent = {node: num - before[node] for node, num in nodes.num_bytes_sent.items()}
        # Each node also asks the trainer's node for one byte, to learn that the file is there.
        assert max(sent.values()) <= FAN_OUT * file.num_bytes + NUM_NODES
        assert sum(sent.values()) == (NUM_NODES - 1) * (file.num_bytes + 1)


async def test_a_part_goes_on_before_the_next_one_arrives(nodes, files):
    nodes.delays_s[ORIGIN] = 0.02
    file = random_version(files, 0)
    sending = asyncio.create_task(nodes.send(0, file))
    await until_sent(nodes, ORIGIN)
    parent = parent_of(nodes, file)
    await until_sent(nodes, parent)
    assert nodes.couriers[parent]._num_fetched < file.num_bytes
    assert_whole(await sending, file)


async def test_a_parent_dies_in_the_middle(nodes, files):
    nodes.delays_s[ORIGIN] = 0.01
    file = random_version(files, 0)
    fetches = {
        node: asyncio.create_task(nodes.couriers[node].fetch(0, file)) for node in nodes.others
    }
    await until_sent(nodes, ORIGIN)
    dead = parent_of(nodes, file)
    await until_sent(nodes, dead)
    assert nodes.couriers[dead]._num_fetched < file.num_bytes
    nodes.kill(dead)
    paths = [await fetches[node] for node in nodes.others]
    assert len(paths) == NUM_NODES - 2
    assert_whole(paths, file)
    with pytest.raises(asyncio.CancelledError):
        await fetches[dead]
    # Only the children of the dead node turn to the trainer's node.
    assert nodes.num_bytes_sent[ORIGIN] <= 2 * FAN_OUT * file.num_bytes + NUM_NODES


async def test_a_parent_died_before_it_is_asked(nodes, files):
    file = random_version(files, 0)
    first, second, third = nodes.others[:3]
    await nodes.couriers[first].fetch(0, file)
    nodes.kill(first)
    assert_whole([await nodes.couriers[node].fetch(0, file) for node in (second, third)], file)


async def test_only_the_children_of_a_parent_that_hangs_turn_to_the_trainers_node(
    nodes, files, monkeypatch
):
    monkeypatch.setattr(couriers, "PART_S", 1.0)
    monkeypatch.setattr(couriers, "LEVEL_S", 0.5)
    file = random_version(files, 0)
    sending = asyncio.create_task(nodes.send(0, file))
    await until_sent(nodes, ORIGIN)
    nodes.delays_s[parent_of(nodes, file)] = 60.0
    assert_whole(await asyncio.wait_for(sending, 30.0), file)
    assert nodes.num_bytes_sent[ORIGIN] <= 2 * FAN_OUT * file.num_bytes + NUM_NODES


async def test_a_slow_parent_holds_up_only_those_below_it(nodes, files):
    file = random_version(files, 0)
    first, *others = nodes.others
    fetches = [asyncio.create_task(nodes.couriers[first].fetch(0, file))]
    await until_sent(nodes, ORIGIN)
    nodes.delays_s[first] = 0.05
    fetches += [asyncio.create_task(nodes.couriers[node].fetch(0, file)) for node in others]
    done, late = await asyncio.wait(fetches, timeout=0.1)
    assert done
    assert late
    assert_whole([await fetch for fetch in fetches], file)
    assert nodes.num_bytes_sent[ORIGIN] <= FAN_OUT * file.num_bytes + NUM_NODES


async def test_a_node_that_comes_again_keeps_its_place(nodes, files):
    file = random_version(files, 0)
    origin = nodes.couriers[ORIGIN]
    places = [await origin.join(file, node) for node in nodes.others]
    assert places[0] == (None, 1)
    assert places[FAN_OUT] == (nodes.others[0], 2)
    assert [await origin.join(file, node) for node in nodes.others] == places
    assert await origin.join(file, "new") == (nodes.others[(NUM_NODES - 1) // FAN_OUT - 1], 4)


async def test_a_parent_does_not_pass_on_another_trainers_version(nodes, files):
    old, node = random_version(files, 0), nodes.couriers[nodes.others[0]]
    await node.fetch(0, old)
    assert len(await node.pass_on(0, old, 0, PART_BYTES)) == PART_BYTES
    others = VersionFiles(num_kept=2)
    new = random_version(others, 0)
    with pytest.raises(couriers.LostFile, match="has no policy version 0"):
        await node.pass_on(0, new, 0, PART_BYTES)
    others.delete()


async def test_a_parent_does_not_pass_on_memory_of_a_later_version(nodes, files):
    old, node = random_version(files, 0), nodes.couriers[nodes.others[0]]
    await node.fetch(0, old)
    await node.fetch(1, random_version(files, 1))
    later = asyncio.create_task(node.fetch(2, random_version(files, 2)))
    await until_sent(nodes, ORIGIN)
    assert not later.done()
    with pytest.raises(couriers.LostFile):
        await node.pass_on(0, old, 0, PART_BYTES)
    await later


@pytest.mark.parametrize("num_parts", [1, 8])
async def test_a_copy_fails_if_its_file_was_overwritten_meanwhile(nodes, files, num_parts):
    nodes.delays_s[ORIGIN] = 0.05
    file, node = random_version(files, 0), nodes.couriers[nodes.others[0]]
    fetch = asyncio.create_task(node.fetch(0, file))
    while node._num_fetched < min(num_parts * PART_BYTES, file.num_bytes):
        await asyncio.sleep(0)
    assert not fetch.done()
    random_version(files, 1)
    random_version(files, 2)  # In the memory of version 0.
    with pytest.raises(FileNotFoundError):
        await fetch
    assert not list(node._files._dir.path.iterdir())


async def test_readers_learn_at_once_that_a_parents_copy_failed(nodes, files):
    nodes.delays_s[ORIGIN] = 0.05
    file, node = random_version(files, 0), nodes.couriers[nodes.others[0]]
    fetch = asyncio.create_task(node.fetch(0, file))
    await until_sent(nodes, ORIGIN)
    last = asyncio.create_task(node.pass_on(0, file, file.num_bytes - 1, 1))
    await asyncio.sleep(0)
    file.path.unlink()
    with pytest.raises(couriers.LostFile):
        await asyncio.wait_for(last, 10.0)
    with pytest.raises(FileNotFoundError):
        await fetch
