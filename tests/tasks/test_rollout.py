"""The requests that a resumed step has yet to generate."""

from tasks.rollout import _left
from tests.rollout.fakes import request


def test_stored_rollouts_are_not_generated_again():
    """The store would refuse a rollout that it has, or the step would count it twice."""
    requests = [(i % 2, request("p", 3, sample_index=i)) for i in range(4)]
    done = {requests[0][1].id, requests[3][1].id}
    assert _left(requests, done) == requests[1:3]
    assert _left(requests, set()) == requests
