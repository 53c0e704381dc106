"""Write event files for TensorBoard: `tensorboard --logdir runs`."""

import json
from collections.abc import Mapping, Sequence
from time import time

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from refrain.engines.tracking.forward import TrackedRun


class TensorboardWriter:
    def __init__(self, run: TrackedRun) -> None:
        self._file = EventFileWriter(str(run.directory))
        self._add([_text("settings", json.dumps(dict(run.settings), indent=1))], 0, time())

    def log(self, metrics: Mapping[str, float], step: int, at_s: float) -> None:
        values = [Summary.Value(tag=name, simple_value=metrics[name]) for name in metrics]
        self._add(values, step, at_s)

    def close(self, *, failed: bool) -> None:
        del failed
        self._file.close()

    def _add(self, values: Sequence[Summary.Value], step: int, at_s: float) -> None:
        self._file.add_event(Event(wall_time=at_s, step=step, summary=Summary(value=values)))
        self._file.flush()


def _text(name: str, text: str) -> Summary.Value:
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary.Value(tag=name, metadata=metadata, tensor=tensor)


open_writer = TensorboardWriter
