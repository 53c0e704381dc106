"""Objectives: one file each, with its formula and where it comes from.

A policy loss gets the tokens of a micro-batch (`tokens.PolicyTokens`) and the algorithm's settings.
It returns a loss for each token and the tokens that it bounds. `engines.learn.objective` lists the
policy losses by name. The aggregation's weights contain the denominators of the whole minibatch, so
a minibatch's loss is the plain sum over micro-batches and trainer processes, however it is split.

`maxrl` and `opo` compute advantages, and need no torch.
"""
