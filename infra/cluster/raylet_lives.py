"""Probe of a container that is a node: ends with 0 where a daemon of Ray's runs on the machine."""

import sys

import psutil

sys.exit("raylet" not in {process.name() for process in psutil.process_iter()})
