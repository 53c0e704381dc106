"""More tensor parallelism for the tail of a stage (PAT). Pure.

layouts.py     which engines share a node's GPUs, and on which of them each rank is
memory.py      whether the GPUs have room for engines that wait
remaining.py   how long an unfinished response goes on ─┐
costs.py       what a switch costs                     ─┴► engines/control/reshaping.py
"""
