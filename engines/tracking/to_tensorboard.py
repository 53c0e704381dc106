"""Write event files for TensorBoard: `tensorboard --logdir runs`."""

import json
from collections.abc import Mapping
from time import time
from typing import Any

from engines.tracking.forward import TrackedRun


class TensorboardWriter:
    def __init__(self, directory: str) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._file = EventFileWriter(directory)

    def log(self, metrics: Mapping[str, float], step: int, at_s: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=metrics[name]) for name in metrics]
        self._add(values, step, at_s)

    def log_text(self, name: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        plugin = SummaryMetadata.PluginData(plugin_name="text")
        value = Summary.Value(
            tag=name,
            metadata=SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        self._add([value], 0, time())

    def close(self, *, failed: bool) -> None:
        del failed
        self._file.close()

    def _add(self, values: list[Any], step: int, at_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._file.add_event(Event(wall_time=at_s, step=step, summary=Summary(value=values)))
        self._file.flush()


def open_writer(run: TrackedRun) -> TensorboardWriter:
    writer = TensorboardWriter(str(run.directory))
    writer.log_text("settings", json.dumps(dict(run.settings), indent=1))
    return writer
