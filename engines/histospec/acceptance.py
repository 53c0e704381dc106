"""How likely a draft token is to be accepted, learnt from those that were verified. Pure.

A draft token's evidence is how often the history saw what precedes it and in which share of the
cases it followed (`engines.histospec.drafting`). The share itself is no probability: the policy
has moved since, and one sighting says less than eight. So each class of evidence counts its own
verifications, and forgets slowly. Until a class has some, others speak for it: a logistic
regression on what its evidence is made of, fitted to all verifications. There are a thousand
classes; a policy with entropy would pay for a try of each.
"""

from collections.abc import Mapping

import numpy as np

from engines.histospec.drafting import NUM_EVIDENCE, evidence_factors, evidence_shares

_NUM_LIVE = 8
_NUM_HISTORY = 2 * NUM_EVIDENCE
NUM_CLASSES = _NUM_HISTORY + _NUM_LIVE
"""Classes of evidence: of a prompt's own history, the same of the shared one, and the last 8 of
drafts from siblings that are still running, by how much matched."""
_SHARED_GUESS = 0.6
"""First guess of what other prompts' evidence is worth beside the prompt's own."""
_LIVE_GUESS = 0.4
PRIOR_WEIGHT, MOST_WEIGHT, WEIGHT_SHARE = 4.0, 128.0, 1 / 4
"""Verified tokens that a regression counts for in a class: so many at first, when it is a guess,
and a share of all that it was fitted to, up to the second number."""
OPTIMISM = 1.0
"""Standard errors that are added to what a class has shown: what looks worthless after a few
verifications would never be verified again."""
FORGET = 1.0 - 2.0**-8
"""Weight that a class keeps at each step in which it was observed."""
REFIT_SHARE, REFIT_TOKENS = 1.25, 4096
"""The regression is fitted anew when so many times as many tokens were verified as at the last
fit, or so many more."""
_FIRST_FIT_TOKENS = 16
_PRECISION = 1.0
"""Ridge of a factor's coefficient: its standard deviation is 1 in log odds."""
_NEWTON_STEPS = 3
_LARGEST_STEP = 2.0  # of a coefficient, in log odds


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
        self._right = np.zeros(NUM_CLASSES)
        self._tried = np.zeros(NUM_CLASSES)
        self._num_observed = self._num_fitted = 0.0
        """Tokens that were verified, now and at the last fit."""
        self._regressions = _regressions()
        self._take_regressions()
        self.by_class = self._upper_bounds()
        """Probability of acceptance by class, at its upper bound; float64 [NUM_CLASSES]."""

    def state(self) -> dict[str, list]:
        """Return what `restore` takes."""
        return {"num_right": self._right.tolist(), "num_tried": self._tried.tolist()}

    def restore(self, state: Mapping[str, list]) -> None:
        """Begin with what another one has learnt. Raise ValueError or KeyError when it is of
        another kind."""
        right, tried = (np.array(state[name], float) for name in ("num_right", "num_tried"))
        if right.shape != (NUM_CLASSES,) or tried.shape != (NUM_CLASSES,) or (right > tried).any():
            raise ValueError("acceptance of another version")
        self._right, self._tried, self._num_observed = right, tried, float(tried.sum())
        self._fit()
        self.by_class = self._upper_bounds()

    @property
    def num_observed(self) -> float:
        """Number of draft tokens that were verified and looked at, until the first wrong one."""
        return self._num_observed

    @property
    def shares(self) -> np.ndarray:
        """Share of each class that was accepted, with the regression's share for a few tokens of
        it; float64 [NUM_CLASSES]."""
        return (self._right + self._weights * self._prior) / (self._tried + self._weights)

    def _upper_bounds(self) -> np.ndarray:
        shares = self.shares
        error = np.sqrt(shares * (1.0 - shares) / (self._tried + self._weights))
        return np.minimum(shares + OPTIMISM * error, 1.0)

    def _fit(self) -> None:
        for one in self._regressions:
            one.fit(self._right[one.classes], self._tried[one.classes])
        self._take_regressions()
        self._num_fitted = self._num_observed

    def _take_regressions(self) -> None:
        self._prior = np.concatenate([one.shares() for one in self._regressions])
        sizes = [one.classes.stop - one.classes.start for one in self._regressions]
        self._weights = np.repeat([one.weight for one in self._regressions], sizes)

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
        self._num_observed += float(num_tried.sum())
        due = min(REFIT_SHARE * self._num_fitted, self._num_fitted + REFIT_TOKENS)
        if self._num_observed >= max(due, _FIRST_FIT_TOKENS):
            self._fit()
        self.by_class = self._upper_bounds()


class _Regression:
    """Logistic regression of some classes on their factors, beside a first guess."""

    def __init__(self, classes: slice, guesses: np.ndarray, factors: np.ndarray) -> None:
        """`guesses`: float64 [classes], shares. `factors`: float64 [classes, factors]."""
        self.classes = classes
        self._guesses = np.log(guesses / (1.0 - guesses))
        self._factors = factors
        self._coefficients = np.zeros(factors.shape[1])
        self.weight = PRIOR_WEIGHT
        """Verified tokens that its share counts for in a class."""

    def shares(self) -> np.ndarray:
        """Return the expected share of each class that is accepted; float64 [classes]."""
        return 1.0 / (1.0 + np.exp(-self._guesses - self._factors @ self._coefficients))

    def fit(self, right: np.ndarray, tried: np.ndarray) -> None:
        """Fit to these counts, float64 [classes], by Newton's method with a ridge."""
        self.weight = min(PRIOR_WEIGHT + WEIGHT_SHARE * float(tried.sum()), MOST_WEIGHT)
        seen = np.flatnonzero(tried)
        right, tried, factors = right[seen], tried[seen], self._factors[seen]
        ridge = _PRECISION * np.eye(factors.shape[1])
        for _ in range(_NEWTON_STEPS if len(seen) else 0):
            shares = self.shares()[seen]
            slope = factors.T @ (right - tried * shares) - ridge @ self._coefficients
            weights = tried * shares * (1.0 - shares)
            step = np.linalg.solve((factors.T * weights) @ factors + ridge, slope)
            self._coefficients += np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)


def _regressions() -> list[_Regression]:
    """Return one for each source and kind of its evidence."""
    blocks = evidence_factors()
    guesses = np.split(evidence_shares(), [len(blocks[0])])
    matched = np.arange(1, _NUM_LIVE + 1) / _NUM_LIVE
    live = np.stack([np.ones(_NUM_LIVE), matched], axis=1)
    kinds = [
        *zip(guesses, blocks, strict=True),
        *((_SHARED_GUESS * guess, block) for guess, block in zip(guesses, blocks, strict=True)),
        (np.full(_NUM_LIVE, _LIVE_GUESS), live),
    ]
    ends = np.cumsum([len(guess) for guess, _ in kinds]).tolist()
    return [
        _Regression(slice(end - len(guess), end), guess, block)
        for end, (guess, block) in zip(ends, kinds, strict=True)
    ]
