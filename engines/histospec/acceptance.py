"""Probability that a draft token is accepted, learnt from verified tokens. Pure.

Every draft token comes with evidence. From history, it is how often the tokens before were seen,
and in which share of those cases the token followed (`engines.histospec.drafting`). From a draft
model or n-grams, it is how many of the request's last draft tokens were right. Such a share is no
probability: the policy has moved since, and one occurrence says less than eight. So each class of
evidence counts its own verifications, with slow forgetting. A class with few verifications leans on
a logistic regression over the factors of its evidence, fitted to all verifications. There are a
thousand classes, and with a policy of high entropy trying out each one would cost time.
"""

from collections.abc import Mapping

import numpy as np

from refrain.engines.histospec.drafting import NUM_EVIDENCE, evidence_factors, evidence_shares

_NUM_RECORDS = 16
_FIRST_RECORD = 2 * NUM_EVIDENCE
NUM_CLASSES = _FIRST_RECORD + _NUM_RECORDS
"""Number of evidence classes: those of a prompt's own history, the same ones of the shared indexes,
then 16 of drafts from draft models and n-grams, by the request's record."""
_SHARED_GUESS = 0.6
"""First guess of the acceptance of shared evidence, as a multiple of that of a prompt's own."""
PRIOR_WEIGHT, MOST_WEIGHT, WEIGHT_SHARE = 4.0, 128.0, 1 / 4
"""Weight of a regression in each class, in verified tokens. It starts at `PRIOR_WEIGHT`, when the
regression is a guess, and grows by `WEIGHT_SHARE` of all fitted tokens up to `MOST_WEIGHT`."""
OPTIMISM = 1.0
"""Standard errors added to the measured acceptance of a class. Without them, a class that fails in
its first few verifications would never be verified again."""
FORGET = 1.0 - 2.0**-8
"""Weight that a class keeps at each step that observes it."""
REFIT_SHARE, REFIT_TOKENS = 1.25, 4096
"""Growth of the number of verified tokens that triggers a new fit: this factor since the last fit,
or this many more tokens."""
_FIRST_FIT_TOKENS = 16
_PRECISION = 1.0
"""Ridge penalty of each coefficient: a prior standard deviation of 1 in log odds."""
_NEWTON_STEPS = 3
_LARGEST_STEP = 2.0  # of a coefficient, in log odds


def record_evidence(records: np.ndarray) -> np.ndarray:
    """Return the classes of drafts from draft models and n-grams; uint16, of the shape of
    `records`: float in 0..1, the recent share of right tokens of each request."""
    return (_FIRST_RECORD + np.minimum(records * _NUM_RECORDS, _NUM_RECORDS - 1)).astype(np.uint16)


def shared_evidence(evidence: np.ndarray) -> np.ndarray:
    """Return the classes of drafts from shared indexes, given the classes of the same evidence in a
    prompt's own history."""
    return evidence + np.uint16(NUM_EVIDENCE)


def is_shared(evidence: np.ndarray) -> np.ndarray:
    """Return which tokens of these classes are from a shared index; bool."""
    return (evidence >= NUM_EVIDENCE) & (evidence < _FIRST_RECORD)


class Acceptance:
    """Probability that a token is accepted when those before it were, for each class of
    evidence."""

    def __init__(self) -> None:
        self._right = np.zeros(NUM_CLASSES)
        self._tried = np.zeros(NUM_CLASSES)
        self._num_observed = self._num_fitted = 0.0
        """Verified tokens, now and at the last fit."""
        self._regressions = _regressions()
        self._take_regressions()
        self.by_class = self._upper_bounds()
        """Upper bound of the acceptance probability of each class; float64 [NUM_CLASSES]."""

    def state(self) -> dict[str, list]:
        """Return the state that `restore` takes."""
        return {"num_right": self._right.tolist(), "num_tried": self._tried.tolist()}

    def restore(self, state: Mapping[str, list]) -> None:
        """Start from the state of another instance. Raise ValueError or KeyError if it has another
        format."""
        right, tried = (np.array(state[name], float) for name in ("num_right", "num_tried"))
        if right.shape != (NUM_CLASSES,) or tried.shape != (NUM_CLASSES,) or (right > tried).any():
            raise ValueError("acceptance of another version")
        self._right, self._tried, self._num_observed = right, tried, float(tried.sum())
        self._fit()
        self.by_class = self._upper_bounds()

    @property
    def num_observed(self) -> float:
        """Number of draft tokens that taught something: those up to the first rejected one of each
        draft."""
        return self._num_observed

    @property
    def shares(self) -> np.ndarray:
        """Accepted share of each class, blended with the regression's estimate; float64
        [NUM_CLASSES]."""
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
        """The part of `by_class` for a prompt's own history, as `draft_batch` takes it."""
        return self.by_class[:NUM_EVIDENCE]

    def of_drafts(self, evidence: np.ndarray, num_drafted: np.ndarray) -> np.ndarray:
        """Return the probability that each draft token and all before it are accepted: float64
        [rows, window], falling along a row, 0 where nothing was drafted.

        `evidence`: uint16 [rows, window]. `num_drafted`: int32 [rows].
        """
        drafted = np.arange(evidence.shape[1]) < num_drafted[:, None]
        return np.cumprod(np.where(drafted, self.by_class[evidence], 0.0), axis=1)

    def observe(
        self, evidence: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
    ) -> None:
        """Learn from a verification: the accepted tokens were right, and the next one was wrong."""
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
    """Logistic regression of some classes on their factors, on top of a first guess."""

    def __init__(self, classes: slice, guesses: np.ndarray, factors: np.ndarray) -> None:
        """`guesses`: float64 [classes], accepted shares. `factors`: float64 [classes, factors]."""
        self.classes = classes
        self._guesses = np.log(guesses / (1.0 - guesses))
        self._factors = factors
        self._coefficients = np.zeros(factors.shape[1])
        self.weight = PRIOR_WEIGHT
        """Verified tokens that the regression counts as in each class."""

    def shares(self) -> np.ndarray:
        """Return the expected accepted share of each class; float64 [classes]."""
        return 1.0 / (1.0 + np.exp(-self._guesses - self._factors @ self._coefficients))

    def fit(self, right: np.ndarray, tried: np.ndarray) -> None:
        """Fit to these counts, float64 [classes], by Newton's method with a ridge penalty."""
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
    """Return one regression for each source and kind of evidence."""
    blocks = evidence_factors()
    guesses = np.split(evidence_shares(), [len(blocks[0])])
    records = (np.arange(_NUM_RECORDS) + 0.5) / _NUM_RECORDS
    kinds = [
        *zip(guesses, blocks, strict=True),
        *((_SHARED_GUESS * guess, block) for guess, block in zip(guesses, blocks, strict=True)),
        (records, np.vander(records, 2)),
    ]
    ends = np.cumsum([len(guess) for guess, _ in kinds]).tolist()
    return [
        _Regression(slice(end - len(guess), end), guess, block)
        for end, (guess, block) in zip(ends, kinds, strict=True)
    ]
