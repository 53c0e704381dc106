"""Each kind of profile point has its own required fields."""

import pytest

from refrain.schemas.latency import ProfilePoint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "decode"}, "decode point needs `context_tokens`"),
        ({"kind": "decode", "context_tokens": 5, "window": 2}, "decode point has no `window`"),
        ({"kind": "prefill", "context_tokens": 5}, "prefill point has no `context_tokens`"),
        ({"kind": "verify", "context_tokens": 5}, "verify point needs `window`"),
        ({"kind": "draft", "window": 5}, "draft point needs `drafter`"),
    ],
)
def test_points_hold_what_their_kind_needs(fields, message):
    with pytest.raises(ValueError, match=message):
        ProfilePoint(batch=1, seconds=1.0, **fields)
