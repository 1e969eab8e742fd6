"""See inside a memory: record what it does, draw it, open it in a browser."""

from tensor_memory.inspect.chunk_trace import ChunkTrace
from tensor_memory.inspect.layer_recording import Chunk, LayerRecording
from tensor_memory.inspect.place_layer import PlaceLayerRecording, PlaceToken
from tensor_memory.inspect.place_trace import RecordedTrace
from tensor_memory.inspect.recorder import record
from tensor_memory.inspect.recording import Recording

__all__ = [
    "Chunk",
    "ChunkTrace",
    "LayerRecording",
    "PlaceLayerRecording",
    "PlaceToken",
    "RecordedTrace",
    "Recording",
    "record",
]
