"""What a drafter does with messages of several engines, without a model."""

import asyncio

from engines.inference.drafting.draft_link import Feedback
from engines.inference.drafting.vllm_drafter import VLLMDrafter
from engines.specactor.streams import Opened, Verified
from tests.inference.real import CONFIG


class Model:
    """Counts up."""

    def __init__(self, num_tokens, last):
        self.token_ids = [last + 1 + i for i in range(num_tokens)]
        self.finish_reason = "length"


class Counter(VLLMDrafter):
    def __init__(self) -> None:
        super().__init__(CONFIG.engine.drafter_processes[0], alone=True)
        self.sent: list[bytes] = []
        self._socket = self

    async def _generate(self, _, context, num_tokens):
        return Model(num_tokens, context[-1])

    async def send_multipart(self, parts):
        self.sent.append(parts[0])


def opened(id: str) -> Opened:
    return Opened(id, [5, 6, 7], sample_key=1, window=2, coupled=True, max_tokens=50)


async def test_a_message_that_was_lost_ends_the_drafts_of_its_request_alone():
    drafter = Counter()
    drafter._hear(b"one", Feedback(opened=[opened("a"), opened("b")]))
    drafter._hear(b"two", Feedback(opened=[opened("a")]))
    await asyncio.sleep(0.01)
    assert sorted(drafter.sent) == [b"one", b"one", b"two"]
    drafter.sent.clear()
    drafter._hear(b"one", Feedback(verified=[Verified("a", 5, [9]), Verified("b", 3, [8])]))
    drafter._hear(b"two", Feedback(verified=[Verified("a", 3, [8])]))
    await asyncio.sleep(0.01)
    assert sorted(drafter.sent) == [b"one", b"two"]
    assert set(drafter._streams) == {(b"one", "b"), (b"two", "a")}
    await drafter.take_counts()
