"""More tensor parallelism for the tail of a stage (PAT). Pure.

layouts.py     engines that share a node's GPUs, and the GPU of each rank
memory.py      whether the GPUs have room for parked engines
remaining.py   remaining tokens of unfinished responses ─┐
costs.py       costs of a switch                        ─┴► engines/control/reshaping.py
"""
