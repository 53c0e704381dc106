"""How likely a draft token is to be accepted, learnt from those that were verified. Pure.

A draft token's evidence is how often the history saw what precedes it and in which share of the
cases it followed (`engines.histospec.drafting`). The share itself is no probability: the policy
has moved since, and one sighting says less than eight. So each class of evidence counts its own
verifications, beginning with a guess that a few dozen of them outweigh, and forgets slowly.
"""

from collections.abc import Mapping

import numpy as np

from engines.histospec.drafting import NUM_EVIDENCE, evidence_shares

_NUM_HISTORY = 2 * NUM_EVIDENCE
NUM_CLASSES = _NUM_HISTORY + 8
"""Classes of evidence: of a prompt's own history, the same of the shared one, and the last 8 of
drafts from siblings that are still running, by how much matched."""
_SHARED_GUESS = 0.6
"""First guess of what other prompts' evidence is worth beside the prompt's own."""
_LIVE_GUESS = 0.4
PRIOR_WEIGHT = 4.0
"""Verified tokens that the first guess counts for."""
OPTIMISM = 1.0
"""Standard errors that are added to what a class has shown: what looks worthless after a few
verifications would never be verified again."""
FORGET = 1.0 - 2.0**-8
"""Weight that a class keeps at each step in which it was observed."""


def live_evidence(matched: np.ndarray) -> np.ndarray:
    """Classes of drafts from siblings: uint16 of the shape of `matched`, in tokens."""
    return (_NUM_HISTORY + np.clip(matched, 1, NUM_CLASSES - _NUM_HISTORY) - 1).astype(np.uint16)


def shared_evidence(evidence: np.ndarray) -> np.ndarray:
    """Classes of drafts from the shared index, by those that it has as an index."""
    return evidence + np.uint16(NUM_EVIDENCE)


def is_shared(evidence: np.ndarray) -> np.ndarray:
    """Whether tokens of these classes are from the shared index; bool."""
    return (evidence >= NUM_EVIDENCE) & (evidence < _NUM_HISTORY)


def is_sibling(evidence: np.ndarray) -> np.ndarray:
    """Return which tokens of these classes are from siblings; bool."""
    return evidence >= _NUM_HISTORY


class Acceptance:
    """Per class of evidence: probability that a token is accepted when those before it were."""

    def __init__(self) -> None:
        guesses = np.full(NUM_CLASSES, _LIVE_GUESS)
        guesses[:NUM_EVIDENCE] = evidence_shares()
        guesses[NUM_EVIDENCE:_NUM_HISTORY] = _SHARED_GUESS * evidence_shares()
        self._right = guesses * PRIOR_WEIGHT
        self._tried = np.full(NUM_CLASSES, PRIOR_WEIGHT)
        self.by_class = self._upper_bounds()
        """Probability of acceptance by class, at its upper bound; float64 [NUM_CLASSES]."""

    def state(self) -> dict[str, list]:
        """State that `restore` takes."""
        return {"right": self._right.tolist(), "tried": self._tried.tolist()}

    def restore(self, state: Mapping[str, list]) -> None:
        """Begin with what another one has learnt. Raises ValueError when it is of another kind."""
        right, tried = (np.array(state[name], float) for name in ("right", "tried"))
        if right.shape != (NUM_CLASSES,) or tried.shape != (NUM_CLASSES,) or not (tried > 0).all():
            raise ValueError("acceptance of another version")
        self._right, self._tried = right, tried
        self.by_class = self._upper_bounds()

    def _upper_bounds(self) -> np.ndarray:
        share = self._right / self._tried
        return np.minimum(share + OPTIMISM * np.sqrt(share * (1.0 - share) / self._tried), 1.0)

    @property
    def worth(self) -> np.ndarray:
        """The same of a prompt's own history, as `draft_batch` takes it."""
        return self.by_class[:NUM_EVIDENCE]

    def of_drafts(self, evidence: np.ndarray, num_drafted: np.ndarray) -> np.ndarray:
        """Probability that each draft token is accepted, and so all before it: float64
        [rows, window], falling along a row, 0 where nothing was drafted.

        `evidence`: uint16 [rows, window]. `num_drafted`: int32 [rows].
        """
        drafted = np.arange(evidence.shape[1]) < num_drafted[:, None]
        return np.cumprod(np.where(drafted, self.by_class[evidence], 0.0), axis=1)

    def observe(
        self, evidence: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        """Take in a verification: the accepted tokens were right, the next one was wrong."""
        columns = np.arange(evidence.shape[1])
        right = columns < num_accepted[:, None]
        tried = (columns <= num_accepted[:, None]) & (columns < num_drafted[:, None])
        num_right = np.bincount(evidence[right], minlength=NUM_CLASSES)
        num_tried = np.bincount(evidence[tried], minlength=NUM_CLASSES)
        kept = np.where(num_tried > 0, FORGET, 1.0)
        self._right = self._right * kept + num_right
        self._tried = self._tried * kept + num_tried
        self.by_class = self._upper_bounds()
