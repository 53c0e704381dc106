"""Measure how long forward passes of engines and drafters take."""
