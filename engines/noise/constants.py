"""Constants of the noise generator of exact sampling. Needs neither torch nor numba."""

PHILOX_MULTIPLIER, PHILOX_WEYL, PHILOX_ROUNDS = 0xD256D193, 0x9E3779B9, 7
WORD = 2**32 - 1

MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
POSITION = 0xD1342543DE82EF95 - 2**64
