"""Liveness probe of a node's container. Exits with 0 if Ray's raylet process runs, else with 1."""

import sys

import psutil

sys.exit("raylet" not in {process.name() for process in psutil.process_iter()})
